"""Bytes: bounds-checked random access, varints, checksums, and dtypes by their numbers.

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


# --- dtypes of arrays by their numbers in files, as numpy and jax call them -------------

#: Of `onnx.proto`.
ONNX_DTYPES = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64",
    9: "bool", 10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 14: "complex64",
    15: "complex128", 16: "bfloat16", 17: "float8_e4m3fn", 18: "float8_e4m3fnuz",
    19: "float8_e5m2", 20: "float8_e5m2fnuz", 21: "uint4", 22: "int4", 23: "float4_e2m1fn",
    24: "float8_e8m0fnu",
}  # fmt: skip
#: Of TFLite's `schema.fbs`.
TFLITE_DTYPES = {
    0: "float32", 1: "float16", 2: "int32", 3: "uint8", 4: "int64", 6: "bool", 7: "int16",
    8: "complex64", 9: "int8", 10: "float64", 11: "complex128", 12: "uint64", 15: "uint32",
    16: "uint16", 18: "bfloat16",
}  # fmt: skip
#: Of TensorFlow's `types.proto`.
TENSORFLOW_DTYPES = {
    1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", 7: "string",
    8: "complex64", 9: "int64", 10: "bool", 14: "bfloat16", 17: "uint16", 18: "complex128",
    19: "float16", 22: "uint32", 23: "uint64", 24: "float8_e5m2", 25: "float8_e4m3fn",
}  # fmt: skip

#: The identifier of TFLite files, after the first four bytes.
TFLITE_MARK = b"TFL3"
