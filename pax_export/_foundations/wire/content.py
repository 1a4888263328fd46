"""Bytes: bounds-checked random access, varints, and checksums.

CRC-32C is by google-crc32c, and CRC-32 by zlib-ng, or else by Python's slower zlib.
"""

from __future__ import annotations

import math
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import numpy as np

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:
    crc32 = zlib.crc32


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


# --- varints: little-endian groups of seven bits ------------------------------------------

#: The length in bytes of the longest one, of 64 bits.
LONGEST = 10
_BITS = (1 << 64) - 1


def read_varint(raw: bytes, at: int, end: int) -> tuple[int, int]:
    r"""Reads an unsigned varint at `at`; returns it and the next offset.

    Example:
        >>> read_varint(b"\x05\x80\x01", 1, 3)
        (128, 3)
    """
    if at < end and raw[at] < 128:  # as most are
        return raw[at], at + 1
    value = 0
    for group, byte in enumerate(raw[at : min(end, at + LONGEST)]):
        value |= (byte & 127) << 7 * group
        if byte < 128:
            return value & _BITS, at + group + 1
    if end - at < LONGEST:
        raise ValueError("a whole number without an end")
    raise ValueError("a whole number of more than 64 bits")


def encode_varint(number: int) -> bytes:
    r"""Encodes an integer as a varint; a negative one in 64 bits.

    Example:
        >>> encode_varint(5), encode_varint(128), len(encode_varint(-1))
        (b'\x05', b'\x80\x01', 10)
    """
    parts, number = [], number & _BITS
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


# --- checksums ------------------------------------------------------------------------

#: What numpy reads bytes of.
Bytes = bytes | bytearray | memoryview | np.ndarray
_ONES = 0xFFFFFFFF


def masked_crc32c(content: Bytes) -> int:
    """The CRC-32C of bytes as TensorFlow writes it, so that a checksum of checksums is none.

    Example:
        >>> hex(masked_crc32c(b"123456789"))
        '0xc78ab0e5'
    """
    import google_crc32c  # a process that only serves an export may not have it

    crc = google_crc32c.extend(0, np.frombuffer(content, np.uint8))
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & _ONES
