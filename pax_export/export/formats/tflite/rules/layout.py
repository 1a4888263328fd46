"""Reshapes, transposes, concatenation and slices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from pax_export.export.formats.tflite.builder import moves
from pax_export.export.formats.tflite.builder import operators as lite
from pax_export.export.formats.tflite.builder.graph import Tensor
from pax_export.export.formats.tflite.rule import Operation, rule
from pax_export.export.formats.tflite.tensors import (
    CARRIERS,
    constant,
    full,
    is_static,
    joined,
    reshape,
)
from pax_export.export.portable.decompositions.convolutions import is_plain_pad


@rule("broadcast_in_dim", thin=True)
def broadcast_in_dim(op: Operation, x: Tensor, *sizes: object) -> Any:
    shape, axes = op.params["shape"], op.params["broadcast_dimensions"]
    thin: list[Any] = [1] * len(shape)
    for place, axis in enumerate(axes):
        thin[axis] = 1 if x.shape[place] == 1 else op.operands[0].shape[place]
    return reshape(x, thin, op.sizes)


@rule("reshape")
def reshaped(op: Operation, x: Tensor, *sizes: object) -> Any:
    if op.params.get("dimensions") is not None:
        # vmap moves its axis and joins it with another in one operation.
        x = moves.transpose(x, op.params["dimensions"])
    return reshape(x, op.shape, op.sizes)


rule("squeeze")(lambda op, x: reshape(x, op.shape, op.sizes))
rule("concatenate")(
    lambda op, *xs: xs[0] if len(xs) == 1 else moves.concat(xs, op.params["dimension"])
)
rule("tile")(lambda op, x: moves.tile(x, op.sizes.vector(op.params["reps"])))


@rule("transpose", thin=True)
def transposed(op: Operation, x: Tensor) -> Any:
    permutation = list(op.params["permutation"])
    if len(permutation) <= 5:
        return moves.transpose(x, permutation)
    x = full(x, op.operands[0].shape, op.sizes)
    # Axes that stay side by side are one meanwhile.
    apart = groupby(enumerate(permutation), lambda each: each[1] - each[0])
    runs = [[axis for _, axis in each] for _, each in apart]
    order = sorted(runs)
    sizes = [math.prod(op.operands[0].shape[axis] for axis in run) for run in order]
    x = moves.transpose(reshape(x, sizes, op.sizes), [order.index(run) for run in runs])
    return reshape(x, op.shape, op.sizes)


@rule("split")
def split(op: Operation, x: Tensor) -> list[Any]:
    axis, start, pieces = op.params["axis"], 0, []
    for size in op.params["sizes"]:
        begin, end = op.sizes.of(start), op.sizes.of(start + size)
        pieces.append(cut(x, axis, begin, end, 1))
        start = start + size
    return pieces


def cut(x: Tensor, axis: int, start: Any, end: object, step: int) -> Any:
    """Slices along one axis; the others are whole."""

    def part(tensor: Any, places: list[int]) -> Any:
        index: list[Any] = [slice(None)] * tensor.shape.rank
        index[places[0]] = slice(start, end, step)
        return tensor[tuple(index)]

    return joined(x, [axis], 4, part)


@rule("slice")
def sliced(op: Operation, x: Tensor) -> Any:
    shape = op.operands[0].shape
    starts, limits = op.params["start_indices"], op.params["limit_indices"]
    steps = op.params["strides"] or (1,) * len(shape)
    for axis, (start, limit, step) in enumerate(zip(starts, limits, steps)):
        whole = is_static(start) and start == 0 and limit == shape[axis] and step == 1
        if not whole:
            start, limit = op.sizes.of(start), op.sizes.of(limit)
            x = cut(x, axis, start, limit, int(step))
    return x


@rule("rev")
def reverse(op: Operation, x: Tensor) -> Any:
    for axis in op.params["dimensions"]:
        x = joined(x, [axis], 5, lambda tensor, places: moves.reverse(tensor, places))
    return x


@rule("pad", when=is_plain_pad)
def pad(op: Operation, x: Any, value: Any) -> Any:
    return padded(op, x, value, [ends for *ends, _ in op.params["padding_config"]])


def padded(op: Operation, x: Tensor, value: object, widths: Sequence[Sequence[Any]]) -> Any:
    for axis, (low, high) in enumerate(widths):
        if not (is_static(low) and low == 0 and is_static(high) and high == 0):
            x = _padded_axis(op, x, value, axis, low, high)
    return x


def _padded_axis(
    op: Operation, x: Tensor, value: object, axis: int, low: object, high: object
) -> Any:
    logical = x.dtype == lite.bool_
    if logical:
        x, value = lite.cast(x, lite.int32), lite.cast(value, lite.int32)
    value = moves.reshape(value, [])

    def pad(tensor: Any, places: list[int]) -> Any:
        widths: list[Any] = [[0, 0] for _ in range(tensor.shape.rank)]
        widths[places[0]] = [op.sizes.of(low), op.sizes.of(high)]
        if all(is_static(each) for pair in widths for each in pair):
            return moves.pad(tensor, np.array(widths, np.int32), constant_values=value)
        rows = [moves.stack([lite.cast(each, lite.int32) for each in pair]) for pair in widths]
        return moves.pad(tensor, moves.stack(rows), constant_values=value)

    x = joined(x, [axis], 4, pad)
    return lite.cast(x, lite.bool_) if logical else x


@rule("iota")
def iota(op: Operation, *sizes: object) -> Any:
    axis, name = op.params["dimension"], np.dtype(op.params["dtype"]).name
    size = op.shape[axis]
    thin: list[Any] = [1] * len(op.shape)
    thin[axis] = size
    if is_static(size):
        kind = "float32" if name in ("bfloat16", "float16") else name
        return constant(np.arange(size).astype(kind).reshape([int(each) for each in thin]))
    numbers = moves.range(op.sizes.of(size))
    return reshape(lite.cast(numbers, CARRIERS[name]), thin, op.sizes)
