"""The checksum of TensorFlow's files, CRC-32C, many bytes at a time.

A checksum is linear: that of many pieces of one length is computed at once, and each is then
moved over the piece behind it.
"""

from __future__ import annotations

import functools

import numpy as np

_POLYNOMIAL = 0x82F63B78
_ONES = 0xFFFFFFFF
_LANE = 1 << 12
_AT_ONCE = 1 << 26


def crc32c(content: np.ndarray) -> int:
    """The checksum of some bytes.

    Example:
        >>> hex(crc32c(np.frombuffer(b"123456789", np.uint8)))
        '0xe3069283'
    """
    state = _ONES
    for begin in range(0, len(content), _AT_ONCE):
        state = _moved_on(state, content[begin : begin + _AT_ONCE])
    return state ^ _ONES


def masked(content: np.ndarray) -> int:
    """The same as TensorFlow writes it: so that a checksum of checksums is none of them."""
    crc = crc32c(content)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & _ONES


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
