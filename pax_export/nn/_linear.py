"""Linear and Embed."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pax_export._foundations.check import checked_integer
from pax_export._foundations.errors import InvalidArgumentTypeError
from pax_export._foundations.types import Array, PRNGKey
from pax_export.core import Declared, Module, ParameterModule
from pax_export.nn import _arguments as arg
from pax_export.nn._arguments import Initializer, normal
from pax_export.nn._explicit import join_specs, spec_of, under_auto_axes
from pax_export.precision.quantized import QuantizedArray, rows, times


def _linear_init(layer: Module) -> Initializer:
    return normal(1 / math.sqrt(layer.in_dim))


class Linear(ParameterModule):
    """A dense layer: ``y = x · weight + bias``.

    Args:
        in_dim: the size of the last axis of the input.
        out_dim: the size of the last axis of the output.
        with_bias: whether there is a bias; without one there is no attribute ``bias``.
        w_init: ``w_init(key, shape)`` makes the weight; N(0, 1/in_dim) by default (variance).
        b_init: the same for the bias; N(0, 1/in_dim) by default.
        rng_key: the key of the initial values; the next of the ambient stream by default.
        name: shown by ``repr`` and ``summary``.

    Attributes:
        weight: ``[in_dim, out_dim]``.
        bias: ``[out_dim]``.

    Raises:
        InvalidArgumentError: a size is less than one.
        InvalidArgumentTypeError: a size is not an integer.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> layer = pax.Linear(3, 5)
        >>> layer(jnp.ones((8, 3))).shape
        (8, 5)
    """

    arrays: ClassVar = {
        "weight": Declared(
            "kernel",
            ("in", "out"),
            init=_linear_init,
            apply=lambda layer, weight, x: times(jnp.asarray(x), weight),
        ),
        "bias": Declared("bias", ("out",), init=_linear_init, optional=True),
    }

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        with_bias: bool = True,
        w_init: Initializer | None = None,
        b_init: Initializer | None = None,
        *,
        rng_key: PRNGKey | None = None,
        name: str | None = None,
    ):
        super().__init__(name=name)
        self.in_dim = checked_integer(in_dim, "Linear.in_dim", least=1)
        self.out_dim = checked_integer(out_dim, "Linear.out_dim", least=1)
        self.with_bias = bool(with_bias)
        weight_key, bias_key = jax.random.split(arg.key_or_next(rng_key, "Linear.rng_key"))
        default = _linear_init(self)
        shape = (self.in_dim, self.out_dim)
        self.weight = (w_init or default)(weight_key, shape)
        if self.with_bias:
            size = (self.out_dim,)
            self.bias = (b_init or default)(bias_key, size)

    def __call__(self, x: Array) -> jax.Array:
        """Applies the layer to the last axis.

        Args:
            x: ``[..., in_dim]``.

        Returns:
            ``[..., out_dim]``.

        Raises:
            InvalidArgumentError: (an AssertionError too) no axis.
            InvalidArgumentTypeError: (a TypeError) another width than `in_dim`.
        """
        x = arg.as_array(x)
        self._check_input(x)
        weight, bias = self.weight, self.bias if self.with_bias else None
        out = lambda: join_specs(*spec_of(x)[:-1], spec_of(jax.tree.leaves(weight)[0])[-1])  # noqa: E731
        return under_auto_axes(_apply_affine, (x, weight, bias), out)

    def _check_input(self, x: jax.Array) -> None:
        arg.require_batch_axis(x, "[batch, in_dim]", self)
        if x.shape[-1] != self.in_dim:
            raise InvalidArgumentTypeError(
                f"The last axis of the input must have size {self.in_dim}.",
                where=repr(self),
                got=f"shape {x.shape}",
                write=f"an input [..., {self.in_dim}], or Linear({x.shape[-1]}, {self.out_dim})",
            )

    _repr = arg.repr_method("in_dim", "out_dim", "with_bias")


def _apply_affine(x: Array, weight: Array, bias: Array | None) -> jax.Array:
    y = times(x, weight)
    return y if bias is None else y + bias


class Embed(ParameterModule):
    """Looks up a trainable vector for each integer.

    Args:
        vocab_size: the number of vectors.
        embed_dim: the size of each.
        w_init: ``w_init(key, shape)`` makes the table; normal with a standard
            deviation of 0.01 by default.
        rng_key: the key of the initial values; the next of the ambient stream by default.
        name: shown by ``repr`` and ``summary``.

    Attributes:
        weight: ``[vocab_size, embed_dim]``.

    Raises:
        InvalidArgumentError: a size is less than one.
        InvalidArgumentTypeError: a size is not an integer.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> pax.Embed(100, 8)(jnp.array([[3, 1, 4]])).shape
        (1, 3, 8)
    """

    arrays: ClassVar = {
        "weight": Declared(
            "table",
            ("vocab", "embed"),
            outputs=("embed",),
            init=lambda layer: normal(0.01),
            apply=lambda layer, table, ids: rows(table, jnp.asarray(ids)),
        )
    }

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        w_init: Initializer | None = None,
        *,
        rng_key: PRNGKey | None = None,
        name: str | None = None,
    ):
        super().__init__(name=name)
        self.vocab_size = checked_integer(vocab_size, "Embed.vocab_size", least=1)
        self.embed_dim = checked_integer(embed_dim, "Embed.embed_dim", least=1)
        shape = (self.vocab_size, self.embed_dim)
        key = arg.key_or_next(rng_key, "Embed.rng_key")
        self.weight = (w_init or normal(0.01))(key, shape)

    def __call__(self, x: Array) -> jax.Array:
        """Looks up vectors.

        Args:
            x: integers of any shape ``[...]``.  Negative ones count from the
                end of the table; indices outside of it return its nearest row.

        Returns:
            ``[..., embed_dim]``.

        Raises:
            InvalidArgumentTypeError: (a TypeError) not integers.
        """
        x = jnp.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise InvalidArgumentTypeError(
                "Embed needs integers.",
                where=repr(self),
                got=f"{x.dtype}{list(x.shape)}",
                write="x.astype(jnp.int32)",
            )
        if x.dtype.itemsize < 4:
            x = x.astype(
                jnp.int32
            )  # jax compares indices with the size of the table in their dtype
        weight = self.weight
        weight = weight if isinstance(weight, QuantizedArray) else jnp.asarray(weight)
        out = lambda: join_specs(*spec_of(x))  # noqa: E731
        return under_auto_axes(rows, (weight, x), out)

    _repr = arg.repr_method("vocab_size", "embed_dim")


def weight_in_use(layer: Module) -> Any:
    """The weight that a layer computes with, adapters included, for a tied head."""
    found = getattr(type(layer), "_weight_in_use", None)
    return layer.weight if found is None else found(layer)
