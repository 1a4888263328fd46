"""Arrays that are read from disk on use."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from pax_export._types import DTypeLike
from pax_export.weights import is_key


class StoredArray:
    """An array of a checkpoint, with shape and dtype, whose values are on disk.

    It has no arithmetic.  `read` and ``numpy.asarray`` read the array at each call, without
    caching.

    Attributes:
        name: the dotted name, including that of the tree.
        shape: the shape.
        dtype: the dtype.
    """

    __slots__ = ("_read", "dtype", "name", "shape")

    def __init__(self, name: str, shape: tuple[int, ...], dtype: Any, read: Callable[[], Any]):
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self._read = read

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the array in bytes."""
        return self.size * int(self.dtype.itemsize)

    def read(self) -> Any:
        """Reads the array as numpy, or as a jax array of typed keys."""
        return self._read()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        if is_key(self.dtype):
            raise TypeError("keys are no numbers: use jax.random.key_data(array.read())")
        array = self._read()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"StoredArray({self.name}: {self.dtype}{list(self.shape)})"
