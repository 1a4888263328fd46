"""Varints: little-endian groups of seven bits."""

from __future__ import annotations

#: The length in bytes of the longest one, of 64 bits.
LONGEST = 10
_BITS = (1 << 64) - 1


def read_varint(raw: bytes, at: int, end: int) -> tuple[int, int]:
    r"""Reads an unsigned varint at `at`; returns it and the next place.

    Example:
        >>> read_varint(b"\x05\x80\x01", 1, 3)
        (128, 3)
    """
    if at < end and raw[at] < 128:  # as most are
        return raw[at], at + 1
    value = 0
    for place, byte in enumerate(raw[at : min(end, at + LONGEST)]):
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value & _BITS, at + place + 1
    if end - at < LONGEST:
        raise ValueError("a whole number without an end")
    raise ValueError("a whole number of more than 64 bits")


def encode_varint(number: int) -> bytes:
    r"""Encodes an integer as a varint; a negative one in 64 bits.

    Example:
        >>> encode_varint(5), encode_varint(128), len(encode_varint(-1))
        (b'\x05', b'\x80\x01', 10)
    """
    parts, number = [], number & _BITS
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])
