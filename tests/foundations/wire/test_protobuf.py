"""Protocol buffers, read from memory and from files by the same code."""

from __future__ import annotations

import struct

import jax.numpy as jnp
import numpy as np
import onnx
import pytest

from pax_export._foundations.wire import (
    ONNX_DTYPES,
    TFLITE_DTYPES,
    Map,
    Memory,
    Message,
    RandomAccessBytes,
    Schema,
    message,
    read_varint,
    require_integer,
    table_entries,
    to_signed,
    write_table,
)
from pax_export.weights._binary_file import BinaryFile
from tests.refusals import refused


class Counting(RandomAccessBytes):
    """A part of the memory that counts what is read of it."""

    def __init__(self, content):
        self._memory, self.size, self.bytes = Memory(content), len(content), 0

    def read(self, offset, count):
        self.bytes += count
        return self._memory.read(offset, count)

    def array(self, dtype, shape, offset):
        return self._memory.array(dtype, shape, offset)


def number(value):
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def field(which, content):
    if isinstance(content, int):
        return number(which << 3) + number(content)
    return number(which << 3 | 2) + number(len(content)) + content


@pytest.fixture(params=["memory", "file"])
def places(request, tmp_path):
    """Makes places of bytes, of both kinds that there are."""
    opened = []

    def made(content):
        if request.param == "memory":
            return Memory(content)
        (tmp_path / str(len(opened))).write_bytes(content)
        opened.append(BinaryFile(tmp_path / str(len(opened))))
        return opened[-1]

    yield made
    for file in opened:
        file.close()


def inside(found, number):
    """The messages in the fields with this number."""
    return [message(value) for at, value in found.fields() if at == number]


def test_every_kind_of_field(places):
    content = (
        field(1, 300) + field(2, b"text") + field(3, 2**64 - 5) + number(4 << 3 | 5)
        + struct.pack("<f", 0.5) + number(5 << 3 | 1) + struct.pack("<d", 0.25) + field(2, b"more")
    )  # fmt: skip
    found = Message(places(content))
    by_number = dict(found.fields())
    assert (require_integer(by_number[1]), to_signed(by_number[3])) == (300, -5)
    assert [message(by_number[at]).size for at in (4, 5)] == [4, 8]
    assert [each.text() for each in inside(found, 2)] == ["text", "more"]
    with refused(ValueError, "message"):
        require_integer(by_number[2])
    with refused(ValueError, "message"):
        message(by_number[1])


def test_fields_at_every_offset(places):
    """Messages in messages, some of which are longer than what is read at a time."""
    sizes = [*range(0, 60, 7), 4000, 4090, 4096, 5000, 9000, 3, 20_000, 0, 1]
    inner = [b"".join(field(1 + n % 30, bytes([n % 256]) * (size % 100)) + field(31, n)
                      for n in range(size // 50)) for size in sizes]  # fmt: skip
    outer = field(2, b"".join(field(1, each) for each in inner)) + field(3, 1)
    for before in range(0, 30, 3):
        found = Message(places(field(9, bytes(before)) + outer))
        assert [each.content() for each in inside(inside(found, 2)[0], 1)] == inner
        for each, size in zip(inside(inside(found, 2)[0], 1), sizes):
            counted = [value for at, value in each.fields() if at == 31]
            assert counted == list(range(size // 50))


def test_skipped_fields_are_not_read():
    content = b"".join(field(1, bytes(1 << 20)) for _ in range(4)) + field(2, 7)
    places = Counting(content)
    found = list(Message(places).fields())
    assert [each.size for _, each in found[:4]] == [1 << 20] * 4 and found[4] == (2, 7)
    assert places.bytes < 30_000


def test_messages_in_messages_are_read_few_times():
    """The bytes that are read grow with what there is, not with how deep it lies."""
    content = b""
    for _ in range(30):
        content = field(1, content + field(2, bytes(10)))
    places = Counting(content)
    found = Message(places)
    while below := inside(found, 1):
        (found,) = below
    assert places.bytes < 3 * len(content)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (field(1, b"abc")[:-1], "truncated protocol buffer: a field of 3 bytes, but 2 are left"),
        (field(1, b"")[:-1] + number(1 << 62), f"a field of {1 << 62} bytes, but 0 are left"),
        (number(1 << 3 | 5) + b"abc", "a field of 4 bytes, but 3 are left"),
        (b"\x08", "a whole number without an end"),
        (b"\x08\x80", "a whole number without an end"),
        (b"\x08" + b"\xff" * 11, "a whole number of more than 64 bits"),
        (b"\xff" * 11, "a whole number of more than 64 bits"),
        (b"\x0b", "not a protocol buffer: a field of the kind 3"),
        (b"\x00\x01", "not a protocol buffer: a field with the number 0"),
    ],
    ids=range(9),
)
def test_malformed_messages_are_refused(places, content, said):
    with refused(ValueError, said):
        list(Message(places(content)).fields())
    outer = Message(places(field(1, content) + field(2, bytes(40))))  # nor reads it behind itself
    with refused(ValueError, said):
        list(inside(outer, 1)[0].fields())


def test_packed_varints(places):
    values = [0, 1, 127, 128, 1 << 40, (1 << 64) - 1]
    packed = b"".join(map(number, values))
    found = Message(places(packed))
    assert found.varints().tolist() == [*values[:-1], -1]
    assert Message(places(b"")).varints().dtype == np.int64
    for broken in (b"\x80", packed + b"\x80"):
        with refused(ValueError, "without"):
            Message(places(broken)).varints()
    with refused(ValueError, "more"):
        Message(places(b"\x80" * 11 + b"\x01")).varints()


def test_a_number_keeps_its_lowest_64_bits():
    assert read_varint(b"\xff" * 9 + b"\x7f", 0, 10) == ((1 << 64) - 1, 10)


def test_long_names_are_refused():
    with refused(ValueError, "1048577"):
        Message(Memory(bytes((1 << 20) + 1))).text()


def test_places_end_where_they_end(places):
    found = places(b"abcd")
    assert found.read(1, 3) == b"bcd" and found.read(4, 0) == b""
    assert found.unpack("<H", 2) == (int.from_bytes(b"cd", "little"),)
    assert found.array("<u2", (1, 2), 0).shape == (1, 2)
    for begin, count in ((-1, 1), (0, 5), (4, 1), (2, -1), (1 << 70, 1)):
        with refused(ValueError, f"bytes {begin} to {begin + count}"):
            found.read(begin, count)
    for kind, begin in (("<I", 1), ("<H", -2), ("<Q", 0)):
        with refused(ValueError, "bytes"):
            found.unpack(kind, begin)
    with refused(ValueError, "bytes"):
        found.array("<u4", (2,), 0)


# --- writing ------------------------------------------------------------------------------


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


# --- dtypes of arrays by their numbers ----------------------------------------------------


def test_the_numbers_of_onnx_are_those_of_its_package():
    for number, name in ONNX_DTYPES.items():
        assert onnx.helper.tensor_dtype_to_np_dtype(number) == jnp.dtype(name), name
    assert len(ONNX_DTYPES) == len(set(ONNX_DTYPES.values()))


def test_the_dtypes_of_tflite_are_known_to_numpy():
    assert all(np.dtype(jnp.dtype(name)).itemsize for name in TFLITE_DTYPES.values())
    assert len(TFLITE_DTYPES) == len(set(TFLITE_DTYPES.values()))
