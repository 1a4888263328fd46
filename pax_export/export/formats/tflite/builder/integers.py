"""Quantized weights: stores the model's integers in the file.

While a graph is built, such a weight is a float constant, so layouts and scales are handled as
usual. Its twin tracks the integers of each number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from pax_export._foundations.optional import require
from pax_export.export.formats.tflite.builder.encode import graphs_of
from pax_export.export.formats.tflite.builder.graph import (
    Graph,
    Operator,
    Tensor,
    computed_once,
    constant,
)
from pax_export.export.validation.integers import Arithmetic, Quantized, whole_leaves
from pax_export.precision.quantized import GROUP, Form, unpacked

#: Bits, groups and schemes for which LiteRT has products.
_FUSED = ((8, None, "symmetric"), (4, GROUP, "symmetric"))


@dataclass(frozen=True, eq=False)
class StoredNumbers:
    """The value of a constant for a quantized weight, dequantized when it is read.

    Attributes:
        form: the format of integers and scales.
        integers_of_leaf: the model's integers.
        scales_of_leaf: the model's scales.
        shape: the shape of the constant.
        steps: functions that only moved elements, in order.
        zeros_of_leaf: the model's zero points, or None.
    """

    form: Form
    integers_of_leaf: Tensor
    scales_of_leaf: Tensor
    shape: tuple[int, ...]
    steps: tuple[Any, ...] = ()
    zeros_of_leaf: Tensor | None = None

    dtype = np.dtype(np.float32)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def leaf(self) -> str:
        """The name of the integers in the model."""
        (name,) = self.integers_of_leaf.sources or ("",)
        return name

    def moved(self, move: Callable[..., Any], shape: tuple[int, ...]) -> StoredNumbers:
        return replace(self, shape=shape, steps=(*self.steps, move))

    def _whole(self) -> np.ndarray:
        whole = np.asarray(self.integers_of_leaf.value)
        if self.form.scheme == "float":
            return whole
        whole = whole.astype(np.int8, copy=False)
        return unpacked(whole, self.form.axis) if self.form.bits == 4 else whole

    def _after_steps(self, array: np.ndarray) -> np.ndarray:
        for step in self.steps:
            array = np.asarray(step(array))
        return array

    @property
    def integers(self) -> np.ndarray:
        return self._after_steps(self._whole())

    @property
    def scales(self) -> np.ndarray:
        """The scale of each number."""
        return self._after_steps(self._for_each(self.scales_of_leaf))

    @property
    def zeros(self) -> np.ndarray | None:
        """The zero point of each number, or None."""
        of_leaf = self.zeros_of_leaf
        return None if of_leaf is None else self._after_steps(self._for_each(of_leaf))

    def _for_each(self, stored: Tensor) -> np.ndarray:
        each, group = np.asarray(stored.value, np.float32), self.form.group
        each = each if group is None else np.repeat(each, group, each.ndim + self.form.axis)
        return np.broadcast_to(each, self._whole_shape)

    @property
    def _whole_shape(self) -> tuple[int, ...]:
        return self.form.shape(self.integers_of_leaf.shape)

    @property
    def places(self) -> np.ndarray:
        """The position of each number's integer in the model."""
        count = math.prod(self._whole_shape)
        return self._after_steps(np.arange(count, dtype=np.int32).reshape(self._whole_shape))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        zeros, whole = self.zeros, self.integers.astype(np.float32)
        array = (whole if zeros is None else whole - zeros) * self.scales
        return array if dtype is None else array.astype(dtype, copy=False)


def numbers(
    integers: Tensor, scales: Tensor, zeros: Tensor | None = None, *, form: Form
) -> list[Tensor]:
    """Returns the constant that integers, scales and zero points represent."""
    value = StoredNumbers(form, integers, scales, form.shape(integers.shape), zeros_of_leaf=zeros)
    result = Tensor.of(value, value.leaf.removesuffix(".integers"))
    result.twin, result.sources = value, integers.sources | scales.sources
    return [result]


def pairs(integers: Tensor) -> Tensor:
    """Packed integers of 4 bits in TFLite's order: neighbors along the last axis share a byte."""

    def packed() -> list[Tensor]:
        value = _in_pairs(unpacked(np.asarray(integers.value, np.int8), -1))
        result = Tensor.of(value, f"{integers.name}:pairs")
        result.sources = integers.sources
        return [result]

    return computed_once(("pairs",), [integers], packed)[0]


