"""The graphs of a TFLite model, read as data: neither TensorFlow nor LiteRT is needed for it.

A model is one flat buffer, whose tables name places in it.  The numbers of fields and of
operations are those of `schema.fbs`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pax_export._wire import TFLITE_DTYPES, TFLITE_MARK, Memory, Table, root
from pax_export.inspection import _tflite_names as names
from pax_export.inspection._file_graph import LONGEST, Fact, Graph, Operation, Program, numbers

#: Of a text that names something.
_LONGEST_TEXT = 1000


def programs_of(content: memoryview) -> dict[str, Program]:
    """The program of each signature.

    Raises:
        ValueError: it is no such file.
    """
    if bytes(content[4:8]) != TFLITE_MARK:
        raise ValueError("this is no TFLite model")
    try:
        return _programs(root(Memory(content)))
    except (IndexError, ValueError) as error:
        raise ValueError(f"this flat buffer is damaged: {error}") from error


def _programs(model: Table) -> dict[str, Program]:
    codes = [_code(each) for each in model.tables(1)]
    buffers = model.tables(4)
    tables = model.tables(2)
    graphs = [Graph() for _ in tables]
    for graph, table in zip(graphs, tables):
        _fill(graph, table, graphs, codes, buffers)
    found = {}
    for signature in model.tables(7):
        graph = graphs[signature.number(4, "<I")]
        taken = {each.text(0, _LONGEST_TEXT): each.number(1, "<I") for each in signature.tables(0)}
        found[signature.text(2, _LONGEST_TEXT)] = Program(graph, taken)
    return found


def _code(table: Table) -> str:
    """The name of an operation; the first 127 have a place of their own, of one byte."""
    number = max(table.number(0, "<b"), table.number(3, "<i"))
    if number == names.CUSTOM:
        return table.text(1, _LONGEST_TEXT) or "CUSTOM"
    return names.OPERATIONS[number] if number < len(names.OPERATIONS) else f"operation {number}"


def _fill(
    graph: Graph, table: Table, graphs: list[Graph], codes: list[str], buffers: list[Table]
) -> None:
    graph.facts = {n: _fact(each, buffers) for n, each in enumerate(table.tables(0))}
    graph.inputs = list(table.integers(1))
    graph.outputs = list(table.integers(2))
    for each in table.tables(3):
        operation = Operation(
            codes[each.number(0, "<I")],
            [place if place >= 0 else None for place in each.integers(1)],
            list(each.integers(2)),
        )
        options = each.table(4)
        for name, (field, kind) in names.OPTIONS.get(operation.name, {}).items():
            default = names.DEFAULTS.get(name, 0)
            value = _option(options, field, kind, default)
            if name.endswith("_subgraph"):
                operation.bodies[name] = graphs[value]
            else:
                operation.attributes[name] = value
        graph.operations.append(operation)


def _option(options: Table | None, field: int, kind: str, default: int) -> Any:
    """A number, or with the kind ``"list"`` whole numbers."""
    if options is None:
        return default
    return list(options.integers(field)) if kind == "list" else options.number(field, kind, default)


def _fact(table: Table, buffers: list[Table]) -> Fact:
    dtype = TFLITE_DTYPES.get(table.number(1, "<b"), "")
    shape: tuple[Any, ...] | None
    shape = sizes = table.integers(0)
    signature = table.integers(7)
    if signature:
        shape = tuple(None if size < 0 else size for size in signature)
    begin, size = buffers[table.number(2, "<I")].span(0, 1)
    if not shape and not size and not table.number(8, "<b"):
        shape = None  # it has no rank
    known, zero = None, False
    if 0 < size <= 8:
        zero = not any(table.places.read(begin, size))
    if size and dtype in ("int32", "int64", "bool") and size <= 8 * LONGEST:
        known = numbers(np.frombuffer(table.places.read(begin, size), dtype), sizes)
    return Fact(shape, dtype, known, zero)
