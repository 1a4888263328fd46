"""Arguments of layers: checks, normal forms and initializers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pax_export._foundations.check import checked_integer
from pax_export._foundations.errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export._foundations.jax import is_tracer
from pax_export._foundations.types import Array, DTypeLike, PRNGKey, PyTree
from pax_export.core import Module, filled_array, next_rng_key, sample_padded

Initializer = Callable[[jax.Array, tuple[int, ...]], Any]
"""A function of a key and a shape that makes an array of that shape."""


def normal(stddev: float) -> Initializer:
    """Draws from N(0, stddev²), like `jax.nn.initializers.normal` of jax 0.10."""
    return lambda rng_key, shape: sample_padded(jax.random.normal, rng_key, shape, stddev)


def variance_scaling(scale: float) -> Initializer:
    """Draws from N(0, scale / fan_in), like jax 0.10 with ``"fan_in"`` and ``"normal"``."""

    def draw(rng_key: PRNGKey, shape: tuple[int, ...]) -> jax.Array:
        variance = np.asarray(scale / math.prod(shape[:-1]), jnp.result_type(float))
        return normal(float(np.sqrt(variance)))(rng_key, shape)

    return draw


def zeros(rng_key: PRNGKey, shape: tuple[int, ...]) -> jax.Array:
    """An initializer that ignores its key."""
    return filled_array(shape, 0)


def ones(rng_key: PRNGKey, shape: tuple[int, ...]) -> jax.Array:
    """An initializer that ignores its key."""
    return filled_array(shape, 1)


# --- checks and normal forms ----------------------------------------------------------
# Layers keep tuples and plain Python numbers: static data that cannot change is fast to flatten,
# and two layers built from ``2`` and ``np.int64(2)`` have equal treedefs. ``where`` is the place
# in error messages, for example ``Linear.in_dim``.


def checked_even(value: int, where: str) -> int:
    """The value as an even Python int of at least two."""
    number = checked_integer(value, where, least=2)
    if number % 2:
        raise InvalidArgumentError(
            "This argument must be even.", where=where, got=repr(value), write="an even number"
        )
    return number


def require_divisor(
    number: int, parts: str, whole: int, of: str, where: str, write: str | None = None
) -> None:
    """Raises if the channels cannot be split into this number of parts, such as heads."""
    if whole % number:
        raise InvalidArgumentError(
            f"The number of {parts} must divide that of {of}.",
            where=where,
            got=f"{number} {parts} for {whole} {of}",
            write=write or f"a divisor of {whole}",
        )


def per_axis(value: int | Sequence[int], axes: int, where: str) -> tuple[int, ...]:
    """One positive integer for each spatial axis; a single one is repeated."""
    values = tuple(value) if isinstance(value, Sequence) else (value,) * axes
    if len(values) != axes:
        raise InvalidArgumentError(
            f"This argument needs one integer for each of {axes} spatial axes.",
            where=where,
            got=repr(value),
            write=f"an integer, or a sequence of {axes}",
        )
    return tuple([checked_integer(x, where, least=1) for x in values])


def key_or_next(rng_key: PRNGKey | None, where: str) -> Any:
    """The key that a layer was given, or the next of the ambient stream."""
    return next_rng_key() if rng_key is None else checked_key(rng_key, where)


def checked_key(rng_key: PRNGKey | None, where: str) -> Any:
    """A random key, legacy or typed, which must be an array."""
    dtype = getattr(rng_key, "dtype", None)
    if dtype is None or not (dtype == jnp.uint32 or jnp.issubdtype(dtype, jax.dtypes.prng_key)):
        raise InvalidArgumentTypeError(
            "This argument must be a random key.",
            where=where,
            got=f"{type(rng_key).__name__}: {rng_key!r}"[:120],
            write=f"{where.split('.')[-1]}=jax.random.key(42)",
        )
    return rng_key


# Every layer calls these three in a trace; jax's own functions are slower.


def as_array(value: PyTree) -> jax.Array:
    """``jnp.asarray(value)``."""
    return value if is_tracer(value) else jnp.asarray(value)


def common_dtype(*arrays: jax.Array) -> Any:
    """``jnp.result_type(*arrays)``."""
    first = arrays[0].dtype
    is_common = all(getattr(x, "dtype", None) == first for x in arrays[1:])
    return first if is_common else jnp.result_type(*arrays)


@functools.cache
def at_least_float32(dtype: DTypeLike) -> Any:
    """A dtype, or float32 if that is wider: sums of half-precision numbers overflow."""
    return jnp.promote_types(dtype, jnp.float32)


def cast(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """``x.astype(dtype)``, skipped if it changes nothing, because it takes time in a trace."""
    return x if x.dtype == dtype and not x.weak_type else x.astype(dtype)


# The two below take the layer, not its text: that takes longer to make than the check.


def require_rank(x: Array, rank: int, form: str, layer: Module) -> None:
    """Raises unless an input has as many axes as a layer needs, e.g. those of ``NHWC``."""
    if x.ndim != rank:
        raise InvalidArgumentError(
            f"The input must have {rank} axes, {form}.",
            where=repr(layer),
            got=f"shape {x.shape}",
            write="x[None] to add a batch axis" if x.ndim == rank - 1 else None,
        )


def with_one_batch_axis(
    x: jax.Array, form: str, layer: Module
) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """The input with one batch axis, and a function that restores its leading axes.

    `form` has a letter for each axis of ``[batch, *rest]``.
    """
    rank = len(form)
    if x.ndim == rank:
        return x, _return_same
    if x.ndim < rank - 1:
        require_rank(x, rank, form, layer)
    leading, rest = x.shape[: 1 - rank], x.shape[1 - rank :]
    return x.reshape((math.prod(leading), *rest)), lambda y: y.reshape((*leading, *y.shape[1:]))


def require_batch_axis(x: jax.Array, form: str, layer: Module) -> None:
    """Raises for a scalar."""
    if x.ndim == 0:
        raise InvalidArgumentError(
            f"The input must have the form {form}.",
            where=repr(layer),
            got=f"shape {x.shape}",
        )


def _return_same(y: jax.Array) -> jax.Array:
    return y


def require_channels(x: Array, axis: int, size: int, layer: Module) -> None:
    """Raises unless the number of channels of an input is that of the layer."""
    if x.shape[axis] != size:
        write = f"an input of that many channels, or a layer built for {x.shape[axis]} channels"
        if (format := getattr(layer, "data_format", "")) and x.shape[1 if axis > 1 else -1] == size:
            other = format[0] + "C" + format[1:-1] if axis > 1 else format.replace("C", "") + "C"
            write = f"data_format={other!r}, or {write}"
        raise InvalidArgumentError(
            f"The input must have {size} channels on axis {axis}.",
            where=repr(layer),
            got=f"shape {x.shape}",
            write=write,
        )


def repr_method(*names: str) -> Callable[..., str]:
    """Makes a method ``_repr``, for a class body, that shows these attributes."""

    def _repr(self: Module, info: dict[str, Any] | None = None) -> str:
        own = {name: getattr(self, name) for name in names}
        return Module._repr(self, {**own, **(info or {})})

    return _repr
