"""CRC-32 (zip) and CRC-32C (TensorFlow).

google-crc32c computes CRC-32C.  CRC-32 comes from zlib-ng where it is installed (the extra
``safetensors`` brings it), else from Python's own zlib, which takes several times as long.
"""

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
    """The CRC-32C of bytes, which continue those whose checksum is `value`."""
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
