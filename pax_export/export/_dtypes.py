"""Which dtypes can leave jax, and how those that cannot stand outside.

Outside of jax a typed random key is its key data, a uint32 array.  Everything
else keeps its dtype, or is refused: no number is narrowed in silence.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from pax_export._errors import UnsupportedDtypeError
from pax_export._jax import dimension_names

__all__ = ["check", "dimension_names", "is_key", "numpy_dtype", "restore", "store", "stored"]

# Not int4 and uint4: TensorFlow reads their bytes in another order than jax.
_SUPPORTED = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 "
    "float64 float8_e4m3fn float8_e5m2 complex64 complex128".split()
)


def is_key(dtype: Any) -> bool:
    """Whether this is the dtype of typed random keys."""
    return jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def numpy_dtype(name: str) -> np.dtype:
    """The dtype of a name in a manifest; numpy alone does not know all of them."""
    return jax.numpy.dtype(name)


def check(dtype: Any, where: str) -> None:
    """Refuses a dtype that consumers do not have, or that jax would narrow.

    Raises:
        UnsupportedDtypeError: with the path of the array and the way out.
    """
    if is_key(dtype):
        return
    dtype = np.dtype(dtype)
    if dtype.name not in _SUPPORTED:
        raise UnsupportedDtypeError(
            "This dtype cannot be exported.",
            where=where,
            got=dtype.name,
            write=f"one of {', '.join(sorted(_SUPPORTED))}",
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
    """How an array of this shape and dtype stands outside of jax."""
    return jax.eval_shape(jax.random.key_data, struct) if is_key(struct.dtype) else struct


def store(array: Any) -> Any:
    """The array as it stands outside of jax: keys become their data."""
    return jax.random.key_data(array) if is_key(jax.numpy.result_type(array)) else array


def restore(array: Any, struct: jax.ShapeDtypeStruct) -> Any:
    """The inverse of `store`, for an array described by `struct`."""
    if not is_key(struct.dtype):
        return array
    return jax.random.wrap_key_data(array, impl=_key_impl(struct))


def _key_impl(struct: jax.ShapeDtypeStruct) -> Any:
    found = []

    def look(key: Any) -> Any:
        found.append(jax.random.key_impl(key))
        return key

    jax.eval_shape(look, struct)
    return found[0]