def _in_pairs(integers: np.ndarray) -> np.ndarray:
    """Two integers in each byte, the first one in its low half."""
    if integers.size % 2 or integers.shape[-1] % 2:
        integers = np.append(integers.reshape(-1), np.zeros(integers.size % 2, np.int8))
    low, high = integers[..., ::2], integers[..., 1::2]
    return (low & 15) | (high << 4)


def store_integers(graphs: Sequence[Graph], accuracy_level: int) -> None:
    """Replaces float constants of quantized weights by their integers.

    Products with them round activations to 8 bits if `accuracy_level` is 4; other operators read
    dequantized numbers, which LiteRT computes when it loads a file if scales are per channel.
    """
    constants: dict[tuple[int, bool], Stored | None] = {}
    for graph in graphs_of(graphs):
        before: list[Operator] = []
        here: dict[int, Tensor] = {}
        for operator in graph.operators:
            fused = operator.name == "FULLY_CONNECTED" and accuracy_level == 4
            for index, tensor in enumerate(operator.inputs):
                if tensor is None or tensor.twin is None or tensor.dtype != np.float32:
                    continue  # no quantized weight, or its integers
                form = tensor.twin.form
                direct = fused and index == 1 and (form.bits, form.group, form.scheme) in _FUSED
                key = id(tensor.value), direct
                if key not in constants:
                    constants[key] = weight_constants(
                        tensor, direct, f"{form.bits}:{len(constants)}"
                    )
                stored = constants[key]
                if stored is None:
                    continue
                if not direct and key[0] not in here:
                    here[key[0]] = _computed_numbers(stored, graph, before)
                new = stored.integers if direct else here[key[0]]
                operator.inputs[index] = new
        graph.operators[:0] = before


_PRODUCTS = frozenset(
    "BATCH_MATMUL CONV_2D CONV_3D DEPTHWISE_CONV_2D FULLY_CONNECTED TRANSPOSE_CONV".split()
)
#: Operators between stored integers and a product of their numbers.
_OF_WEIGHTS = frozenset("CAST DEQUANTIZE MUL RESHAPE SUB TRANSPOSE".split())


def arithmetic(graphs: Sequence[Graph]) -> Arithmetic:
    """Finds what the products of graphs compute with, and their casts to half precision."""
    multiplied: dict[bool, set[str]] = {True: set(), False: set()}
    looked_up, casts = set[str](), list[str]()
    results = {id(each) for graph in graphs for each in graph.outputs}
    for operator in (each for graph in graphs_of(graphs) for each in graph.operators[::-1]):
        (result, *_) = operator.outputs
        if operator.name in ("CAST", "RESHAPE", "TRANSPOSE") and id(result) in results:
            results.add(id(operator.inputs[0]))  # which has the dtype of the model
        elif operator.name == "CAST" and result.dtype.name in ("float16", "bfloat16"):
            casts.append(result.dtype.name)
        for x in operator.inputs if operator.name in _PRODUCTS else ():
            source = x
            while source is not None and source.made_by in _OF_WEIGHTS:
                source = source.operator.inputs[0]
            if source is not None and source.twin is not None:
                multiplied[source is x].add(source.twin.leaf)
        if operator.name == "GATHER":
            names = operator.inputs[0].sources
            looked_up.update(name for name in names if name.endswith(".integers"))
    return Arithmetic(multiplied[True], multiplied[False], looked_up, casts)


class Stored(NamedTuple):
    """Integers as a constant, and scales and zero points that are constants of their own."""

    integers: Tensor
    blocks: Tensor | None
    zeros: Tensor | None = None


