"""Dtypes at the boundary of an export: keys as uint32, 4-bit integers as 8 bits, others as is."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from pax_export._foundations.errors import UnsupportedDtypeError
from pax_export._foundations.jax import is_key
from pax_export._foundations.types import Array, ArrayLike, DTypeLike, HasShape
from pax_export.export.artifact.dimensions import STRING, name_of, numpy_dtype  # noqa: F401

_WIDENED = {"int4": np.dtype("int8"), "uint4": np.dtype("uint8")}

_SUPPORTED = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 "
    "float64 float8_e4m3fn float8_e5m2 complex64 complex128".split()
)


def is_floating(dtype: DTypeLike) -> bool:
    """Whether numbers have gradients; not float8, which TensorFlow cannot add."""
    inexact = not is_key(dtype) and bool(jax.numpy.issubdtype(dtype, jax.numpy.inexact))
    return inexact and np.dtype(dtype).itemsize > 1


def struct_of(array: HasShape) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def shape_of(struct: HasShape) -> tuple[int | str, ...]:
    """The sizes, with symbolic ones as text."""
    return tuple(size if isinstance(size, int) else str(size) for size in struct.shape)


def check(dtype: DTypeLike, where: str) -> None:
    """Refuses a dtype that consumers do not have, or that jax would narrow."""
    if is_key(dtype):
        return
    dtype = np.dtype(dtype)
    if dtype == STRING:
        raise UnsupportedDtypeError(
            "Inputs and outputs of a model cannot be strings.",
            where=where,
            got="string",
            write="numbers here, and preprocess= or postprocess= with TensorFlow functions "
            "between them and the text",
        )
    if dtype.name not in _SUPPORTED and dtype.name not in _WIDENED:
        raise UnsupportedDtypeError(
            "The dtype is unsupported in exports.",
            where=where,
            got=dtype.name,
            write=f"one of {', '.join(sorted({*_SUPPORTED, *_WIDENED}))}",
        )
    narrow = jax.dtypes.canonicalize_dtype(dtype)
    if narrow != dtype:
        raise UnsupportedDtypeError(
            f"jax would narrow this array to {narrow} while 64-bit numbers are off.",
            where=where,
            got=dtype.name,
            write=f'"{narrow}", or jax.config.update("jax_enable_x64", True) before exporting',
        )


def stored(struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The type outside of jax of an array of this shape and dtype."""
    if is_key(struct.dtype):
        return jax.eval_shape(jax.random.key_data, struct)
    wide = _WIDENED.get(np.dtype(struct.dtype).name)
    return struct if wide is None else jax.ShapeDtypeStruct(struct.shape, wide)


def store(array: ArrayLike) -> Any:
    """The array in its type outside of jax; jax says of its own what is no array."""
    dtype = getattr(array, "dtype", None)
    if dtype is not None and is_key(dtype):
        return jax.random.key_data(array)
    wide = _WIDENED.get(getattr(dtype, "name", ""))
    return array if wide is None else jax.numpy.asarray(array, wide)


def restore(array: jax.Array, struct: jax.ShapeDtypeStruct) -> Any:
    """The inverse of `store`, for an array described by `struct`."""
    if is_key(struct.dtype):
        return jax.random.wrap_key_data(array, impl=_key_impl(struct))
    narrow = np.dtype(struct.dtype).name in _WIDENED
    return array.astype(struct.dtype) if narrow else array


def _key_impl(struct: jax.ShapeDtypeStruct) -> Any:
    found = []

    def look(key: Array) -> Array:
        found.append(jax.random.key_impl(key))
        return key

    jax.eval_shape(look, struct)
    return found[0]
