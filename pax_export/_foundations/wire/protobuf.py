"""Protocol buffers: reads them without descriptors, and writes dicts by schemas.

What is written is byte for byte Google's deterministic serialization.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from pax_export._foundations.wire.content import (
    LONGEST,
    RandomAccessBytes,
    encode_varint,
    read_varint,
)

_VARINT, _BYTES = 0, 2
#: The sizes of fields of other kinds.
_FIXED = {1: 8, 5: 4}
#: Wire types of fields of fixed size, by their `struct` format.
_FORMATS = {"<I": 5, "<f": 5}
_LONGEST_TEXT = 1 << 20
#: The most fields of a message that are kept together.
_MOST_FIELDS = 1 << 22
#: Bytes read at a time, at most, of skipped content too.
_PIECE = 1 << 12
#: The header of a field: its number and kind, and its size.
_HEAD = 2 * LONGEST


class Message:
    """A message: a part of a file with fields.

    Example:
        >>> from pax_export._foundations.wire import Memory
        >>> [(number, value) for number, value in Message(Memory(bytes([8, 3, 16, 5]))).fields()]
        [(1, 3), (2, 5)]
    """

    __slots__ = ("_piece", "begin", "file", "size")

    def __init__(
        self,
        file: RandomAccessBytes,
        begin: int = 0,
        size: int | None = None,
        piece: tuple[int, bytes] = (0, b""),
    ):
        self.file, self.begin = file, begin
        self.size = file.size - begin if size is None else size
        self._piece = piece  # an offset, and bytes from there on: they are read already

    def fields(self) -> Iterator[tuple[int, int | Message]]:
        """Yields number and value of each field: an integer, or bytes and floats as a message."""
        at, end = self.begin, self.begin + self.size
        first, raw = piece = self._piece
        while at < end:
            behind = first + len(raw)
            if behind - at < _HEAD and behind < end:
                first, raw = piece = at, self.file.read(at, min(end - at, _PIECE))
            index = at - first + 1
            if (tag := raw[index - 1]) > 127:  # most numbers are one byte, and calls are slow
                tag, index = read_varint(raw, at - first, end - first)
            number, kind = tag >> 3, tag & 7
            if not number:
                raise ValueError("not a protocol buffer: a field with the number 0")
            if kind == _VARINT:
                value, index = read_varint(raw, index, end - first)
                at = first + index
                yield number, value
                continue
            if kind == _BYTES:
                length, index = read_varint(raw, index, end - first)
            elif kind in _FIXED:
                length = _FIXED[kind]
            else:
                raise ValueError(f"not a protocol buffer: a field of the kind {kind}")
            begin = first + index
            at = begin + length
            if at > end:
                raise ValueError(
                    f"truncated protocol buffer: a field of {length} bytes, but {end - begin} are "
                    "left"
                )
            yield number, Message(self.file, begin, length, piece)

    def content(self) -> bytes:
        """Its bytes."""
        first, raw = self._piece
        begin = self.begin - first
        if begin + self.size <= len(raw):
            return raw[begin : begin + self.size]
        return self.file.read(self.begin, self.size)

    def text(self) -> str:
        """Its bytes as a text, which names something."""
        if self.size > _LONGEST_TEXT:
            raise ValueError(f"a text of {self.size} bytes")
        return self.content().decode("utf-8")

    def varints(self) -> np.ndarray:
        """Yields packed signed 64-bit integers."""
        raw = np.frombuffer(self.content(), np.uint8)
        if not len(raw):
            return np.empty(0, np.int64)
        ends = np.flatnonzero(raw < 128)
        if not len(ends) or ends[-1] != len(raw) - 1:
            raise ValueError("whole numbers without an end")
        starts = np.concatenate([[0], ends[:-1] + 1])
        lengths = ends - starts + 1
        if lengths.max() > LONGEST:
            raise ValueError("a whole number of more than 64 bits")
        values = np.zeros(len(ends), np.uint64)
        for index in range(int(lengths.max())):
            there = lengths > index
            digits = (raw[starts[there] + index] & 127).astype(np.uint64)
            values[there] |= digits << np.uint64(7 * index)
        return values.view(np.int64)


def to_signed(value: int | Message) -> int:
    """A whole number with the sign that it has in 64 bits."""
    number = require_integer(value)
    return number - (1 << 64) if number >> 63 else number


def require_integer(value: int | Message) -> int:
    """Returns an integer, or raises if the field has another type."""
    if not isinstance(value, int):
        raise ValueError("a message where a whole number belongs")
    return value


def message(value: int | Message) -> Message:
    """Returns a message, or raises if the field is an integer."""
    if not isinstance(value, Message):
        raise ValueError("a whole number where a message belongs")
    return value


class MessageFields:
    """The fields of a small message by their numbers; an error for one of another kind.

    Example:
        >>> from pax_export._foundations.wire import Memory
        >>> found = MessageFields(Message(Memory(bytes([8, 3, 18, 1, 97, 18, 1, 98]))))
        >>> found.whole(1), found.texts(2), found.text(3), found.whole(4)
        (3, ['a', 'b'], '', 0)
    """

    def __init__(self, message: Message):
        self._values: dict[int, list[int | Message]] = {}
        for count, (number, value) in enumerate(message.fields()):
            if count == _MOST_FIELDS:
                raise ValueError(f"a message of more than {_MOST_FIELDS} fields")
            self._values.setdefault(number, []).append(value)

    def __contains__(self, number: int) -> bool:
        return number in self._values

    def all(self, number: int) -> list[int | Message]:
        """The values of a field."""
        return self._values.get(number, [])

    def whole(self, number: int) -> int:
        """The last value of a field of whole numbers, or 0."""
        return require_integer(self.all(number)[-1]) if number in self else 0

    def messages(self, *numbers: int) -> list[Message]:
        """The messages of some fields."""
        return [message(value) for number in numbers for value in self.all(number)]

    def texts(self, number: int) -> list[str]:
        """The texts of a field."""
        return [each.text() for each in self.messages(number)]

    def text(self, number: int) -> str:
        """The last text of a field, or ""."""
        return ["", *self.texts(number)][-1]

    def mapping(self, number: int) -> dict[str, str]:
        """A field that is a list of pairs of texts."""
        pairs = map(MessageFields, self.messages(number))
        return {pair.text(1): pair.text(2) for pair in pairs}


# --- writing ----------------------------------------------------------------------------


class Schema:
    r"""The fields of a message: name -> number, or (number, type); a list marks repeated fields.

    A type is a schema, a `Map`, or a format such as ``"<I"``; integers, bytes and strings have
    none. Of `alternatives`, the given one is written even if it is zero.

    Example:
        >>> point = Schema(x=1, y=2)
        >>> line = Schema(name=1, points=(2, point))
        >>> line.encode({"points": [{"x": 1}, {"y": 2}], "name": "a"})
        b'\n\x01a\x12\x02\x08\x01\x12\x02\x10\x02'
    """

    def __init__(self, *, alternatives: bool = False, **fields: Any):
        self.alternatives = alternatives
        self.fields: dict[str, tuple[int, Any]] = {}
        self.add(**fields)

    def add(self, **fields: Any) -> None:
        """Adds fields, which may have the schema itself as type."""
        for name, field in fields.items():
            self.fields[name] = (field, None) if isinstance(field, int) else field
        self.fields = dict(sorted(self.fields.items(), key=lambda item: item[1][0]))

    def encode(self, message: Mapping[str, Any]) -> bytes:
        """Encodes a message; fields that are None are omitted."""
        return b"".join(self.pieces(message))

    def pieces(self, message: Mapping[str, Any]) -> list[bytes]:
        """Encodes a message in pieces, so long ones are not copied per enclosing message."""
        if unknown := message.keys() - self.fields:
            raise KeyError(f"fields that the message has not: {sorted(unknown)}")
        pieces: list[bytes] = []
        for name, (number, kind) in self.fields.items():
            value = message.get(name)
            if value is None:
                continue
            if isinstance(kind, Map):
                value, kind = kind.entries(value), kind.entry
            if isinstance(value, list):
                for each in _pack_numbers(value):
                    pieces += _encode_field(number, each, kind)
            elif value or self.alternatives or isinstance(value, Mapping):
                pieces += _encode_field(number, value, kind)
        return pieces


class Map:
    """A field that is a dict: a list of messages of a key and a value."""

    def __init__(self, kind: Any = None):
        self.entry = Schema(key=1, value=(2, kind), alternatives=True)

    def entries(self, values: Mapping[Any, Any]) -> list[dict[str, Any]]:
        """The messages in the order of the keys."""
        return [{"key": key, "value": values[key]} for key in sorted(values)]


def _pack_numbers(values: list[Any]) -> list[Any]:
    """Packs numbers into one field."""
    if values and all(isinstance(each, int) for each in values):
        return [b"".join(map(encode_varint, values))]
    return values


def _encode_field(number: int, value: Any, kind: Any) -> Iterator[bytes]:
    if isinstance(kind, str):
        yield encode_varint(number << 3 | _FORMATS[kind]) + struct.pack(kind, value)
    elif isinstance(value, int):
        yield encode_varint(number << 3 | _VARINT) + encode_varint(value)
    else:
        content = value.encode() if isinstance(value, str) else value
        pieces = [content] if isinstance(content, bytes) else kind.pieces(content)
        yield encode_varint(number << 3 | _BYTES) + encode_varint(sum(map(len, pieces)))
        yield from pieces
