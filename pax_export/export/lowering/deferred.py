"""Arrays that are gathered from their devices, or read from disk, when they are written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pax_export.checkpoint import StoredArray, on_host
from pax_export.export.tracing import dtypes


class Deferred:
    """An array as it is stored, made anew each time that numpy asks for it.

    An export of a model that lies on many devices, or on disk, holds one such
    array at a time.
    """

    def __init__(self, struct: jax.ShapeDtypeStruct, read: Callable[[], np.ndarray]):
        self.shape: tuple[int, ...] = struct.shape
        self.dtype = np.dtype(struct.dtype)
        self.size = math.prod(self.shape)
        self.nbytes = self.size * self.dtype.itemsize
        self._read = read

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self._read()
        return array if dtype is None else array.astype(dtype, copy=False)


def stored(value: Any, defer: bool) -> Any:
    """A leaf as it stands outside of jax.

    Args:
        value: an array, or one on disk.
        defer: whether one that is not in this machine's memory as a whole may
            stay where it is until it is read.
    """
    if isinstance(value, StoredArray):
        read = Deferred(_struct(value), lambda: on_host(dtypes.store(value.read())))
    elif defer and isinstance(value, jax.Array) and len(value.sharding.device_set) > 1:
        read = Deferred(_struct(value), lambda: on_host(dtypes.store(value)))
    else:
        return dtypes.store(value)
    return read if defer else np.asarray(read)


def _struct(value: Any) -> jax.ShapeDtypeStruct:
    return dtypes.stored(jax.ShapeDtypeStruct(value.shape, value.dtype))
