"""The graphs of a TFLite model, read as data: neither TensorFlow nor LiteRT is needed for it.

A model is one flat buffer, whose tables name places in it.  The numbers of fields and of
operations are those of `schema.fbs`.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from pax_export.inspection import _tflite_names as names
from pax_export.inspection._file_graph import LONGEST, Fact, Graph, Operation, Program, numbers

_DTYPES = {
    0: "float32", 1: "float16", 2: "int32", 3: "uint8", 4: "int64", 6: "bool", 7: "int16",
    8: "complex64", 9: "int8", 10: "float64", 11: "complex128", 12: "uint64", 15: "uint32",
    16: "uint16", 18: "bfloat16",
}  # fmt: skip
_MOST = 1_000_000


def programs_of(content: memoryview) -> dict[str, Program]:
    """The program of each signature.

    Raises:
        ValueError: it is no such file.
    """
    if bytes(content[4:8]) != b"TFL3":
        raise ValueError("this is no TFLite model")
    try:
        return _programs(_Table(content, struct.unpack_from("<I", content)[0]))
    except (struct.error, IndexError) as error:
        raise ValueError("this flat buffer is cut short") from error


def _programs(model: _Table) -> dict[str, Program]:
    codes = [_code(each) for each in model.tables(1)]
    buffers = model.tables(4)
    tables = model.tables(2)
    graphs = [Graph() for _ in tables]
    for graph, table in zip(graphs, tables):
        _fill(graph, table, graphs, codes, buffers)
    found = {}
    for signature in model.tables(7):
        graph = graphs[signature.number(4, "<I")]
        taken = {each.text(0): each.number(1, "<I") for each in signature.tables(0)}
        found[signature.text(2)] = Program(graph, taken)
    return found


def _code(table: _Table) -> str:
    """The name of an operation; the first 127 have a place of their own, of one byte."""
    number = max(table.number(0, "<b"), table.number(3, "<i"))
    if number == names.CUSTOM:
        return table.text(1) or "CUSTOM"
    return names.OPERATIONS[number] if number < len(names.OPERATIONS) else f"operation {number}"


def _fill(
    graph: Graph, table: _Table, graphs: list[Graph], codes: list[str], buffers: list[_Table]
) -> None:
    graph.facts = {n: _fact(each, buffers) for n, each in enumerate(table.tables(0))}
    graph.inputs = list(table.numbers(1, "<i4"))
    graph.outputs = list(table.numbers(2, "<i4"))
    for each in table.tables(3):
        operation = Operation(
            codes[each.number(0, "<I")],
            [place if place >= 0 else None for place in each.numbers(1, "<i4")],
            list(each.numbers(2, "<i4")),
        )
        options = each.table(4)
        for name, (field, kind) in names.OPTIONS.get(operation.name, {}).items():
            default = names.DEFAULTS.get(name, 0)
            value = options.read(field, kind, default) if options else default
            if name.endswith("_subgraph"):
                operation.bodies[name] = graphs[value]
            else:
                operation.attributes[name] = value
        graph.operations.append(operation)


def _fact(table: _Table, buffers: list[_Table]) -> Fact:
    dtype = _DTYPES.get(table.number(1, "<b"), "")
    shape: tuple[Any, ...] | None = tuple(table.numbers(0, "<i4"))
    signature = table.numbers(7, "<i4")
    if signature:
        shape = tuple(None if size < 0 else size for size in signature)
    begin, size = buffers[table.number(2, "<I")].span(0, 1)
    if not shape and not size and not table.number(8, "<b"):
        shape = None  # it has no rank
    known, zero = None, False
    if 0 < size <= 8:
        zero = not any(table.content[begin : begin + size])
    if size and dtype in ("int32", "int64", "bool") and size <= 8 * LONGEST:
        raw = np.frombuffer(table.content[begin : begin + size], dtype)
        known = numbers(raw, tuple(table.numbers(0, "<i4")))
    return Fact(shape, dtype, known, zero)


class _Table:
    """A table: its fields, each of which may be absent."""

    def __init__(self, content: memoryview, place: int):
        self.content, self.place = content, place
        self._offsets = place - self._at("<i", place)
        self._size = self._at("<H", self._offsets)

    def _at(self, kind: str, place: int) -> int:
        if place < 0:
            raise ValueError("this flat buffer names a place before its beginning")
        return struct.unpack_from(kind, self.content, place)[0]

    def _field(self, number: int) -> int | None:
        at = 4 + 2 * number
        offset = self._at("<H", self._offsets + at) if at + 2 <= self._size else 0
        return self.place + offset if offset else None

    def read(self, number: int, kind: str, default: int) -> Any:
        """A number, or with the kind ``"list"`` whole numbers of four bytes."""
        if kind == "list":
            return self.numbers(number, "<i4")
        return self.number(number, kind, default)

    def number(self, number: int, kind: str, default: int = 0) -> int:
        place = self._field(number)
        return default if place is None else self._at(kind, place)

    def span(self, number: int, itemsize: int) -> tuple[int, int]:
        """Where a list begins, and how many it has; all of them lie in the file."""
        place = self._field(number)
        if place is None:
            return 0, 0
        begin = place + self._at("<I", place)
        count = self._at("<I", begin)
        if begin + 4 + count * itemsize > len(self.content):
            raise ValueError("this flat buffer is cut short")
        return begin + 4, count

    def numbers(self, number: int, dtype: str) -> list[int]:
        begin, count = self.span(number, np.dtype(dtype).itemsize)
        if count > _MOST:
            raise ValueError(f"a list of {count} numbers")
        return np.frombuffer(self.content, dtype, count, begin).tolist() if count else []

    def text(self, number: int) -> str:
        begin, size = self.span(number, 1)
        return bytes(self.content[begin : begin + min(size, 1000)]).decode("utf-8", "replace")

    def table(self, number: int) -> _Table | None:
        place = self._field(number)
        return None if place is None else _Table(self.content, place + self._at("<I", place))

    def tables(self, number: int) -> list[_Table]:
        begin, count = self.span(number, 4)
        if count > _MOST:
            raise ValueError(f"a list of {count} tables")
        offsets = np.frombuffer(self.content, "<u4", count, begin).tolist() if count else []
        return [_Table(self.content, begin + 4 * n + each) for n, each in enumerate(offsets)]
