"""Protocol buffers and tables as they are written."""

from __future__ import annotations

import pytest

from pax_export._foundations.wire import (
    Map,
    Memory,
    Message,
    Schema,
    table_entries,
    to_signed,
    write_table,
)
from tests.refusals import refused

POINT = Schema(x=1, y=2)
ANY = Schema(alternatives=True, flag=1, text=2, point=(3, POINT))
LINE = Schema(numbers=4, names=3, points=(2, POINT), by_name=(5, Map(POINT)), crc=(7, "<I"))


def fields(content):
    return [
        (number, value if isinstance(value, int) else value.content())
        for number, value in Message(Memory(content)).fields()
    ]


def test_fields_come_in_the_order_of_their_numbers():
    line = LINE.encode({"numbers": [1, 300], "names": ["b", "", "a"], "points": [{}, {"x": 3}]})
    assert fields(line) == [
        (2, b""), (2, b"\x08\x03"), (3, b"b"), (3, b""), (3, b"a"), (4, b"\x01\xac\x02"),
    ]  # fmt: skip


def test_defaults_are_left_out_but_among_alternatives():
    assert POINT.encode({"x": 0, "y": None}) == b""
    assert fields(ANY.encode({"flag": False})) == [(1, 0)]
    assert fields(ANY.encode({"text": ""})) == [(2, b"")]
    assert fields(ANY.encode({"point": {}})) == [(3, b"")]
    assert fields(LINE.encode({"crc": 0x01020304})) == [(7, b"\x04\x03\x02\x01")]


def test_maps_are_sorted_and_whole():
    line = LINE.encode({"by_name": {"b": {"y": -1}, "": {}}})
    (_, first), (_, second) = fields(line)
    assert fields(first) == [(1, b""), (2, b"")]
    assert [number for number, _ in fields(second)] == [1, 2]
    ((_, value),) = fields(fields(second)[1][1])
    assert to_signed(value) == -1


def test_unnumbered_fields_are_refused():
    with refused(KeyError, "wrong"):
        POINT.encode({"wrong": 1})


@pytest.mark.parametrize("count", [1, 15, 16, 17, 1000])
def test_a_table_is_read_again(count):
    values = {b"": b"header"} | {
        f"a/{place:04d}".encode(): bytes([place % 256]) for place in range(count)
    }
    assert dict(table_entries(Memory(write_table(values)))) == values
