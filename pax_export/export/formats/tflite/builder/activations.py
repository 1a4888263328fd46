"""Rounded inputs of quantized weights: layers that LiteRT computes with integers only.

While a graph is built, rounded inputs are `DEQUANTIZE` of `QUANTIZE`. A layer with such inputs,
whose results are only rounded again, is then changed to take and return integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pax_export.export.formats.tflite.builder.encode import graphs_of
from pax_export.export.formats.tflite.builder.graph import Graph, Operator, Tensor, emit
from pax_export.export.formats.tflite.builder.integers import Stored, weight_constants
from pax_export.export.formats.tflite.builder.simplify import drop_unread

_LAYERS = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")
_SUMS = ("ADD", "MEAN")
#: Operators that only move integers, or choose among them.
_MOVES = ("RESHAPE", "TRANSPOSE", "PAD", "MAX_POOL_2D", "SQUEEZE", "STRIDED_SLICE")
_INT32 = np.iinfo(np.int32)


def rounded(x: Tensor, scale: float, zero: int) -> Tensor:
    """Returns inputs rounded to the values of their integers."""
    told = {"scale": scale, "zero": zero}  # so that others are another operator
    (made,) = emit("QUANTIZE", [x], [(x.shape, np.int8)], **told)
    _as(made, scale, zero)
    return emit("DEQUANTIZE", [made], [(x.shape, np.float32)])[0]


def _as(tensor: Tensor, scale: Any, zero: int | None) -> Tensor:
    tensor.scale, tensor.zero = np.asarray([scale], np.float32), zero
    return tensor


def multiply_integers(graphs: Sequence[Graph]) -> None:
    """Passes integers to layers of quantized weights with rounded inputs."""
    for number, graph in enumerate(graphs_of(graphs)):
        _Integers(graph, number).run()
        drop_unread(graph)


class _Integers:
    """One pass over the operators of a graph, in their order."""

    def __init__(self, graph: Graph, number: int):
        self._graph, self._number = graph, number
        self._readers: dict[int, list[Operator]] = {}
        for operator in graph.operators:
            for each in operator.inputs:
                self._readers.setdefault(id(each), []).append(operator)
        self._given = {id(each) for each in graph.outputs}
        self._made: dict[int, Tensor | None] = {}
        self._sources: dict[int, Tensor] = {}
        self._instead: dict[int, Tensor] = {}
        self._operators: list[Operator] = []

    def run(self) -> None:
        for operator in self._graph.operators:
            operator.inputs = [self._instead.get(id(each), each) for each in operator.inputs]
            if operator.name in _LAYERS:
                self._layer(operator)
            elif operator.name in _SUMS:
                self._sum(operator)
            self._operators.append(operator)
        self._graph.operators[:] = self._operators

    def _layer(self, operator: Operator) -> None:
        x, source = self._integers(operator.inputs[0]), self._source_of_rows(operator.inputs[0])
        stored = None if x is None and source is None else self._weights(operator)
        if stored is None:
            return
        if x is None or not self._gives_integers(operator, x, stored):
            # Kernels of floats and integers, which round inputs by themselves.
            inputs = operator.inputs[0] if source is None else source, stored.integers
            operator.inputs = [*inputs, *operator.inputs[2:]]

    def _sum(self, operator: Operator) -> None:
        """Adds integers, if all operands are some and the result is only read to be rounded."""
        scale = self._scale_of_result(operator)
        numbers = [each for each in operator.inputs if each.dtype == np.float32]
        known = [] if scale is None else list(map(self._integers, numbers))
        if scale is not None and None not in known:
            operator.inputs = [*known, *operator.inputs[len(known) :]]  # the axes of a mean
            self._give_integers(operator, *scale)

    def _gives_integers(self, operator: Operator, x: Tensor, stored: Stored) -> bool:
        """Makes a layer one of integers alone, if its result is only read to be rounded."""
        scale = self._scale_of_result(operator)
        bias = operator.inputs[2] if len(operator.inputs) > 2 else None
        if scale is None or (bias is not None and bias.value is None):
            return False
        scales = np.asarray(stored.integers.scale, np.float64) * float(x.scale[0])
        numbers = np.zeros(stored.integers.shape[stored.integers.axis], np.float64)
        numbers = numbers if bias is None else np.asarray(bias.value).reshape(-1).astype(np.float64)
        whole = np.clip(np.rint(numbers / scales), _INT32.min, _INT32.max).astype(np.int32)
        small = Tensor(whole.shape, np.int32, None, whole)
        small.scale, small.name = scales.astype(np.float32), bias.name if bias is not None else ""
        operator.inputs = [x, stored.integers, small]
        self._give_integers(operator, *scale)
        return True

    def _scale_of_result(self, operator: Operator) -> tuple[float, Any] | None:
        """Returns the scale and the zero point with which all readers round a result."""
        ends = self._ends(operator.outputs[0])
        given = {(float(end.outputs[0].scale[0]), end.outputs[0].zero) for end in ends}
        return given.pop() if len(given) == 1 else None

    def _give_integers(self, operator: Operator, scale: float, zero: int) -> None:
        """Makes a result one of integers, which the operators that round it pass on."""
        ends, result = self._ends(operator.outputs[0]), operator.outputs[0]
        while True:  # up to the rounding
            result.dtype = np.dtype(np.int8)
            _as(result, scale, zero)
            (reader, *_) = self._readers[id(result)]
            if reader.name == "QUANTIZE":
                break
            (result,) = reader.outputs
        for end in ends:
            self._instead[id(end.outputs[0])] = result

    def _ends(self, result: Tensor) -> list[Operator]:
        """Returns the operators that round a result, if nothing else reads it."""
        readers = self._readers.get(id(result), [])
        if id(result) in self._given:
            return []
        if all(each.name == "QUANTIZE" for each in readers):
            return readers
        if len(readers) == 1 and readers[0].name in _MOVES:
            return self._ends(readers[0].outputs[0])
        return []

    def _integers(self, x: Tensor) -> Tensor | None:
        """Returns the integers of rounded numbers, rearranged in the same way; None without any."""
        if id(x) not in self._made:
            self._made[id(x)] = self._found(x)
        return self._made[id(x)]

    def _found(self, x: Tensor) -> Tensor | None:
        operator = x.operator
        if operator is None or x.graph is not self._graph:
            return None
        if operator.name == "DEQUANTIZE":
            source = operator.inputs[0]
            return self._instead.get(id(source), source) if source.zero is not None else None
        if operator.name not in _MOVES:
            return None
        source = self._integers(operator.inputs[0])
        if source is None:
            return None
        return _as(self._moved(source, x), source.scale[0], source.zero)

    def _source_of_rows(self, x: Tensor) -> Tensor | None:
        """Returns the source of numbers rounded with one scale per row: ``round(x / s) * s``."""
        if not x.by_row:
            return None
        if id(x) not in self._sources:
            self._sources[id(x)] = self._before_rounding(x)
        return self._sources[id(x)]

    def _before_rounding(self, x: Tensor) -> Tensor:
        moves = []
        while x.made_by != "DIV":
            if x.made_by in _MOVES:
                moves.append(x)
            x = x.operator.inputs[0]
        source = x.operator.inputs[0]
        for each in reversed(moves):
            source = self._moved(source, each)
        return source

    def _moved(self, source: Tensor, like: Tensor) -> Tensor:
        """Returns an array rearranged as the input of another operator is."""
        operator, result = like.operator, Tensor(like.shape, source.dtype, self._graph)
        inputs = [source, *operator.inputs[1:]]
        result.operator = Operator(operator.name, inputs, [result], operator.options)
        self._operators.append(result.operator)
        return result

    def _weights(self, operator: Operator) -> Stored | None:
        """The constants of a weight of int8 with a scale for each channel."""
        weight = operator.inputs[1]
        if weight.twin is None or weight.value is None or weight.twin.form.bits != 8:
            return None
        stored = weight_constants(weight, True, f"8:{self._number}:{len(self._operators)}")
        if stored is None or stored.blocks is not None:
            return None
        axis = 3 if operator.name == "DEPTHWISE_CONV_2D" else 0
        if len(stored.integers.scale) == 1:
            stored.integers.axis = axis
        return stored if stored.integers.axis == axis else None
