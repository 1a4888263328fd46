"""An array that stays on disk until it is read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from pax_export.weights import is_key


class StoredArray:
    """An array of a checkpoint: its shape and dtype here, its numbers on disk.

    It has no arithmetic.  `read`, and so ``numpy.asarray``, reads the array each
    time that it is called, and keeps nothing.

    Attributes:
        name: its dotted name, with that of its tree.
        shape: its shape.
        dtype: its dtype.
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
        """How much memory it takes once it is read."""
        return self.size * int(self.dtype.itemsize)

    def read(self) -> Any:
        """The array: one of numpy, or a jax array of typed keys."""
        return self._read()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if is_key(self.dtype):
            raise TypeError("keys are no numbers: use jax.random.key_data(array.read())")
        array = self._read()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"StoredArray({self.name}: {self.dtype}{list(self.shape)})"
