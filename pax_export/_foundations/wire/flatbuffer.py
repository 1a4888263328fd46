"""Reads flat buffers: tables of fields with relative offsets."""

from __future__ import annotations

import numpy as np

from pax_export._foundations.wire.content import RandomAccessBytes

#: A longer list of tables is none.
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
