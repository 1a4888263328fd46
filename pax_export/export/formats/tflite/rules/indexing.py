"""The normal forms of dynamic slices, gather and scatter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pax_export.export.formats.tflite.builder import moves
from pax_export.export.formats.tflite.builder import operators as lite
from pax_export.export.formats.tflite.builder.graph import Tensor
from pax_export.export.formats.tflite.rule import Operation, rule
from pax_export.export.formats.tflite.rules.arithmetic import is_float, larger, smaller
from pax_export.export.formats.tflite.rules.comparison import ordered
from pax_export.export.formats.tflite.rules.layout import cut
from pax_export.export.formats.tflite.tensors import constant, is_static, wrapped


@rule("window")
def window(op: Operation, x: Any, *starts: Tensor, sizes: Sequence[Any]) -> Any:
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
    count, many = (op.sizes.of(op.operands[place].shape[0]) for place in (0, 1))
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
