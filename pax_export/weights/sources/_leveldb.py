"""A table of LevelDB, as the index of a checkpoint is: blocks of keys in order, and values."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from pax_export._wire import varint
from pax_export.weights.sources import _crc32c
from pax_export.weights.sources._binary_file import BinaryFile

_FOOTER = 48
#: A key repeats what it shares with the one before, so that few bytes could make many.
_LONGEST_KEY, _MOST_OF_KEYS = 1 << 14, 1 << 28
_TRAILER = 5


def entries(file: BinaryFile) -> Iterator[tuple[bytes, bytes]]:
    """The keys and the values."""
    footer = file.read(file.size - _FOOTER, _FOOTER)
    _, _, behind = _handle(footer, 0)  # the place of a block that says nothing of the names
    offset, size, _ = _handle(footer, behind)
    left, unread = _MOST_OF_KEYS, file.size
    for _, place in _block(file, offset, size):
        offset, size, _ = _handle(place, 0)
        unread -= size
        if unread < 0:
            raise ValueError("a block of the index that is named again and again")
        for key, value in _block(file, offset, size):
            left -= len(key)
            if left < 0:
                raise ValueError("names without end in the index")
            yield key, value


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
        shared, at = varint(raw, at, len(raw))
        own, at = varint(raw, at, len(raw))
        length, at = varint(raw, at, len(raw))
        if shared > len(key) or shared + own > _LONGEST_KEY or at + own + length > end:
            raise ValueError("an entry of the index that does not fit it")
        key = key[:shared] + raw[at : at + own]
        yield key, raw[at + own : at + own + length]
        at += own + length


def _handle(raw: bytes, at: int) -> tuple[int, int, int]:
    """Where a block begins, its size, and where this ends."""
    offset, at = varint(raw, at, len(raw))
    size, at = varint(raw, at, len(raw))
    return offset, size, at
