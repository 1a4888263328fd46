"""A table of LevelDB, as the index of a checkpoint is: blocks of keys in order, and values."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from pax_export.weights.sources import _crc32c
from pax_export.weights.sources._binary_file import BinaryFile

_FOOTER = 48
#: A key repeats what it shares with the one before, so that few bytes could make many.
_LONGEST_KEY, _MOST_OF_KEYS = 1 << 14, 1 << 28
_TRAILER = 5


class BlockFile(BinaryFile):
    """The values of a table, which lie in memory."""

    def __init__(self, content: bytes, where: str):
        self.where, self.size = where, len(content)
        self._number, self._content = -1, content

    def read(self, offset: int, count: int) -> bytes:
        """Some of the bytes."""
        self.require(offset, count)
        return self._content[offset : offset + count]


def entries(file: BinaryFile) -> Iterator[tuple[bytes, BinaryFile]]:
    """The keys, and the bytes of the values."""
    footer = file.read(file.size - _FOOTER, _FOOTER)
    _, _, behind = _handle(footer, 0)  # the place of a block that says nothing of the names
    offset, size, _ = _handle(footer, behind)
    left = _MOST_OF_KEYS
    for _, place in _block(file, offset, size):
        offset, size, _ = _handle(place, 0)
        for key, value in _block(file, offset, size):
            left -= len(key)
            if left < 0:
                raise ValueError("names without end in the index")
            yield key, BlockFile(value, file.where)


def _block(file: BinaryFile, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    raw = file.read(offset, size + _TRAILER)
    kind, crc = struct.unpack_from("<BI", raw, size)
    if kind:
        raise ValueError(f"a block of the index that is packed in the way {kind}")
    if crc != _crc32c.masked(np.frombuffer(raw, np.uint8)[: size + 1]):
        raise ValueError("a block of the index that differs from its checksum")
    (restarts,) = struct.unpack_from("<I", raw, size - 4)
    end = size - 4 - 4 * restarts
    at, key = 0, b""
    while at < end:
        shared, at = _varint(raw, at)
        own, at = _varint(raw, at)
        length, at = _varint(raw, at)
        if shared > len(key) or shared + own > _LONGEST_KEY or at + own + length > end:
            raise ValueError("an entry of the index that does not fit it")
        key = key[:shared] + raw[at : at + own]
        yield key, raw[at + own : at + own + length]
        at += own + length


def _handle(raw: bytes, at: int) -> tuple[int, int, int]:
    """Where a block begins, its size, and where this ends."""
    offset, at = _varint(raw, at)
    size, at = _varint(raw, at)
    return offset, size, at


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(10):
        byte = raw[at]
        at, value = at + 1, value | (byte & 127) << (7 * place)
        if byte < 128:
            return value, at
    raise ValueError("a whole number of more than 64 bits")
