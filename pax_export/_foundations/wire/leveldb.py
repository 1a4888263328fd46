"""Reads LevelDB tables, such as the index of a TensorFlow checkpoint."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence

from pax_export._foundations.wire.content import (
    RandomAccessBytes,
    encode_varint,
    masked_crc32c,
    read_varint,
)

#: The end of a table.
MAGIC = bytes.fromhex("57fb808b247547db")
_FOOTER = 48
#: Limit: keys share prefixes with the key before, so a few bytes could expand to many.
_LONGEST_KEY, _MOST_OF_KEYS = 1 << 14, 1 << 28
_TRAILER = 5
#: The number of keys between two that are stored without a shared prefix.
_RESTART = 16


def table_entries(file: RandomAccessBytes) -> Iterator[tuple[bytes, bytes]]:
    """The keys and the values."""
    footer = file.read(file.size - _FOOTER, _FOOTER)
    _, _, behind = _read_handle(footer, 0)  # the handle of the meta index, which has no names
    offset, size, _ = _read_handle(footer, behind)
    left, unread = _MOST_OF_KEYS, file.size
    for _, handle in _read_block(file, offset, size):
        offset, size, _ = _read_handle(handle, 0)
        unread -= size
        if unread < 0:
            raise ValueError("a block of the index that is named again and again")
        for key, value in _read_block(file, offset, size):
            left -= len(key)
            if left < 0:
                raise ValueError("names without end in the index")
            yield key, value


def _read_block(file: RandomAccessBytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    raw = file.read(offset, size + _TRAILER)
    kind, crc = struct.unpack_from("<BI", raw, size)
    if kind:
        raise ValueError(f"a block of the index that is packed in the way {kind}")
    if crc != masked_crc32c(raw[: size + 1]):
        raise ValueError("a block of the index that differs from its checksum")
    (restarts,) = struct.unpack_from("<I", raw, size - 4)
    end = size - 4 - 4 * restarts
    at, key = 0, b""
    while at < end:
        shared, at = read_varint(raw, at, len(raw))
        own, at = read_varint(raw, at, len(raw))
        length, at = read_varint(raw, at, len(raw))
        if shared > len(key) or shared + own > _LONGEST_KEY or at + own + length > end:
            raise ValueError("an entry of the index that does not fit it")
        key = key[:shared] + raw[at : at + own]
        yield key, raw[at + own : at + own + length]
        at += own + length


def _read_handle(raw: bytes, at: int) -> tuple[int, int, int]:
    """Reads a block handle: its offset, its size, and the end of the handle."""
    offset, at = read_varint(raw, at, len(raw))
    size, at = read_varint(raw, at, len(raw))
    return offset, size, at


def write_table(values: Mapping[bytes, bytes]) -> bytes:
    """Returns a table of one block, with the bytes that TensorFlow writes."""
    keys, file = sorted(values), bytearray()
    entries = _append_block(file, [(key, values[key]) for key in keys])
    about = _append_block(file, [])
    above = bytes([keys[-1][0] + 1])  # a key that is larger than all
    index = _append_block(file, [(above, entries)])
    return bytes(file) + (about + index).ljust(_FOOTER - len(MAGIC), b"\0") + MAGIC


def _append_block(file: bytearray, pairs: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Appends a block; returns its handle."""
    block = _write_block(pairs)
    handle = encode_varint(len(file)) + encode_varint(len(block))
    file += block + b"\0" + struct.pack("<I", masked_crc32c(block + b"\0"))
    return handle


def _write_block(pairs: Sequence[tuple[bytes, bytes]]) -> bytes:
    block, restarts, before = bytearray(), [], b""
    for number, (key, value) in enumerate(pairs):
        if number % _RESTART == 0:
            restarts.append(len(block))
            before = b""
        differ = (at for at, (one, other) in enumerate(zip(before, key)) if one != other)
        shared = next(differ, min(len(before), len(key)))
        block += b"".join(map(encode_varint, (shared, len(key) - shared, len(value))))
        block += key[shared:] + value
        before = key
    restarts = restarts or [0]
    return bytes(block) + struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))
