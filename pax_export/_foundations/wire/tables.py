"""Reads tables of files: flat buffers, and LevelDB in checkpoints of TensorFlow."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pax_export._foundations.wire.content import (
    RandomAccessBytes,
    encode_varint,
    masked_crc32c,
    read_varint,
)
from pax_export._foundations.wire.protobuf import Message, MessageFields, to_signed

#: A list that claims to hold more tables than this is damaged.
_MOST = 1_000_000
#: A list takes four bytes for an entry, and is read a few times.  Many tables that have one
#: long list in common would make hours of work of a small file.
_MOST_OF_A_BYTE = 4
#: No table of a format that is read here has a field of a higher number that is asked for.
_MOST_FIELDS = 64


def root(file: RandomAccessBytes) -> FlatTable:
    """The table that a flat buffer begins with."""
    return FlatTable(file, file.unpack("<I", 0)[0], [_MOST_OF_A_BYTE * file.size])


class FlatTable:
    """A table: its fields by number; each may be absent."""

    __slots__ = ("_known", "_left", "_offsets", "_size", "begin", "file")

    def __init__(self, file: RandomAccessBytes, begin: int, left: list[int]):
        self.file, self.begin = file, begin
        self._left = left  # entries of lists that may still be read, over all tables
        self._offsets = begin - file.unpack("<i", begin)[0]
        self._size = file.unpack("<H", self._offsets)[0]
        self._known: tuple[int, ...] | None = None

    def _field(self, number: int) -> int | None:
        known = self._known
        if known is None:  # the offsets of all fields are read on the first access
            count = min(max(0, self._size - 4) // 2, _MOST_FIELDS)
            self._known = known = self.file.unpack(f"<{count}H", self._offsets + 4)
        offset = known[number] if number < len(known) else 0
        return self.begin + offset if offset else None

    def number(self, number: int, kind: str, default: int = 0) -> int:
        """Returns a number stored in the table itself."""
        at = self._field(number)
        return default if at is None else self.file.unpack(kind, at)[0]

    def span(self, number: int, itemsize: int) -> tuple[int, int]:
        """Returns the offset and length of a vector; all of it is in the file."""
        at = self._field(number)
        if at is None:
            return 0, 0
        begin = at + self.file.unpack("<I", at)[0]
        count = self.file.unpack("<I", begin)[0]
        self.file.require(begin + 4, count * itemsize)
        return begin + 4, count

    def numbers(self, number: int, dtype: str) -> np.ndarray:
        """A list of numbers."""
        begin, count = self.span(number, np.dtype(dtype).itemsize)
        self._take(count)
        return self.file.array(dtype, (count,), begin)

    def text(self, number: int, most: int) -> str:
        """Returns a string, or its first bytes."""
        begin, size = self.span(number, 1)
        return self.file.read(begin, min(size, most)).decode("utf-8", "replace")

    def table(self, number: int) -> FlatTable | None:
        """Another table."""
        at = self._field(number)
        if at is None:
            return None
        return FlatTable(self.file, at + self.file.unpack("<I", at)[0], self._left)

    def tables(self, number: int) -> list[FlatTable]:
        """A list of tables."""
        begin, count = self.span(number, 4)
        if count > _MOST:
            raise ValueError(f"a list of {count} tables")
        self._take(count)
        offsets = self.file.unpack(f"<{count}I", begin) if count else ()
        file, left = self.file, self._left
        return [FlatTable(file, begin + 4 * at + each, left) for at, each in enumerate(offsets)]

    def _take(self, count: int) -> None:
        self._left[0] -= count
        if self._left[0] < 0:
            raise ValueError("the same lists in many tables")


# --- LevelDB, the index of a checkpoint -------------------------------------------------

#: The end of a table.
LEVELDB_MAGIC = bytes.fromhex("57fb808b247547db")
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
    return bytes(file) + (about + index).ljust(_FOOTER - len(LEVELDB_MAGIC), b"\0") + LEVELDB_MAGIC


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


_MOST_DIMENSIONS = 64


class SavedTensor:
    """The entry of an array in a checkpoint's index: a `BundleEntryProto`."""

    def __init__(self, value: Message):
        fields = MessageFields(value)
        if 7 in fields:
            raise ValueError("a variable that is kept in slices, which is not read")
        self.dtype, self.shard, self.offset, self.size = map(fields.whole, (1, 3, 4, 5))
        sums = [int.from_bytes(each.content(), "little") for each in fields.messages(6)]
        self.crc: int | None = sums[-1] if sums else None
        self.shape: list[int] = []
        for shape in fields.messages(2)[-1:]:
            dimensions = MessageFields(shape).messages(2)
            if len(dimensions) > _MOST_DIMENSIONS:
                raise ValueError(f"a shape of {len(dimensions)} dimensions")
            sizes = [MessageFields(each).all(1) for each in dimensions]
            self.shape = [to_signed(each[-1]) if each else 0 for each in sizes]
        if any(size < 0 for size in self.shape):
            raise ValueError(f"the shape {self.shape!r:.100}")

    @property
    def same(self) -> tuple[Any, ...]:
        """A key that is equal for entries of the same array."""
        return self.dtype, tuple(self.shape), self.size, self.crc
