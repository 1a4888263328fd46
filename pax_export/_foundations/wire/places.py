"""Bounds-checked random access to bytes."""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import numpy as np


class RandomAccessBytes(ABC):
    """A file, or a part of the memory: its size, and the bytes at each place."""

    size: int

    @abstractmethod
    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes from an offset on; an error if the content ends before."""

    @abstractmethod
    def array(self, dtype: Any, shape: Iterable[int], offset: int) -> np.ndarray:
        """Returns the array at an offset, in C order; a view if it is large."""

    def unpack(self, kind: str, offset: int) -> tuple[Any, ...]:
        """Numbers of a kind of `struct`, e.g. ``"<2I"``."""
        return struct.unpack(kind, self.read(offset, struct.calcsize(kind)))

    def require(self, offset: int, count: int) -> None:
        """Raises unless some bytes are all in the file."""
        if offset < 0 or count < 0 or offset + count > self.size:
            end = offset + count
            raise ValueError(f"bytes {offset} to {end} of a file of {self.size} bytes")


class Memory(RandomAccessBytes):
    """Bytes in memory, or memory-mapped."""

    def __init__(self, content: bytes | memoryview):
        self._content = memoryview(content)
        self.size = len(self._content)

    def unpack(self, kind: str, offset: int) -> tuple[Any, ...]:
        try:
            # A negative place would be counted from the end.
            return struct.unpack_from(kind, self._content, offset if offset >= 0 else self.size)
        except struct.error:
            self.require(offset, struct.calcsize(kind))
            raise

    def read(self, offset: int, count: int) -> bytes:
        self.require(offset, count)
        return bytes(self._content[offset : offset + count])

    def array(self, dtype: Any, shape: Iterable[int], offset: int) -> np.ndarray:
        dtype, shape = np.dtype(dtype), tuple(shape)
        count = math.prod(shape) * dtype.itemsize
        self.require(offset, count)
        return np.frombuffer(self._content[offset : offset + count], dtype).reshape(shape)
