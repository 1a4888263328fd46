"""The bytes of a TFLite file: a flat buffer of graphs, their signatures and constants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pax_export._errors import UnsupportedOperationError
from pax_export._optional import require
from pax_export._wire import TFLITE_MARK
from pax_export.export.formats.tflite.builder.graph import Graph, Operator, Tensor
from pax_export.export.formats.tflite.builder.schema import (
    ACTIVATIONS,
    CODES,
    OPTIONS,
    PADDINGS,
    TYPES,
    VERSIONS,
)

#: A flat buffer has no more bytes than this.
LARGEST = (1 << 31) - (1 << 16)
#: Where the bytes of a constant may begin.
_ALIGNMENT = 16
_SCHEMA_VERSION = 3
_OLD_CODES = 127


@dataclass(frozen=True)
class Signature:
    """A graph by its name, with the names of its inputs and outputs."""

    key: str
    graph: Graph
    inputs: Sequence[str]
    outputs: Sequence[str]


def encode(signatures: Sequence[Signature]) -> memoryview:
    """The bytes of a file with these signatures."""
    return _File(signatures).encode()


def graphs_of(graphs: Iterable[Graph]) -> list[Graph]:
    """Graphs, and behind them those of their loops and branches."""
    found = list(graphs)
    for graph in found:
        for operator in graph.operators:
            found.extend(operator.graphs.values())
    return found


class _File:
    def __init__(self, signatures: Sequence[Signature]):
        self._signatures = signatures
        self._graphs = graphs_of(each.graph for each in signatures)
        self._numbers = {id(graph): number for number, graph in enumerate(self._graphs)}
        names = {each.name for graph in self._graphs for each in graph.operators}
        self._codes = {name: number for number, name in enumerate(sorted(names))}
        self._arrays: dict[int, tuple[int, np.ndarray]] = {}
        operators = sum(len(graph.operators) for graph in self._graphs)
        self._tensors = [self._numbered(graph) for graph in self._graphs]
        size = sum(array.nbytes + 64 for _, array in self._arrays.values())
        if size > LARGEST:
            raise UnsupportedOperationError(
                "A TFLite file has no more than 2 GiB.",
                got=f"{size / 2**30:.1f} GiB of constants",
                write='quantize="float16" or "dynamic", or another target, e.g. to_saved_model',
            )
        flatbuffers = require("flatbuffers", "tflite", "to_tflite")
        self._to = flatbuffers.Builder(min(size + 512 * operators + 65536, LARGEST))

    def _numbered(self, graph: Graph) -> dict[int, tuple[int, Tensor]]:
        """The tensors of a graph by their ids, numbered; constants are noted."""
        found: dict[int, tuple[int, Tensor]] = {}
        operators = graph.operators
        made = (each for o in operators for each in (*o.inputs, *o.outputs))
        for each in (*graph.inputs, *made, *graph.outputs):
            if each is None or id(each) in found:
                continue
            found[id(each)] = len(found), each
            if each.value is not None and id(each.value) not in self._arrays:
                self._arrays[id(each.value)] = len(self._arrays) + 1, each.value
        return found

    def encode(self) -> memoryview:
        to = self._to
        codes = self._offsets([self._code(name) for name in sorted(self._codes)])
        graphs = self._offsets([self._graph(*each) for each in zip(self._graphs, self._tensors)])
        signatures = self._offsets([self._signature(each) for each in self._signatures])
        buffers = self._offsets([self._table([]), *map(self._buffer, self._arrays.values())])
        fields = [(0, "Uint32", _SCHEMA_VERSION), (1, "UOffsetTRelative", codes)]
        fields += [(2, "UOffsetTRelative", graphs), (4, "UOffsetTRelative", buffers)]
        to.Finish(self._table([*fields, (7, "UOffsetTRelative", signatures)]), TFLITE_MARK)
        return memoryview(to.Bytes)[to.Head() :]

    def _table(self, fields: Sequence[tuple[int, str, Any]]) -> int:
        self._to.StartObject(max((number for number, _, _ in fields), default=-1) + 1)
        for number, kind, value in fields:
            getattr(self._to, f"Prepend{kind}Slot")(number, value, 0)
        return self._to.EndObject()

    def _offsets(self, offsets: Sequence[int]) -> int:
        self._to.StartVector(4, len(offsets), 4)
        for each in reversed(offsets):
            self._to.PrependUOffsetTRelative(each)
        return self._to.EndVector()

    def _array(self, values: Any, dtype: str) -> int:
        return self._to.CreateNumpyVector(np.asarray(values, dtype))

    def _buffer(self, numbered: tuple[int, np.ndarray]) -> int:
        data = np.ascontiguousarray(numbered[1]).reshape(-1).view(np.uint8)
        to = self._to
        to.StartVector(1, data.size, _ALIGNMENT)
        to.head = to.Head() - data.size
        np.frombuffer(to.Bytes, np.uint8)[to.head : to.head + data.size] = data
        offset = to.EndVector()
        return self._table([(0, "UOffsetTRelative", offset)])

    def _code(self, name: str) -> int:
        code = CODES[name]
        return self._table(
            [
                (0, "Int8", min(code, _OLD_CODES)),
                (2, "Int32", VERSIONS.get(name, 1)),
                (3, "Int32", code),
            ]
        )

    def _graph(self, graph: Graph, tensors: Mapping[int, tuple[int, Tensor]]) -> int:
        def places(given: Iterable[Any]) -> int:
            return self._array([-1 if t is None else tensors[id(t)][0] for t in given], "int32")

        made = self._offsets([self._tensor(*each) for each in tensors.values()])
        operators = []
        for each in graph.operators:
            fields = [(0, "Uint32", self._codes[each.name])]
            fields += [(1, "UOffsetTRelative", places(each.inputs))]
            fields += [(2, "UOffsetTRelative", places(each.outputs))]
            operators.append(self._table([*fields, *self._options(each)]))
        fields = [(0, "UOffsetTRelative", made), (1, "UOffsetTRelative", places(graph.inputs))]
        fields += [(2, "UOffsetTRelative", places(graph.outputs))]
        fields += [(3, "UOffsetTRelative", self._offsets(operators))]
        return self._table([*fields, (4, "UOffsetTRelative", self._to.CreateString(graph.name))])

    def _tensor(self, number: int, tensor: Tensor) -> int:
        name = self._to.CreateString(tensor.name or f"{tensor.made_by.lower() or 'array'}_{number}")
        shape = self._array([1 if size is None else size for size in tensor.shape], "int32")
        buffer = 0 if tensor.value is None else self._arrays[id(tensor.value)][0]
        fields = [(0, "UOffsetTRelative", shape), (1, "Int8", TYPES[tensor.dtype.name])]
        fields += [(2, "Uint32", buffer), (3, "UOffsetTRelative", name)]
        if tensor.scale is not None:
            fields.append((4, "UOffsetTRelative", self._quantization(tensor)))
        if not tensor.shape.known:
            sizes = [-1 if size is None else size for size in tensor.shape]
            fields.append((7, "UOffsetTRelative", self._array(sizes, "int32")))
        return self._table([*fields, (8, "Bool", True)])

    def _quantization(self, tensor: Tensor) -> int:
        scale = self._array(tensor.scale, "float32")
        zeros = self._array(np.zeros(len(tensor.scale)), "int64")
        return self._table(
            [
                (2, "UOffsetTRelative", scale),
                (3, "UOffsetTRelative", zeros),
                (6, "Int32", tensor.axis),
            ]
        )

    def _options(self, operator: Operator) -> list[tuple[int, str, Any]]:
        if operator.name not in OPTIONS:
            return []
        kind, fields = OPTIONS[operator.name]
        values: dict[str, Any] = dict(operator.options)
        values |= {name: self._numbers[id(graph)] for name, graph in operator.graphs.items()}
        for name, numbers in (("activation", ACTIVATIONS), ("padding", PADDINGS)):
            if name in values:
                values[name] = numbers[values[name]]
        made = self._table([(*fields[name], value) for name, value in values.items()])
        return [(3, "Uint8", kind), (4, "UOffsetTRelative", made)]

    def _signature(self, signature: Signature) -> int:
        graph = signature.graph
        number = self._numbers[id(graph)]
        tensors = self._tensors[number]

        def named(names: Sequence[str], given: Sequence[Tensor]) -> int:
            return self._offsets(
                [
                    self._table(
                        [
                            (0, "UOffsetTRelative", self._to.CreateString(name)),
                            (1, "Uint32", tensors[id(each)][0]),
                        ]
                    )
                    for name, each in zip(names, given)
                ]
            )

        inputs = named(signature.inputs, graph.inputs)
        outputs = named(signature.outputs, graph.outputs)
        key = self._to.CreateString(signature.key)
        fields = [(0, "UOffsetTRelative", inputs), (1, "UOffsetTRelative", outputs)]
        fields += [(2, "UOffsetTRelative", key)]
        return self._table([*fields, (4, "Uint32", number)])
