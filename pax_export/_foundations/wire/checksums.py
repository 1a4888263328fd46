"""CRC-32C by google-crc32c, and CRC-32 by zlib-ng, or else by Python's slower zlib."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

try:
    from zlib_ng.zlib_ng import crc32

    fast = True
except ImportError:
    crc32, fast = zlib.crc32, False

__all__ = ["crc32", "crc32c", "fast", "masked_crc32c"]

_ONES = 0xFFFFFFFF


def crc32c(content: Any, value: int = 0) -> int:
    """Returns the CRC-32C of bytes, continuing the checksum `value`."""
    import google_crc32c  # a process that only serves an export may not have it

    return google_crc32c.extend(value, np.frombuffer(content, np.uint8))


def masked_crc32c(content: Any) -> int:
    """The CRC-32C of bytes as TensorFlow writes it, so that a checksum of checksums is none.

    Example:
        >>> hex(crc32c(b"123456789")), hex(masked_crc32c(b"123456789"))
        ('0xe3069283', '0xc78ab0e5')
    """
    crc = crc32c(content)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & _ONES
