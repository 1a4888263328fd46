"""Reshapes, transposes, concatenation and slices; dynamic slices, gather and scatter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from pax_export._foundations.types import Size
from pax_export.export.formats.tflite.builder import moves
from pax_export.export.formats.tflite.builder import operators as lite
from pax_export.export.formats.tflite.builder.graph import Tensor, TensorLike
from pax_export.export.formats.tflite.rules.arithmetic import is_float, larger, smaller
from pax_export.export.formats.tflite.rules.comparison import ordered
from pax_export.export.formats.tflite.tensors import (
    CARRIERS,
    Operation,
    constant,
    full,
    is_static,
    joined,
    reshape,
    rule,
    wrapped,
)
from pax_export.export.portable.decompositions.convolutions import is_plain_pad


@rule("broadcast_in_dim", thin=True)
def broadcast_in_dim(op: Operation, x: Tensor, *sizes: TensorLike) -> Any:
    shape, axes = op.params["shape"], op.params["broadcast_dimensions"]
    thin: list[Any] = [1] * len(shape)
    for index, axis in enumerate(axes):
        thin[axis] = 1 if x.shape[index] == 1 else op.operands[0].shape[index]
    return reshape(x, thin, op.sizes)


@rule("reshape")
def reshaped(op: Operation, x: Tensor, *sizes: TensorLike) -> Any:
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


def cut(x: Tensor, axis: int, start: Any, end: TensorLike, step: int) -> Any:
    """Slices along one axis; the others are whole."""

    def part(tensor: Tensor, places: list[int]) -> Any:
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
def pad(op: Operation, x: Tensor, value: Tensor) -> Any:
    return padded(op, x, value, [ends for *ends, _ in op.params["padding_config"]])


def padded(op: Operation, x: Tensor, value: Tensor, widths: Sequence[Sequence[Any]]) -> Any:
    for axis, (low, high) in enumerate(widths):
        if not (is_static(low) and low == 0 and is_static(high) and high == 0):
            x = _padded_axis(op, x, value, axis, low, high)
    return x


def _padded_axis(op: Operation, x: Tensor, value: Tensor, axis: int, low: Size, high: Size) -> Any:
    logical = x.dtype == lite.bool_
    if logical:
        x, value = lite.cast(x, lite.int32), lite.cast(value, lite.int32)
    value = moves.reshape(value, [])

    def pad(tensor: Tensor, places: list[int]) -> Any:
        widths: list[Any] = [[0, 0] for _ in range(tensor.shape.rank)]
        widths[places[0]] = [op.sizes.of(low), op.sizes.of(high)]
        if all(is_static(each) for pair in widths for each in pair):
            return moves.pad(tensor, np.array(widths, np.int32), constant_values=value)
        rows = [moves.stack([lite.cast(each, lite.int32) for each in pair]) for pair in widths]
        return moves.pad(tensor, moves.stack(rows), constant_values=value)

    x = joined(x, [axis], 4, pad)
    return lite.cast(x, lite.bool_) if logical else x


@rule("iota")
def iota(op: Operation, *sizes: TensorLike) -> Any:
    axis, name = op.params["dimension"], np.dtype(op.params["dtype"]).name
    size = op.shape[axis]
    thin: list[Any] = [1] * len(op.shape)
    thin[axis] = size
    if is_static(size):
        kind = "float32" if name in ("bfloat16", "float16") else name
        return constant(np.arange(size).astype(kind).reshape([int(each) for each in thin]))
    numbers = moves.range(op.sizes.of(size))
    return reshape(lite.cast(numbers, CARRIERS[name]), thin, op.sizes)


# --- The normal forms of dynamic slices, gather and scatter --------------------------------------


@rule("window")
def window(op: Operation, x: Tensor, *starts: Tensor, sizes: Sequence[Any]) -> Any:
    for axis, (start, size) in enumerate(zip(starts, sizes)):
        if str(size) == str(op.operands[0].shape[axis]):
            continue
        if is_static(size) and size == 1:
            # One slice of a loop's inputs, mostly.
            x = moves.gather(x, moves.reshape(start, [1]), axis=axis)
            continue
        x = cut(x, axis, start, start + op.sizes.of(size), 1)
        x.set_shape([*x.shape[:axis], size, *x.shape[axis + 1 :]])
    return x


def updated(x: Tensor, update: Tensor, starts: Sequence[Any]) -> Any:
    return moves.dynamic_update_slice(x, update, moves.stack(list(starts)))


def bytes_of(table: Tensor) -> Tensor:
    """Returns a weight of few bits as stored, so that only looked-up rows are cast."""
    if table.value is None and table.made_by == "CAST":
        stored = table.operator.inputs[0]
        if stored.value is not None and stored.dtype.name in ("int8", "uint8", "float16"):
            return stored
    return table


rule("put_window")(lambda op, x, update, *starts: updated(x, update, starts))
rule("take")(
    lambda op, x, places, *, axis: lite.cast(moves.gather(bytes_of(x), places, axis), x.dtype)
)
rule("sizes")(lambda op, *, of: op.sizes.vector(of))
rule("extreme")(
    lambda op, x, *, axes, largest: (lite.reduce_max if largest else lite.reduce_min)(x, list(axes))
)


@rule("take_along")
def take_along(op: Operation, x: Tensor, places: Tensor, *, axis: int) -> Any:
    rows = (_lines(op, each, s.shape, axis) for each, s in zip((x, places), op.operands))
    return _unlined(op, moves.gather(*rows, batch_dims=1, axis=1), axis)


@rule("rank")
def rank(op: Operation, x: Tensor, *, axis: int, count: Any, largest: bool) -> Any:
    """Uses TFLite's `TOPK_V2`, which is stable."""
    keys = ordered(_lines(op, x, op.operands[0].shape, axis), equal_zeros=not largest)
    keys = keys if largest else lite.subtract(-1, keys)
    return _unlined(op, lite.top_k(keys, op.sizes.of(count))[1], axis)


