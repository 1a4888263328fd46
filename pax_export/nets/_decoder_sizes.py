"""What a Decoder and its cache are given: dtypes, sizes and integers."""

from __future__ import annotations

import numbers
from typing import Any

import jax.numpy as jnp
import numpy as np

from pax_export._errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export.nn import integer

_MOST = np.iinfo(np.int32).max


def weight_dtype(value: Any, where: str) -> np.dtype | None:
    """The dtype of weights; None for what they have."""
    dtype = None if value is None else _dtype(value)
    if dtype is None or jnp.issubdtype(dtype, jnp.floating):
        return dtype
    raise InvalidArgumentTypeError(
        "The weights of a language model are floating-point numbers.",
        where=f"{where}: dtype",
        got=f"{value!r:.80}",
        write='dtype="bfloat16", or another of these',
    )


def cache_dtype(value: Any, where: str, name: str = "dtype") -> np.dtype:
    """The dtype of a cache.

    Args:
        value: a dtype, or its name.
        where: the function that was given it.
        name: of its argument.
    """
    dtype = _dtype(value)
    if dtype == jnp.int8 or jnp.issubdtype(dtype, jnp.floating):
        return dtype
    raise InvalidArgumentTypeError(
        "A cache holds floating-point numbers, or int8 with scales.",
        where=f"{where}: {name}",
        got=f"{value!r:.80}",
        write=f'{name}="bfloat16", or "int8"',
    )


def _dtype(value: Any) -> np.dtype:
    try:
        return jnp.dtype(value)
    except (TypeError, ValueError, SyntaxError):  # of numpy, which reads words as a language
        return np.dtype(object)


def integers(value: Any, what: str, where: str) -> Any:
    """An array of integers, of whatever jax makes one."""
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError, OverflowError):  # words, None, or lists of different lengths
        array = None
    if array is None or not jnp.issubdtype(array.dtype, jnp.integer):
        raise InvalidArgumentTypeError(
            f"{what} are integers.",
            where=where,
            got=f"{value!r:.80}" if array is None else f"{array.dtype}{list(array.shape)}",
            write=f"{what.lower()}.astype(jnp.int32)",
        )
    return array


def cache_size(value: Any, name: str) -> Any:
    """A number of rows, or of places, of a cache; one with a name while an export is traced."""
    if not isinstance(value, numbers.Integral) and _has_name(value):
        return value
    where = f"Decoder.init_cache: {name}"
    size = integer(value, where, least=0)
    if size > _MOST:
        raise InvalidArgumentError(
            "A cache counts its tokens in int32.",
            where=where,
            got=f"{name}={size:.3g}" if size < 1e300 else "a number of many digits",
            write=f"at most {_MOST}",
        )
    return size


def _has_name(size: Any) -> bool:
    from jax import export  # which a program without such sizes has no need of

    return export.is_symbolic_dim(size)
