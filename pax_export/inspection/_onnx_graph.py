"""The graph of an ONNX model, read as data: no package of ONNX is needed for it.

The numbers of fields are those of `onnx.proto`.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from pax_export._wire import ONNX_DTYPES, Memory, Message, signed
from pax_export.inspection._file_graph import LONGEST, Fact, Graph, Operation, Program, numbers

_DEEPEST = 50


def program_of(content: memoryview) -> Program:
    """The only program of a model.

    Raises:
        ValueError: it is no such file.
    """
    main = next(Message(Memory(content)).messages(7), None)
    if main is None:
        raise ValueError("there is no graph in it")
    graph = _graph(main, 0)
    return Program(graph, {str(name): name for name in graph.inputs})


def _graph(content: Message, depth: int) -> Graph:
    if depth > _DEEPEST:
        raise ValueError("its graphs are nested too deeply")
    graph = Graph()
    for number, value in content.fields():
        if not isinstance(value, Message):
            continue
        if number == 1:
            graph.operations.append(_operation(value, depth))
        elif number == 5:
            name, fact = _constant(value)
            graph.facts[name] = fact
        elif number in (11, 12, 13):
            name = _name(value, 1)
            if number == 11:
                graph.inputs.append(name)
            if number == 12:
                graph.outputs.append(name)
            graph.facts.setdefault(name, _declared(value))
    graph.inputs = [name for name in graph.inputs if graph.facts[name].value is None]
    return graph


def _name(content: Message, number: int) -> str:
    return _text(content.first(number))


def _text(content: Message, most: int | None = None) -> str:
    return content.content(most).decode("utf-8", "replace")


def _operation(content: Message, depth: int) -> Operation:
    operation = Operation(_name(content, 4), [], [])
    for number, value in content.fields():
        if not isinstance(value, Message):
            continue
        if number == 1:
            operation.operands.append(_text(value) or None)
        elif number == 2:
            operation.results.append(_text(value))
        elif number == 5:
            name = _name(value, 1)
            found = _attribute(value, depth)
            if isinstance(found, Graph):
                operation.bodies[name] = found
            else:
                operation.attributes[name] = found
    return operation


def _attribute(content: Message, depth: int) -> Any:
    """The value of an attribute; lists of floats and texts are of no use here."""
    found: Any = None
    listed: list[int] = []
    for number, value in content.fields():
        if number == 2 and isinstance(value, Message):
            (found,) = struct.unpack("<f", value.content())
        elif number == 3 and isinstance(value, int):
            found = signed(value)
        elif number == 4 and isinstance(value, Message):
            found = _text(value, 1000)
        elif number == 5 and isinstance(value, Message):
            found = _constant(value)[1]
        elif number == 6 and isinstance(value, Message):
            found = _graph(value, depth + 1)
        elif number == 8:
            listed += _integers(value)
            found = listed
    return found


def _integers(value: int | Message) -> list[int]:
    """Whole numbers, which are packed or come one by one."""
    return [signed(value)] if isinstance(value, int) else value.varints(LONGEST + 1).tolist()


def _constant(content: Message) -> tuple[str, Fact]:
    sizes: list[int] = []
    listed: list[int] = []
    dtype, name, raw = "", "", None
    for number, value in content.fields():
        if number == 1 and len(sizes) <= LONGEST:
            sizes += _integers(value)
        elif number == 2 and isinstance(value, int):
            dtype = ONNX_DTYPES.get(value, f"dtype {value}")
        elif number in (5, 7) and len(listed) <= LONGEST:
            listed += _integers(value)
        elif number == 8 and isinstance(value, Message):
            name = _text(value)
        elif number == 9:
            raw = value
    shape = tuple(sizes)
    known = None
    if dtype in ("int32", "int64", "bool"):
        if isinstance(raw, Message) and raw.size <= 8 * LONGEST:
            known = numbers(np.frombuffer(raw.content(), dtype), shape)
        elif raw is None and listed:
            known = numbers(np.array(listed[: LONGEST + 1], np.int64), shape)
    return name, Fact(shape, dtype, known)


def _declared(content: Message) -> Fact:
    """What the file says of the type of an array."""
    kind = content.first(2).first(1)
    dtype, shape = "", None
    for number, value in kind.fields():
        if number == 1 and isinstance(value, int):
            dtype = ONNX_DTYPES.get(value, f"dtype {value}")
        elif number == 2 and isinstance(value, Message):
            shape = tuple(_dimension(each) for each in value.messages(1))
    return Fact(shape, dtype)


def _dimension(content: Message) -> int | None:
    for number, value in content.fields():
        if number == 1 and isinstance(value, int):
            return value if value < 2**63 else None
    return None