def _lines(op: Operation, x: Tensor, shape: Sequence[Any], axis: int) -> Any:
    """Returns all lines along an axis, as rows."""
    order = _last(len(shape), axis)
    size = math.prod(shape[each] for each in order[:-1])
    return op.reshape(moves.transpose(x, order), [size, shape[axis]])


def _unlined(op: Operation, rows: Tensor, axis: int) -> Any:
    order = _last(len(op.shape), axis)
    found = op.reshape(rows, [op.shape[each] for each in order])
    return moves.transpose(found, [order.index(each) for each in range(len(order))])


def _last(rank: int, axis: int) -> list[int]:
    return [*(each for each in range(rank) if each != axis), axis]


@rule("put")
def put(op: Operation, x: Tensor, places: Tensor, rows: Tensor, *inside: Tensor, how: str) -> Any:
    count, many = (op.sizes.of(op.operands[index].shape[0]) for index in (0, 1))
    known = inside[0].value if inside else None
    drops = bool(inside) and (known is None or not known.all())
    if how == "set" and is_static(many) and many == 1:
        new = updated(x, rows, [moves.reshape(places, []), 0])
        return lite.where(moves.reshape(inside[0], [1, 1]), new, x) if drops else new
    if drops:  # indices outside go to an additional last row
        places = lite.where(inside[0], places, count)
    if how == "add":
        shape = moves.stack([lite.tensor(count + 1), moves.shape(x)[1]])
        return wrapped(
            x + moves.scatter_nd(moves.expand_dims(places, 1), rows, shape)[:-1], op.dtype
        )
    if how == "mul":
        return wrapped(x * moves.unsorted_segment_prod(rows, places, count + 1)[:-1], op.dtype)
    order = constant(np.arange(many, dtype=np.int32)) if is_static(many) else moves.range(many)
    last = moves.unsorted_segment_max(order, places, count + 1)[:-1]
    written = moves.expand_dims(lite.greater_equal(last, 0), 1)
    if how == "set":  # the last one of each place
        if not is_static(many):  # an empty update needs no lookup
            rows = moves.concat([rows, x[:1]], 0)
        return lite.where(written, moves.gather(rows, lite.maximum(last, 0)), x)
    segment = moves.unsorted_segment_max if how == "max" else moves.unsorted_segment_min
    found = lite.where(written, segment(rows, places, count + 1)[:-1], x)
    if is_float(op):  # which kernels lose
        nan = lite.cast(lite.not_equal(rows, rows), lite.float32)
        counts = moves.unsorted_segment_sum(nan, places, count + 1)[:-1]
        found = lite.where(lite.greater(counts, 0.0), lite.constant(np.nan, lite.float32), found)
    return larger(op, x, found) if how == "max" else smaller(op, x, found)
