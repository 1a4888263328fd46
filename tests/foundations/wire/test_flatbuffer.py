"""Tables of flat buffers, read from memory and from files by the same code."""

from __future__ import annotations

import struct

import pytest

from pax_export._foundations.wire import Memory, root
from pax_export.weights._binary_file import BinaryFile
from tests.refusals import refused


def buffer(fields, behind=b"", size=None):
    """A table whose fields are these numbers of four bytes, None for what is absent."""
    there = [4 + 4 * at if value is not None else 0 for at, value in enumerate(fields)]
    size = 4 + 2 * len(fields) if size is None else size
    offsets = struct.pack(f"<HH{len(fields)}H", size, 4 + 4 * len(fields), *there)
    values = struct.pack(f"<{len(fields)}I", *((each or 0) % (1 << 32) for each in fields))
    return (
        struct.pack("<I", 4 + len(offsets))
        + offsets
        + struct.pack("<i", len(offsets))
        + values
        + behind
    )


@pytest.fixture(params=["memory", "file"])
def opened(request, tmp_path):
    """The first table of a flat buffer."""
    if request.param == "memory":
        yield lambda content: root(Memory(content))
        return
    files = []

    def made(content):
        (tmp_path / "a").write_bytes(content)
        files.append(BinaryFile(tmp_path / "a"))
        return root(files[-1])

    yield made
    for file in files:
        file.close()


def test_numbers_lists_texts_and_tables(opened):
    # The fields are: a number, nothing, a list 8 bytes behind its field, the table itself.
    content = buffer([7, None, 8, -24], struct.pack("<I4i", 4, 1, -1, 65, 66))
    table = opened(content)
    assert table.number(0, "<i") == 7 and table.number(1, "<i", 5) == table.number(9, "<i", 5) == 5
    assert table.numbers(2, "<i4").tolist() == [1, -1, 65, 66]
    assert table.numbers(1, "<i4").tolist() == [] == table.tables(1)
    assert table.text(2, 1) == "\x01" and table.text(1, 9) == ""
    assert table.table(1) is None
    assert table.span(2, 4)[1] == 4 and table.span(1, 4) == (0, 0)


def test_a_list_of_tables(opened):
    content = buffer([4], struct.pack("<I", 2))
    at = len(content)
    own = at - 8 - 4  # where the table itself begins, which stands before its field and the count
    places = [(own - (at + 4 * n)) % (1 << 32) for n in range(2)]
    with refused(ValueError, "file"):  # offsets have no sign
        opened(content + struct.pack("<2I", *places)).tables(0)
    inner = struct.pack("<HHHhiH", 6, 8, 4, 0, 8, 9)
    found = opened(content + struct.pack("<2I", 16, 12) + inner).tables(0)
    assert [each.number(0, "<H") for each in found] == [9, 9]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"abc", "bytes 0 to 4 of a file of 3 bytes"),
        (struct.pack("<I", 100), "bytes 100 to 104 of a file of 4 bytes"),
        (struct.pack("<Ii", 4, 100), "bytes -96 to -94 of a file of 8 bytes"),
        (struct.pack("<Ii", 4, -100), "bytes 104 to 106 of a file of 8 bytes"),
        (buffer([4], struct.pack("<I", 1 << 31)), "of a file of"),
        (buffer([4], struct.pack("<I", 1 << 31) + bytes(20)), "of a file of"),
        (buffer([1 << 31]), "of a file of"),
        (buffer([4], size=400), "of a file of"),
    ],
    ids=range(8),
)
def test_offsets_outside_of_the_file_are_refused(opened, content, said):
    for read in (lambda table: table.numbers(0, "<i4"), lambda table: table.tables(0)):
        with refused(ValueError, said):
            read(opened(content))


def test_a_list_without_end_is_refused():
    table = root(Memory(buffer([4], struct.pack("<I", 1_000_001) + bytes(4_000_004))))
    with refused(ValueError, "1000001"):
        table.tables(0)
    assert len(table.numbers(0, "<i4")) == 1_000_001


def test_many_tables_with_one_long_list():
    """Of a small file hours of work are made, if each reads the list anew."""
    count = 2000
    inner = buffer([4], struct.pack(f"<I{count}i", count, *range(count)))[4:]
    places = [4 * (count - at) + 6 for at in range(count)]  # all of them behind the list
    table = root(Memory(buffer([4], struct.pack(f"<I{count}I", count, *places) + inner)))
    tables = table.tables(0)
    for each in (tables[0], tables[-1]):
        assert each.numbers(0, "<i4").tolist() == list(range(count))
    with refused(ValueError, "tables"):
        for each in tables:
            each.numbers(0, "<i4")
    with refused(ValueError, "tables"):
        table.numbers(0, "<u4")
