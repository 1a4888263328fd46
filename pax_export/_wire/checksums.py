"""Checksums of bytes: CRC-32, as zlib has it, and CRC-32C, that of TensorFlow's files.

``_crc32.c`` is compiled when the package is installed, where that can be done.  Elsewhere zlib
computes CRC-32, and numpy CRC-32C: a checksum is linear, so that of many pieces of one length is
computed at once, and each is then moved over the piece behind it.
"""

from __future__ import annotations

import functools
import importlib
import os
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

_POLYNOMIAL = 0x82F63B78
_ONES = 0xFFFFFFFF
_LANE = 1 << 12
_AT_ONCE = 1 << 26


def _by_numpy(content: Any, value: int) -> int:
    """The CRC-32C of bytes behind those whose checksum is given."""
    state, content = value ^ _ONES, np.frombuffer(content, np.uint8)
    for begin in range(0, len(content), _AT_ONCE):
        state = _moved_on(state, content[begin : begin + _AT_ONCE])
    return state ^ _ONES


def _moved_on(state: int, content: np.ndarray) -> int:
    """The state behind some bytes, from that before them."""
    lanes = len(content) // _LANE
    if lanes > 1:
        columns = np.ascontiguousarray(content[: lanes * _LANE].reshape(lanes, _LANE).T)
        states, table = np.zeros(lanes, np.uint32), _table()
        for column in columns:
            states = table[(states ^ column) & 255] ^ (states >> 8)
        over = _over_a_lane()
        for each in states.tolist():
            parts = (over[place][state >> 8 * place & 255] for place in range(4))
            state = functools.reduce(int.__xor__, parts, each)
        content = content[lanes * _LANE :]
    table = _table().tolist()
    for byte in content.tobytes():
        state = table[(state ^ byte) & 255] ^ (state >> 8)
    return state


@functools.cache
def _table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> 1) ^ np.where(table & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
    return table


@functools.cache
def _over_a_lane() -> list[list[int]]:
    """What becomes of each byte of a state behind a lane of zeros, by its place and value."""
    states = np.arange(256, dtype=np.uint32) << np.arange(0, 32, 8, dtype=np.uint32)[:, None]
    for _ in range(_LANE):
        states = _table()[states & 255] ^ (states >> 8)
    return states.tolist()


_Checksum = Callable[[Any, int], int]


def _found() -> tuple[_Checksum, _Checksum, bool]:
    """CRC-32 and CRC-32C of bytes behind others, and whether memory is read as fast."""
    try:
        if os.environ.get("PAX_EXPORT_PURE_PYTHON", "0") in ("", "0"):
            compiled = importlib.import_module("pax_export._wire._crc32")
            crc32 = compiled.crc32 if compiled.fast else zlib.crc32
            return crc32, compiled.crc32c, compiled.fast
    except ImportError:  # not compiled, or for another kind of machine
        pass
    return zlib.crc32, _by_numpy, False


crc32, crc32c, fast = _found()


def masked_crc32c(content: Any) -> int:
    """The CRC-32C of bytes as TensorFlow writes it, so that a checksum of checksums is none.

    Example:
        >>> hex(crc32c(b"123456789", 0)), hex(masked_crc32c(b"123456789"))
        ('0xe3069283', '0xc78ab0e5')
    """
    crc = crc32c(content, 0)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & _ONES
