"""Weights that are quantized in the model: the integers that it has, in the file.

Until a graph is whole such a weight is a constant of numbers, so that layouts and scales are
worked out as for any.  Its twin says where each number comes from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from pax_export._optional import require
from pax_export._quantized import GROUP, Form, unpacked
from pax_export.export.formats.tflite.builder.emit import constant
from pax_export.export.formats.tflite.builder.encode import graphs_of
from pax_export.export.formats.tflite.builder.graph import Graph, Operator, Tensor
from pax_export.export.validation.integers import Quantized

#: Bits and groups for which LiteRT has products.
_FUSED = ((8, None), (4, GROUP))


class IntegerConstants(NamedTuple):
    """A quantized weight: the name of its integers, these, and a scale for each."""

    leaf: str
    form: Form
    integers: np.ndarray
    scales: np.ndarray


class Twin(NamedTuple):
    """Where the numbers of a constant come from.

    Attributes:
        held: the weight.
        places: for each number, where its integer lies.
        factor: by what numbers are multiplied.
    """

    held: IntegerConstants
    places: np.ndarray
    factor: np.ndarray

    def times(self, factor: np.ndarray) -> Twin:
        return self._replace(factor=self.factor * factor)

    @property
    def integers(self) -> np.ndarray:
        return self.held.integers.reshape(-1)[self.places]

    @property
    def scales(self) -> np.ndarray:
        return self.held.scales.reshape(-1)[self.places] * self.factor


def numbers(integers: Tensor, scales: Tensor, form: Form) -> list[Tensor]:
    """The constant that integers and scales stand for."""
    assert integers.value is not None
    assert scales.value is not None
    whole = integers.value.astype(np.int8)
    whole = np.asarray(unpacked(whole, form.axis)) if form.bits == 4 else whole
    each = scales.value.astype(np.float32)
    each = each if form.group is None else np.repeat(each, form.group, each.ndim + form.axis)
    each = np.broadcast_to(each, whole.shape)
    made = Tensor(whole.shape, np.float32, None, whole * each)
    made.sources = integers.sources | scales.sources
    places = np.arange(whole.size, dtype=np.int32).reshape(whole.shape)
    (leaf,) = integers.sources or ("",)
    made.twin = Twin(IntegerConstants(leaf, form, whole, each), places, np.ones((), np.float32))
    made.name = leaf.removesuffix(".integers")
    return [made]


def store_integers(graphs: Sequence[Graph], accuracy_level: int) -> None:
    """Stores integers for numbers that stand for them.

    Products with them round activations to 8 bits where `accuracy_level` is 4; all else reads
    the numbers, which LiteRT computes when it loads a file if there is a scale for each channel.
    """
    made: dict[tuple[int, bool], Stored | None] = {}
    for graph in graphs_of(graphs):
        before: list[Operator] = []
        here: dict[int, Tensor] = {}
        for operator in graph.operators:
            fused = operator.name == "FULLY_CONNECTED" and accuracy_level == 4
            for place, tensor in enumerate(operator.inputs):
                if tensor is None or tensor.twin is None or tensor.value is None:
                    continue
                if tensor.dtype != np.float32:  # integers already
                    continue
                form = tensor.twin.held.form
                direct = fused and place == 1 and (form.bits, form.group) in _FUSED
                key = id(tensor.value), direct
                if key not in made:
                    made[key] = weight_constants(tensor, direct, f"{form.bits}:{len(made)}")
                stored = made[key]
                if stored is None:
                    continue
                if not direct and key[0] not in here:
                    here[key[0]] = _numbers(stored, graph, before)
                new = stored.integers if direct else here[key[0]]
                operator.inputs = [*operator.inputs[:place], new, *operator.inputs[place + 1 :]]
        graph.operators[:0] = before


class Stored(NamedTuple):
    """Integers as a constant, and scales that are a constant of their own."""

    integers: Tensor
    blocks: Tensor | None


def weight_constants(tensor: Tensor, direct: bool, suffix: str) -> Stored | None:
    """The constants of a weight; None where scales do not lie as LiteRT has them."""
    twin = tensor.twin
    scales, form = twin.scales, twin.held.form
    dtype = ml_dtypes.int4 if form.bits == 4 else np.int8
    stored = Tensor(tensor.shape, dtype, None, twin.integers.astype(dtype))
    stored.name, stored.sources, stored.twin = f"{twin.held.leaf}:int{suffix}", tensor.sources, twin
    if form.group is None:
        axes = [a for a in range(scales.ndim) if (np.take(scales, [0], a) != scales).any()]
        if len(axes) > 1:
            return None
        stored.axis = axes[0] if axes else 0
        first = tuple(slice(None) if a == stored.axis else 0 for a in range(scales.ndim))
        stored.scale = scales[first]
        return Stored(stored, None)
    if not scales.ndim or scales.shape[-1] % form.group:
        return None
    grouped = scales.reshape(*scales.shape[:-1], -1, form.group)
    if (grouped != grouped[..., :1]).any():
        return None
    halves = np.ascontiguousarray(grouped[..., 0].astype(np.float16))
    blocks = Tensor(halves.shape, np.float16, None, halves)
    blocks.name = f"{stored.name}.scales"
    if direct:
        stored.blocks = blocks
    else:  # LiteRT dequantizes blocks as if they had one scale
        stored.scale = np.ones(1, np.float32)
    return Stored(stored, blocks)


def _numbers(stored: Stored, graph: Graph, before: list[Operator]) -> Tensor:
    """The numbers that integers stand for, made by operators that come before all others."""

    def add(name: str, inputs: list[Any], shape: Sequence[Any]) -> Tensor:
        result = Tensor(shape, np.float32, graph)
        result.operator = Operator(name, inputs, [result], {})
        before.append(result.operator)
        return result

    def reshaped(x: Tensor, shape: Sequence[Any]) -> Tensor:
        return add("RESHAPE", [x, constant(np.array(shape, np.int32))], shape)

    integers, blocks = stored
    wide = add("DEQUANTIZE", [integers], integers.shape)
    if blocks is None:
        return wide
    count = blocks.shape.size
    scales = reshaped(add("DEQUANTIZE", [blocks], blocks.shape), [count, 1])
    made = add("MUL", [reshaped(wide, [count, GROUP]), scales], [count, GROUP])
    return reshaped(made, integers.shape)


def read_integers(graphs: Sequence[Graph], file: Path) -> Iterator[tuple[Quantized, np.ndarray]]:
    """The integers of weights in a file, with where they come from."""
    schema = require("ai_edge_litert.schema_py_generated", "tflite", "to_tflite")
    model = schema.ModelT.InitFromPackedBuf(bytearray(file.read_bytes()), 0)
    tensors = {t.name.decode(): t for each in model.subgraphs for t in each.tensors}
    for graph in graphs_of(graphs):
        for each in (t for o in graph.operators for t in o.inputs if t is not None):
            if each.twin is None or each.dtype.name not in ("int4", "int8"):
                continue
            stored, twin = tensors[each.name], each.twin
            data = np.asarray(model.buffers[stored.buffer].data).view(np.int8)
            if stored.type == schema.TensorType.INT4:
                low = np.left_shift(data, 4, dtype=np.int8) >> 4
                data = np.stack([low, data >> 4], -1).reshape(-1)[: each.value.size]
            yield Quantized(twin.held.leaf, twin.held.form, twin.places), data.reshape(stored.shape)
