"""Feed-forward blocks: GatedDense and PlainDense, and DenseBlock of the Transformer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax

from pax_export._foundations.check import checked_choice
from pax_export._foundations.types import Array
from pax_export.core import Module
from pax_export.nn import _arguments as arg
from pax_export.nn._arguments import Initializer, variance_scaling, zeros
from pax_export.nn._linear import Linear

ACTIVATIONS: dict[str, Callable[[Any], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


class GatedDense(Module):
    """``down(activation(gate(x)) * up(x))`` (Shazeer, 2020).

    With ``"silu"`` it is SwiGLU, with ``"gelu_tanh"`` or ``"gelu"`` GeGLU.

    Args:
        dim: the size of the last axis of input and output.
        hidden_dim: the hidden size.
        activation: ``"silu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"relu"``.
        with_bias: whether the three layers have a bias.
        w_init: ``w_init(key, shape)`` makes the weights, as for a `Linear`.

    Attributes:
        gate: the `Linear` that is activated.
        up: the parallel `Linear`.
        down: the output `Linear`.

    Raises:
        InvalidArgumentError: a size is less than one, or an unknown activation.
        InvalidArgumentTypeError: a size is not an integer.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> pax.GatedDense(4, 12)(jnp.ones((2, 4))).shape
        (2, 4)
    """

    axes_of_layers: ClassVar = {
        "gate": {"in": "embed", "out": "mlp"},
        "up": {"in": "embed", "out": "mlp"},
        "down": {"in": "mlp", "out": "embed"},
    }

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        activation: str = "silu",
        with_bias: bool = False,
        w_init: Initializer | None = None,
    ):
        super().__init__()
        self.activation = checked_choice(activation, tuple(ACTIVATIONS), "GatedDense.activation")
        linear = functools.partial(
            Linear, with_bias=with_bias, w_init=w_init, b_init=zeros if with_bias else None
        )
        self.gate, self.up = linear(dim, hidden_dim), linear(dim, hidden_dim)
        self.down = linear(hidden_dim, dim)

    def __call__(self, x: Array) -> jax.Array:
        """Applies the layers to the last axis.

        Args:
            x: ``[..., dim]``.

        Returns:
            ``[..., dim]``.

        Raises:
            InvalidArgumentError: no axis.
            InvalidArgumentTypeError: another width than ``dim``.
        """
        return self.down(ACTIVATIONS[self.activation](self.gate(x)) * self.up(x))

    _repr = arg.repr_method("activation")


class PlainDense(Module):
    """Two dense layers with an activation between, as in GPT-2."""

    axes_of_layers: ClassVar = {
        "up": {"in": "embed", "out": "mlp"},
        "down": {"in": "mlp", "out": "embed"},
    }

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        activation: str,
        with_bias: bool,
        w_init: Initializer | None,
    ):
        super().__init__()
        self.activation = activation
        linear = functools.partial(
            Linear, with_bias=with_bias, w_init=w_init, b_init=zeros if with_bias else None
        )
        self.up, self.down = linear(dim, hidden_dim), linear(hidden_dim, dim)

    def __call__(self, x: Array) -> jax.Array:
        return self.down(ACTIVATIONS[self.activation](self.up(x)))


# --- the feed-forward block of a Transformer ------------------------------------------


class DenseBlock(Module):
    """Two dense layers with gelu between, four times as wide inside.

    The initial weights have variance ``w_init_scale / fan_in``.
    """

    axes_of_layers: ClassVar = {
        "fc1": {"in": "embed", "out": "mlp"},
        "fc2": {"in": "mlp", "out": "embed"},
    }

    def __init__(self, dim: int, w_init_scale: float):
        super().__init__()
        w_init = variance_scaling(w_init_scale)
        self.fc1 = Linear(dim, 4 * dim, w_init=w_init)
        self.fc2 = Linear(4 * dim, dim, w_init=w_init)

    def __call__(self, x: Array) -> jax.Array:
        return self.fc2(jax.nn.gelu(self.fc1(x)))
