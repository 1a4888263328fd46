"""Quantized weights: float16, or int8 with a scale per channel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pax_export.export.formats.tflite.builder.encode import graphs_of
from pax_export.export.formats.tflite.builder.graph import Graph, Operator, Tensor

#: Smaller arrays stay as they are: a scale takes more than it saves.
_FEWEST = 1024
#: Which input of an operator may be int8 while the others are float, and the axis of its scales.
_INT8 = {"CONV_2D": (1, 0), "DEPTHWISE_CONV_2D": (1, 3), "FULLY_CONNECTED": (1, 0)}
_INT8["GATHER"] = 0, 0
_LARGEST = 127


def store_small(graphs: Sequence[Graph], kind: str) -> None:
    """Stores large constants as ``"float16"``, or as int8 where kernels take it (``"dynamic"``)."""
    found = graphs_of(graphs)
    if kind == "dynamic":
        _as_int8(found)
    else:
        for graph in found:
            _as_halves(graph)


def _as_halves(graph: Graph) -> None:
    made: dict[int, Tensor] = {}
    before: list[Operator] = []

    def small(tensor: Any) -> Any:
        if tensor is None or tensor.value is None or tensor.dtype != np.float32:
            return tensor
        if tensor.value.size < 2:
            return tensor
        if id(tensor) not in made:
            with np.errstate(over="ignore"):
                halves = tensor.value.astype(np.float16)
            if not np.array_equal(np.isfinite(halves), np.isfinite(tensor.value)):
                made[id(tensor)] = tensor  # too large for a half
                return tensor
            stored = Tensor(tensor.shape, np.float16, None, halves)
            stored.name = tensor.name
            before.append(_dequantized(stored, graph))
            made[id(tensor)] = before[-1].outputs[0]
        return made[id(tensor)]

    for operator in graph.operators:
        operator.inputs = [small(each) for each in operator.inputs]
    graph.operators[:0] = before


def _as_int8(graphs: Iterable[Graph]) -> None:
    made: dict[tuple[int, int], Tensor] = {}
    for graph in graphs:
        tables: dict[int, Operator] = {}
        for operator in graph.operators:
            place, axis = _INT8.get(operator.name, (-1, 0))
            weights = operator.inputs[place] if place >= 0 else None
            if weights is None or weights.value is None or weights.value.size < _FEWEST:
                continue
            if weights.dtype != np.float32 or weights.value.ndim < 2:
                continue
            key = id(weights.value), axis
            if key not in made:
                made[key] = _scaled(weights, axis)
            stored = made[key]
            if operator.name == "GATHER":  # whose kernel gives what it is given
                if id(stored) not in tables:
                    tables[id(stored)] = _dequantized(stored, graph)
                (stored,) = tables[id(stored)].outputs
            operator.inputs = [*operator.inputs[:place], stored, *operator.inputs[place + 1 :]]
        graph.operators[:0] = tables.values()


def _dequantized(stored: Tensor, graph: Graph) -> Operator:
    """Returns the dequantized numbers of a constant, which LiteRT computes once."""
    result = Tensor(stored.shape, np.float32, graph)
    result.operator = Operator("DEQUANTIZE", [stored], [result], {})
    return result.operator


def _scaled(weights: Tensor, axis: int) -> Tensor:
    value = weights.value
    others = tuple(each for each in range(value.ndim) if each != axis)
    most = np.abs(value).max(others, keepdims=True)
    scale = np.where(most > 0, most / _LARGEST, 1).astype(np.float32)
    stored = np.clip(np.rint(value / scale), -_LARGEST, _LARGEST).astype(np.int8)
    tensor = Tensor(weights.shape, np.int8, None, stored)
    tensor.name, tensor.axis, tensor.scale = weights.name, axis, scale.reshape(-1)
    return tensor
