"""Rewrites of written operators that only LiteRT's kernels need.

Kernels add biases and apply ReLU to their results. While a graph is built, rounded inputs are
`DEQUANTIZE` of `QUANTIZE`; a layer with such inputs, whose results are only rounded again, is then
changed to take and return integers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pax_export.export.formats.tflite.builder.encode import graphs_of
from pax_export.export.formats.tflite.builder.graph import Graph, Operator, Tensor, emit
from pax_export.export.formats.tflite.builder.integers import Stored, weight_constants

#: The positions of the weights and the bias among inputs, and the axis of channels in the weights.
_CHANNELS = {
    "CONV_2D": (1, 2, 0), "DEPTHWISE_CONV_2D": (1, 2, 3), "FULLY_CONNECTED": (1, 2, 0),
    "TRANSPOSE_CONV": (1, 3, 0),
}  # fmt: skip
_ACTIVATED = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "ADD", "SUB", "MUL", "DIV")
_REDUCTIONS = (
    "SUM", "MEAN", "REDUCE_MAX", "REDUCE_MIN", "REDUCE_PROD", "REDUCE_ANY", "REDUCE_ALL",
)  # fmt: skip
_ACTIVATIONS = ("RELU", "RELU6")


def simplify(graph: Graph) -> None:
    drop_unread(graph)
    _Fusion(graph).run()
    drop_unread(graph)
    _copy_shared(graph)


def computed_weights(graphs: Iterable[Graph]) -> set[str]:
    """Returns the names of weights that are only in the numbers of other constants."""
    operators = (each for graph in graphs_of(graphs) for each in graph.operators)
    stored = (x for each in operators for x in each.inputs if x is not None and x.value is not None)
    numbers = (x if x.twin is None else x.twin.scales_of_leaf for x in stored)
    return {name for each in numbers if each.is_computed for name in each.sources}


#: Kernels whose results are the bytes of their input, in the same memory.
_SAME_BYTES = ("RESHAPE", "EXPAND_DIMS", "SQUEEZE")
#: Dtypes and ranks that `SLICE` copies.
_SLICED = ("float32", "int8", "uint8", "int16", "int32", "uint32", "int64", "bool")
_MOST_AXES = 5


def _copy_shared(graph: Graph) -> None:
    """Inserts a copy before a reshape whose result would overwrite an array that others read.

    LiteRT writes results of elementwise kernels over their operand if nothing else reads it.  It
    counts the readers of the first tensor of such a chain only: of ``b = (x + 1) * 2``, two
    reshapes share the memory of ``x + 1``, and arithmetic on one changes the other.
    """
    reads: dict[int, list[Operator | None]] = {}
    for operator in (None, *graph.operators):
        for each in graph.outputs if operator is None else operator.inputs:
            reads.setdefault(id(each), []).append(operator)
    placed: list[Operator] = []
    for operator in graph.operators:
        shared = operator.inputs[0] if operator.name in _SAME_BYTES else None
        if (
            shared is not None
            and len(reads[id(shared)]) > 1
            and _in_memory_of_another(shared, graph, reads)
            and _is_written_over(operator.outputs[0], reads)
            and shared.dtype.name in _SLICED
            and 0 < shared.shape.rank <= _MOST_AXES
        ):
            copy = _copy_of(shared, graph)
            operator.inputs[0] = copy.outputs[0]
            placed.append(copy)
        placed.append(operator)
    graph.operators[:] = placed


def _in_memory_of_another(
    tensor: Tensor, graph: Graph, reads: Mapping[int, Sequence[object]]
) -> bool:
    """Whether a kernel may have written a tensor over its operand, which is a result as well."""
    producer = tensor.operator if tensor.graph is graph else None
    return producer is not None and any(
        each is not None
        and each.operator is not None
        and each.graph is graph
        and len(reads[id(each)]) == 1
        and (producer.name in _SAME_BYTES or _has_same_bytes(each, tensor))
        for each in producer.inputs
    )


def _is_written_over(tensor: Tensor, reads: Mapping[int, Sequence[Operator | None]]) -> bool:
    """Whether the only reader of a tensor may write its result over it."""
    readers = reads.get(id(tensor), ())
    if len(readers) != 1 or readers[0] is None:
        return False
    (result, *_) = readers[0].outputs
    same = readers[0].name in _SAME_BYTES
    return _is_written_over(result, reads) if same else _has_same_bytes(tensor, result)


def _has_same_bytes(tensor: Tensor, result: Tensor) -> bool:
    same = list(tensor.shape) == list(result.shape)
    return same and tensor.dtype.itemsize == result.dtype.itemsize


def _copy_of(tensor: Tensor, graph: Graph) -> Operator:
    begin, size = (np.full(tensor.shape.rank, each, np.int32) for each in (0, -1))
    ends = [Tensor.of(each) for each in (begin, size)]
    copy = graph.result("SLICE", [tensor, *ends], tensor.shape, tensor.dtype).operator
    copy.source = tensor.operator.source
    return copy


def drop_unread(graph: Graph) -> None:
    """Removes operators whose results are not read."""
    read = {id(each) for each in graph.outputs}
    remaining = []
    for operator in reversed(graph.operators):
        if any(id(each) in read for each in operator.outputs):
            read.update(id(each) for each in operator.inputs if each is not None)
            remaining.append(operator)
    graph.operators[:] = reversed(remaining)


class _Fusion:
    """One pass over the operators of a graph, in their order."""

    def __init__(self, graph: Graph):
        self._graph = graph
        read = (*graph.outputs, *(each for o in graph.operators for each in o.inputs))
        self._reads = Counter(map(id, read))
        self._instead: dict[int, Tensor] = {}

    def run(self) -> None:
        remaining = []
        for operator in self._graph.operators:
            operator.inputs = [self._replacement_of(each) for each in operator.inputs]
            found = self._fuse_operator(operator)
            if found is None:
                remaining.append(operator)
                continue
            (old,) = operator.outputs
            self._instead[id(old)] = found
            self._reads[id(found)] = self._reads[id(old)]
        self._graph.operators[:] = remaining
        self._graph.outputs = [self._replacement_of(each) for each in self._graph.outputs]

    def _replacement_of(self, tensor: Tensor) -> Any:
        return self._instead.get(id(tensor), tensor)

    def _fuse_operator(self, operator: Operator) -> Tensor | None:
        """Returns the tensor that replaces the result of an operator, or None to keep it."""
        if operator.name in _ACTIVATIONS:
            return self._fuse_activation(operator)
        if operator.name == "RESHAPE":
            return self._keep_axes(operator)
        return self._fuse_bias(operator) if operator.name == "ADD" else None

    def _producer(self, tensor: Tensor) -> Operator | None:
        """Returns the operator of a tensor with one reader, before reshapes that keep channels."""
        while self._reads.get(id(tensor)) == 1 and tensor.operator and tensor.graph is self._graph:
            operator = tensor.operator
            if operator.name != "RESHAPE":
                return operator
            source = operator.inputs[0]
            if not (source.shape and tensor.shape and source.shape[-1] == tensor.shape[-1]):
                return None
            tensor = source
        return None

    def _fuse_activation(self, operator: Operator) -> Tensor | None:
        (x,) = operator.inputs
        producer = self._producer(x)
        if producer is None or producer.name not in _ACTIVATED or _is_activated(producer):
            return None
        if x.dtype != np.float32:
            return None
        producer.options = {**producer.options, "fused_activation_function": operator.name}
        return x

    def _keep_axes(self, operator: Operator) -> Tensor | None:
        """Lets a reduction keep its axes if a reshape inserts them again."""
        (x, _), (result,) = operator.inputs, operator.outputs
        producer = x.operator if self._reads.get(id(x)) == 1 and x.graph is self._graph else None
        if producer is None or producer.name not in _REDUCTIONS or producer.options["keep_dims"]:
            return None
        source, places = producer.inputs
        axes = {int(axis) for axis in np.atleast_1d(places.value)}
        shape = [1 if axis in axes else size for axis, size in enumerate(source.shape)]
        if list(result.shape) != shape or shape.count(None) > 1:
            return None
        producer.options = {**producer.options, "keep_dims": True}
        x.shape = result.shape
        return x

    def _fuse_bias(self, operator: Operator) -> Tensor | None:
        """Makes a vector that is added to each channel the bias of a layer without one."""
        x, other = operator.inputs
        if x.value is not None:
            x, other = other, x
        producer = self._producer(x) if other.value is not None and x.dtype == np.float32 else None
        if producer is None or producer.name not in _CHANNELS or _is_activated(producer):
            return None
        *places, axis = _CHANNELS[producer.name]
        weights, bias = (producer.inputs[index] for index in places)
        if bias is not None and (bias.value is None or np.any(bias.value)):
            return None
        number, channels = np.asarray(other.value), weights.shape[axis]
        if number.size not in (1, channels) or number.size != (number.shape or (1,))[-1]:
            return None
        if list(x.shape) != list(operator.outputs[0].shape) or x.shape[-1] != channels:
            return None
        vector = np.ascontiguousarray(np.broadcast_to(number.reshape(-1), channels))
        new = Tensor.of(vector)
        new.sources, new.is_computed = other.sources, other.is_computed
        producer.inputs[places[1]] = new
        return x


def _is_activated(operator: Operator) -> bool:
    return bool(operator.options.get("fused_activation_function"))


# --- Rounded inputs of quantized weights: layers that LiteRT computes with integers only ---


_LAYERS = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")
_SUMS = ("ADD", "MEAN")
#: Operators that only move integers, or choose among them.
_MOVES = ("RESHAPE", "TRANSPOSE", "PAD", "MAX_POOL_2D", "SQUEEZE", "STRIDED_SLICE")
_INT32 = np.iinfo(np.int32)


def rounded(x: Tensor, scale: float, zero: int) -> Tensor:
    """Returns inputs rounded to the values of their integers."""
    options = {"scale": scale, "zero": zero}  # so that others are another operator
    (integers,) = emit("QUANTIZE", [x], [(x.shape, np.int8)], **options)
    _as(integers, scale, zero)
    return emit("DEQUANTIZE", [integers], [(x.shape, np.float32)])[0]


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
            operator.inputs[1] = stored.integers
            if source is not None:
                operator.inputs[0] = source

    def _sum(self, operator: Operator) -> None:
        """Adds integers, if all operands are some and the result is only read to be rounded."""
        scale = self._scale_of_result(operator)
        if scale is None:
            return
        numbers = [each for each in operator.inputs if each.dtype == np.float32]
        known = list(map(self._integers, numbers))
        if None not in known:
            operator.inputs[: len(known)] = known  # the axes of a mean stay
            self._give_integers(operator, *scale)

    def _gives_integers(self, operator: Operator, x: Tensor, stored: Stored) -> bool:
        """Makes a layer one of integers alone, if its result is only read to be rounded."""
        scale = self._scale_of_result(operator)
        bias = operator.inputs[2] if len(operator.inputs) > 2 else None
        if scale is None or (bias is not None and bias.value is None):
            return False
        scales = np.asarray(stored.integers.scale, np.float64) * float(x.scale[0])
        if bias is None:
            numbers = np.zeros(stored.integers.shape[stored.integers.axis], np.float64)
        else:
            numbers = np.asarray(bias.value).reshape(-1).astype(np.float64)
        whole = np.clip(np.rint(numbers / scales), _INT32.min, _INT32.max).astype(np.int32)
        small = Tensor.of(whole, "" if bias is None else bias.name)
        small.scale = scales.astype(np.float32)
        operator.inputs = [x, stored.integers, small]
        self._give_integers(operator, *scale)
        return True

    def _scale_of_result(self, operator: Operator) -> tuple[float, Any] | None:
        """Returns the scale and the zero point with which all readers round a result."""
        ends = self._ends(operator.outputs[0])
        scales = {(float(end.outputs[0].scale[0]), end.outputs[0].zero) for end in ends}
        return scales.pop() if len(scales) == 1 else None

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
        move = like.operator
        inputs = [source, *move.inputs[1:]]
        result = self._graph.result(move.name, inputs, like.shape, source.dtype, move.options)
        self._operators.append(result.operator)
        return result

    def _weights(self, operator: Operator) -> Stored | None:
        """The constants of a weight of int8 with a scale for each channel."""
        weight = operator.inputs[1]
        if weight.twin is None or weight.twin.form.bits != 8:
            return None
        stored = weight_constants(weight, True, f"8:{self._number}:{len(self._operators)}")
        if stored is None or stored.blocks is not None:
            return None
        axis = 3 if operator.name == "DEPTHWISE_CONV_2D" else 0
        if len(stored.integers.scale) == 1:
            stored.integers.axis = axis
        return stored if stored.integers.axis == axis else None
