"""Writes dicts as protocol buffers, byte for byte as Google's deterministic serialization."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

from pax_export._foundations.wire.content import encode_varint

_VARINT, _BYTES = 0, 2
#: Wire types of fields of fixed size, by their `struct` format.
_FIXED = {"<I": 5, "<f": 5}


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
        yield encode_varint(number << 3 | _FIXED[kind]) + struct.pack(kind, value)
    elif isinstance(value, int):
        yield encode_varint(number << 3 | _VARINT) + encode_varint(value)
    else:
        content = value.encode() if isinstance(value, str) else value
        pieces = [content] if isinstance(content, bytes) else kind.pieces(content)
        yield encode_varint(number << 3 | _BYTES) + encode_varint(sum(map(len, pieces)))
        yield from pieces
