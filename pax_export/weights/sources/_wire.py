"""The wire format of protocol buffers: numbered fields, read where they lie.

What is long, such as the bytes of an array, is given as the place where it lies and not read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from pax_export.weights.sources._binary_file import BinaryFile, Stream

Span = tuple[int, int]
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
_LONGEST_TEXT = 1 << 20


class Message:
    """A message: the part of a file where its fields lie."""

    __slots__ = ("file", "span")

    def __init__(self, file: BinaryFile, span: Span | None = None):
        self.file = file
        self.span = (0, file.size) if span is None else span

    def fields(self) -> Iterator[tuple[int, int | Message]]:
        """Each field's number, and its value: a whole number, or what it holds as a message.

        Floats are given as the messages of their bytes.
        """
        begin, end = self.span
        stream = self.file.stream(begin, end - begin)
        size = end - begin
        while stream.tell() < size:
            tag = _varint(stream)
            number, kind = tag >> 3, tag & 7
            if not number:
                raise ValueError("a field with the number 0")
            if kind == _VARINT:
                yield number, _varint(stream)
                continue
            if kind not in (_EIGHT, _BYTES, _FOUR):
                raise ValueError(f"a field of the kind {kind}")
            length = {_EIGHT: 8, _FOUR: 4}.get(kind) or (_varint(stream) if kind == _BYTES else 0)
            first = stream.tell()
            if first + length > size:
                raise ValueError(f"a field of {length} bytes, where {size - first} are left")
            stream.seek(first + length)
            yield number, Message(self.file, (begin + first, begin + first + length))

    @property
    def size(self) -> int:
        """So many bytes long is it."""
        return self.span[1] - self.span[0]

    def content(self) -> bytes:
        """Its bytes."""
        return self.file.read(self.span[0], self.size)

    def text(self) -> str:
        """Its bytes as a text, which names something."""
        if self.size > _LONGEST_TEXT:
            raise ValueError(f"a text of {self.size} bytes")
        return self.content().decode("utf-8")

    def number(self) -> float:
        """A float of four or of eight bytes."""
        return struct.unpack({4: "<f", 8: "<d"}[self.size], self.content())[0]

    def varints(self) -> np.ndarray:
        """Whole numbers one behind the other, with the sign that they have in 64 bits."""
        raw = np.frombuffer(self.content(), np.uint8)
        ends = np.flatnonzero(raw < 128)
        if not len(raw):
            return np.empty(0, np.int64)
        if not len(ends) or ends[-1] != len(raw) - 1:
            raise ValueError("whole numbers without an end")
        starts = np.concatenate([[0], ends[:-1] + 1])
        lengths = ends - starts + 1
        if lengths.max() > 10:
            raise ValueError("a whole number of more than 64 bits")
        values = np.zeros(len(ends), np.uint64)
        for place in range(int(lengths.max())):
            there = lengths > place
            digits = (raw[starts[there] + place] & 127).astype(np.uint64)
            values[there] |= digits << np.uint64(7 * place)
        return values.view(np.int64)


def _varint(stream: Stream) -> int:
    value = 0
    for place in range(10):
        byte = stream.read(1)
        if not byte:
            raise ValueError("a whole number without an end")
        value |= (byte[0] & 127) << (7 * place)
        if byte[0] < 128:
            return value & ((1 << 64) - 1)
    raise ValueError("a whole number of more than 64 bits")


def signed(value: int | Message) -> int:
    """A whole number with the sign that it has in 64 bits."""
    number = whole(value)
    return number - (1 << 64) if number >> 63 else number


def whole(value: int | Message) -> int:
    """A whole number, or an error if the field holds something else."""
    if not isinstance(value, int):
        raise ValueError("a message where a whole number belongs")
    return value


def message(value: int | Message) -> Message:
    """What a field holds, or an error if that is a whole number."""
    if not isinstance(value, Message):
        raise ValueError("a whole number where a message belongs")
    return value