def weight_constants(tensor: Tensor, direct: bool, suffix: str) -> Stored | None:
    """Returns the constants of a weight; None if scales do not have LiteRT's layout."""
    twin = tensor.twin
    scales, form = twin.scales, twin.form
    dtype = ml_dtypes.int4 if form.bits == 4 else np.int8
    dtype = np.float16 if form.scheme == "float" else dtype  # the smallest that LiteRT has
    stored = Tensor(tensor.shape, dtype, None, _stored_integers(twin))
    stored.name, stored.sources, stored.twin = f"{twin.leaf}:int{suffix}", tensor.sources, twin
    if form.group is None:
        axes = [a for a in range(scales.ndim) if (np.take(scales, [0], a) != scales).any()]
        if len(axes) > 1:
            return None
        stored.axis = axes[0] if axes else 0
        first = tuple(slice(None) if a == stored.axis else slice(1) for a in range(scales.ndim))
        if form.scheme == "float":
            return Stored(stored, Tensor.of(scales[first].copy(), f"{stored.name}.scales"))
        stored.scale = scales[first].reshape(-1).copy()
        return Stored(stored, None)
    if not scales.ndim or scales.shape[-1] % form.group:
        return None
    parts = [scales] if twin.zeros is None else [scales, twin.zeros]
    parts = [each.reshape(*scales.shape[:-1], -1, form.group) for each in parts]
    if any((each != each[..., :1]).any() for each in parts):
        return None
    halves, *zeros = (np.ascontiguousarray(each[..., 0].astype(np.float16)) for each in parts)
    blocks = Tensor.of(_once(halves, twin.scales_of_leaf), f"{stored.name}.scales")
    if direct:
        stored.blocks = blocks
    else:  # LiteRT dequantizes blocks as if they had one scale
        stored.scale = np.ones(1, np.float32)
    return Stored(stored, blocks, *(Tensor.of(each, f"{stored.name}.zeros") for each in zeros))


def _stored_integers(twin: StoredNumbers) -> np.ndarray:
    """Returns the integers as stored, sharing an existing array of the file if possible."""
    leaf = twin.integers_of_leaf
    if twin.form.scheme == "float":
        return twin.integers.astype(np.float16)
    if twin.form.bits != 4:
        return _once(np.ascontiguousarray(twin.integers), leaf)
    integers = _in_pairs(twin.integers)
    return _once(integers, pairs(leaf)) if twin.form.axis == -1 else integers


def _once(array: np.ndarray, other: Tensor) -> np.ndarray:
    """The array of the other constant if it is the same, so that the file has it once."""
    is_same = other.value.dtype == array.dtype and np.array_equal(other.value, array)
    return other.value if is_same else array


def _computed_numbers(stored: Stored, graph: Graph, before: list[Operator]) -> Tensor:
    """Returns dequantized numbers, computed by operators before all others."""

    def add(name: str, inputs: list[Any], shape: Sequence[Any]) -> Tensor:
        result = graph.result(name, inputs, shape, np.float32)
        before.append(result.operator)
        return result

    def reshaped(x: Tensor, shape: Sequence[Any]) -> Tensor:
        return add("RESHAPE", [x, constant(np.array(shape, np.int32))], shape)

    integers, blocks, zeros = stored
    wide = add("DEQUANTIZE", [integers], integers.shape)
    if blocks is None:
        return wide
    if blocks.dtype == np.float32:
        return add("MUL", [wide, blocks], integers.shape)
    count = blocks.shape.size
    grouped = reshaped(wide, [count, GROUP])
    for name, each in (("SUB", zeros), ("MUL", blocks)):
        if each is not None:
            by_group = reshaped(add("DEQUANTIZE", [each], each.shape), [count, 1])
            grouped = add(name, [grouped, by_group], [count, GROUP])
    return reshaped(grouped, integers.shape)


def read_integers(
    graphs: Sequence[Graph], file: Path, leaves: Mapping[str, Any]
) -> Iterator[tuple[Quantized, np.ndarray]]:
    """Returns the integers of weights in a file, with their leaves.

    `leaves` are those of the model by name; loops contain some of them unchanged.
    """
    schema = require("ai_edge_litert.schema_py_generated", "tflite", "to_tflite")
    content = np.memmap(file, np.uint8, "r")
    model = schema.ModelT.InitFromPackedBuf(content, 0)
    tensors = {t.name.decode(): t for each in model.subgraphs for t in each.tensors}

    def data_of(name: str) -> np.ndarray:
        return np.asarray(model.buffers[tensors[name].buffer].data).view(np.int8)

    for each in whole_leaves(tensors, leaves):
        yield each, data_of(each.leaf).reshape(tensors[each.leaf].shape)
    inputs = (t for each in graphs_of(graphs) for o in each.operators for t in o.inputs)
    constants = {t.name: t for t in inputs if t is not None and t.value is not None}
    for each in constants.values():
        leaf, is_pairs, _ = each.name.partition(":pairs")
        if each.twin is None and leaf.endswith(".integers") and each.dtype == np.int8:  # a table
            data = data_of(each.name).reshape(tuple(each.shape))
            if is_pairs:
                data = np.stack([np.left_shift(data, 4, dtype=np.int8) >> 4, data >> 4], -1)
                data = data.reshape(*each.shape[:-1], -1)
            form = Form(4 if is_pairs else 8, GROUP if is_pairs else None, -1, "float32")
            yield Quantized(leaf, form, tuple(range(data.ndim))), data
        if each.twin is None or each.dtype.name not in ("int4", "int8", "float16"):
            continue
        stored, twin, data = tensors[each.name], each.twin, data_of(each.name)
        if stored.type == schema.TensorType.FLOAT16:
            data = data.view(np.float16).astype(twin.integers_of_leaf.value.dtype)
        if stored.type == schema.TensorType.INT4:
            low = np.left_shift(data, 4, dtype=np.int8) >> 4
            data = np.stack([low, data >> 4], -1).reshape(-1)[: each.shape.size]
        yield Quantized(twin.leaf, twin.form, twin.places), data.reshape(stored.shape)


