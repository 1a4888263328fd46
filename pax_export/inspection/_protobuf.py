"""Protocol buffers, read without their descriptions: fields by number."""

from __future__ import annotations

from collections.abc import Iterator

_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5


def fields(content: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """The fields of a message: whole numbers, and the bytes of all others.

    Raises:
        ValueError: it is no message.
    """
    place, end = 0, len(content)
    while place < end:
        tag, place = varint(content, place)
        kind = tag & 7
        if kind == _VARINT:
            value, place = varint(content, place)
            yield tag >> 3, value
            continue
        if kind not in (_EIGHT, _BYTES, _FOUR):
            raise ValueError("this is no protocol buffer")
        size = {_EIGHT: 8, _FOUR: 4}.get(kind, 0)
        if kind == _BYTES:
            size, place = varint(content, place)
        if place + size > end:
            raise ValueError("this protocol buffer is cut short")
        yield tag >> 3, content[place : place + size]
        place += size


def messages(content: memoryview, number: int) -> Iterator[memoryview]:
    """The fields with this number that are bytes."""
    return (
        value
        for found, value in fields(content)
        if found == number and isinstance(value, memoryview)
    )


def text(content: memoryview, number: int) -> bytes:
    """The first field with this number; empty if there is none."""
    return bytes(next(messages(content, number), b""))


def varint(content: memoryview, place: int) -> tuple[int, int]:
    """A whole number without a sign, and the place behind it."""
    value = shift = 0
    while place < len(content) and shift < 64:
        byte = content[place]
        value, place, shift = value | (byte & 127) << shift, place + 1, shift + 7
        if byte < 128:
            return value, place
    raise ValueError("this protocol buffer is cut short")


def signed(number: int) -> int:
    """A whole number of 64 bits, with its sign."""
    return number - 2**64 if number >= 2**63 else number
