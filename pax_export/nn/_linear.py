"""Linear: a dense layer."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from pax_export._errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export.core import ParameterModule
from pax_export.nn._arguments import Initializer, as_array, integer, key_or_next, normal


class Linear(ParameterModule):
    """A dense layer: ``y = x · weight + bias``.

    Args:
        in_dim: the size of the last axis of the input.
        out_dim: the size of the last axis of the output.
        with_bias: whether there is a bias; without one there is no attribute
            ``bias``.
        w_init: ``w_init(key, shape)`` makes the weight; N(0, 1/in_dim) by
            default (variance).
        b_init: the same for the bias; N(0, 1/in_dim) by default.
        rng_key: the key of the initial values; the next of the ambient stream
            by default.
        name: shown by ``repr`` and ``summary``.

    Attributes:
        weight: ``[in_dim, out_dim]``.
        bias: ``[out_dim]``.

    Raises:
        InvalidArgumentError: a size is less than one.
        InvalidArgumentTypeError: a size is no integer.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> layer = pax.Linear(3, 5)
        >>> layer(jnp.ones((8, 3))).shape
        (8, 5)
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        with_bias: bool = True,
        w_init: Initializer | None = None,
        b_init: Initializer | None = None,
        *,
        rng_key: Any = None,
        name: str | None = None,
    ):
        super().__init__(name=name)
        self.in_dim = integer(in_dim, "Linear.in_dim", least=1)
        self.out_dim = integer(out_dim, "Linear.out_dim", least=1)
        self.with_bias = bool(with_bias)
        weight_key, bias_key = jax.random.split(key_or_next(rng_key))
        default = normal(1 / math.sqrt(self.in_dim))
        self.weight = (w_init or default)(weight_key, (self.in_dim, self.out_dim))
        if self.with_bias:
            self.bias = (b_init or default)(bias_key, (self.out_dim,))

    def __call__(self, x: Any) -> jax.Array:
        """Applies the layer to the last axis.

        Args:
            x: ``[..., in_dim]``, with at least one axis before the last.

        Returns:
            ``[..., out_dim]``.

        Raises:
            InvalidArgumentError: (an AssertionError too) less than two axes.
            InvalidArgumentTypeError: (a TypeError) another width than `in_dim`.
        """
        x = as_array(x)
        self._check(x)
        y = jnp.dot(x, self.weight)
        return y + self.bias if self.with_bias else y

    def _check(self, x: jax.Array) -> None:
        if x.ndim < 2:
            raise InvalidArgumentError(
                "Linear needs an input with a batch axis: at least two axes.",
                where=repr(self),
                got=f"shape {x.shape}",
                write="layer(x[None])[0] for a single example",
            )
        if x.shape[-1] != self.in_dim:
            raise InvalidArgumentTypeError(
                f"The last axis of the input must have size {self.in_dim}.",
                where=repr(self),
                got=f"shape {x.shape}",
                write=f"an input [..., {self.in_dim}], or Linear({x.shape[-1]}, {self.out_dim})",
            )

    def _repr(self, info: dict[str, Any] | None = None) -> str:
        own = {
            "in_dim": self.in_dim,
            "out_dim": self.out_dim,
            "with_bias": self.with_bias,
        }
        return super()._repr({**own, **(info or {})})