# --- Quantized weights: float16, or int8 with a scale per channel --------------------------------

#: Smaller arrays stay as they are: a scale takes more than it saves.
_FEWEST = 1024
#: Which input of an operator may be int8 while the others are float, and the axis of its scales.
_INT8 = {"CONV_2D": (1, 0), "DEPTHWISE_CONV_2D": (1, 3), "FULLY_CONNECTED": (1, 0)}
_INT8["GATHER"] = 0, 0
_LARGEST = 127


def store_small(graphs: Sequence[Graph], kind: str) -> None:
    """Stores large constants as ``"float16"``, or as int8 where kernels take it (``"dynamic"``)."""
    if kind == "dynamic":
        _as_int8(graphs_of(graphs))
    else:
        for graph in graphs_of(graphs):
            _as_halves(graph)


def _as_halves(graph: Graph) -> None:
    replacements: dict[int, Tensor] = {}
    before: list[Operator] = []

    def small(tensor: Tensor) -> Tensor:
        with np.errstate(over="ignore"):
            halves = tensor.value.astype(np.float16)
        if not np.array_equal(np.isfinite(halves), np.isfinite(tensor.value)):
            return tensor  # too large for a half
        numbers = _dequantized(Tensor.of(halves, tensor.name), graph)
        before.append(numbers.operator)
        return numbers

    for operator in graph.operators:
        for index, tensor in enumerate(operator.inputs):
            if tensor is None or tensor.value is None or tensor.dtype != np.float32:
                continue
            if tensor.value.size > 1:
                if id(tensor) not in replacements:
                    replacements[id(tensor)] = small(tensor)
                operator.inputs[index] = replacements[id(tensor)]
    graph.operators[:0] = before


def _as_int8(graphs: Iterable[Graph]) -> None:
    scaled: dict[tuple[int, int], Tensor] = {}
    for graph in graphs:
        tables: dict[int, Tensor] = {}
        for operator in graph.operators:
            index, axis = _INT8.get(operator.name, (-1, 0))
            weights = operator.inputs[index] if index >= 0 else None
            if weights is None or weights.value is None or weights.value.size < _FEWEST:
                continue
            if weights.dtype != np.float32 or weights.value.ndim < 2:
                continue
            key = id(weights.value), axis
            if key not in scaled:
                scaled[key] = _scaled(weights, axis)
            stored = scaled[key]
            if operator.name == "GATHER":  # whose kernel gives what it is given
                if id(stored) not in tables:
                    tables[id(stored)] = _dequantized(stored, graph)
                stored = tables[id(stored)]
            operator.inputs[index] = stored
        graph.operators[:0] = [each.operator for each in tables.values()]


def _dequantized(stored: Tensor, graph: Graph) -> Tensor:
    """Returns the dequantized numbers of a constant, which LiteRT computes once."""
    return graph.result("DEQUANTIZE", [stored], stored.shape, np.float32)


def _scaled(weights: Tensor, axis: int) -> Tensor:
    value = weights.value
    others = tuple(each for each in range(value.ndim) if each != axis)
    most = np.abs(value).max(others, keepdims=True)
    scale = np.where(most > 0, most / _LARGEST, 1).astype(np.float32)
    stored = np.clip(np.rint(value / scale), -_LARGEST, _LARGEST).astype(np.int8)
    tensor = Tensor.of(stored, weights.name)
    tensor.axis, tensor.scale = axis, scale.reshape(-1)
    return tensor
