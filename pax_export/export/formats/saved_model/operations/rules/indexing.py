"""Elements at positions: the normal forms of gathers, scatters and dynamic slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pax_export._foundations.types import Size
from pax_export.export.formats.saved_model.operations.graph import NodeBuilder, Output, rule
from pax_export.export.portable.sizes import same_size


@rule("take")
def take(builder: NodeBuilder, x: Output, places: Output, *, axis: int) -> Output:
    return builder("GatherV2", x, places, np.array(axis, np.int32))


@rule("take_along")
def take_along(builder: NodeBuilder, x: Output, places: Output, *, axis: int) -> Output:
    """By a batched gather, with the axis last."""
    axis %= x.rank
    order = [*(each for each in range(x.rank) if each != axis), axis]
    operands = [builder.transpose(each, order) for each in (x, places)]
    last = np.array(x.rank - 1, np.int32)
    gathered = builder("GatherV2", *operands, last, batch_dims=x.rank - 1)
    sizes = tuple(operands[1].shape)
    return builder.transpose(
        builder.shaped(gathered, sizes), [int(each) for each in np.argsort(order)]
    )


_SCATTERS = {"set": "Update", "add": "Add", "max": "Max", "min": "Min"}


@rule("put")
def put(
    builder: NodeBuilder, x: Output, places: Output, rows: Output, *inside: Output, how: str
) -> Output:
    if how == "mul":  # an operator of products leaves out negative places
        places = builder("SelectV2", inside[0], places, -1) if inside else places
        count = builder.sizes.of(x.shape[0])
        return builder("Mul", x, builder("UnsortedSegmentProd", rows, places, count))
    if how in ("max", "min") and x.is_float:  # of NaN, operators have no order
        flags = [builder.cast(builder("IsNan", each), x.dtype) for each in (x, rows)]
        bad = _put(builder, builder.shaped(flags[0], x.shape), places, flags[1], inside, "max")
        bad = builder("Greater", bad, builder.like(0, x))
        updated = _put(builder, x, places, rows, inside, how)
        return builder("SelectV2", bad, builder.like(np.nan, x), updated)
    return _put(builder, x, places, rows, inside, how)


def _put(
    builder: NodeBuilder, x: Output, places: Output, rows: Output, inside: Sequence, how: str
) -> Output:
    shape = x.shape
    cuts = inside and (inside[0].known is None or not inside[0].known.all())
    if cuts:  # rows outside go to one more row, which is cut off
        places = builder("SelectV2", inside[0], places, builder.sizes.of(shape[0]))
        x = builder("PadV2", x, [[0, 1], [0, 0]], builder.like(0, x))
    column = builder("ExpandDims", places, 1)
    updated = builder(f"TensorScatter{_SCATTERS[how]}", x, column, rows)
    return (
        builder("StridedSlice", updated, [0, 0], builder.sizes.shape(shape), [1, 1])
        if cuts
        else updated
    )


@rule("window")
def window(builder: NodeBuilder, x: Output, *starts: Output, sizes: Sequence[Any]) -> Output:
    if not starts:
        return x
    known = [int(each.known) for each in starts if each.known is not None]
    if len(known) < len(starts):
        known = builder("Pack", [builder.cast(each, np.int32) for each in starts])
    return builder("Slice", x, known, builder.sizes.shape(sizes))


@rule("put_window")
def put_window(builder: NodeBuilder, x: Output, update: Output, *starts: Output) -> Output:
    """Replaces the elements at their positions, along the axes up to the last that is cut."""
    cut = [axis for axis in range(x.rank) if not same_size(x.shape[axis], update.shape[axis])]
    if not cut:
        return update
    sizes = update.shape[: cut[-1] + 1]
    places = []
    for axis, size in enumerate(sizes):
        row = builder.shaped(builder.tensor(builder.sizes.arange(size)), [size])
        if axis in cut:
            moved = builder("AddV2", row, builder.cast(starts[axis], np.int32))
            row = builder.shaped(moved, [size])
        row = builder.reshape(row, [size if each == axis else 1 for each in range(len(sizes))])
        places.append(builder.broadcast(row, sizes))
    return builder("TensorScatterUpdate", x, builder("Pack", places, axis=len(sizes)), update)


@rule("rank")
def rank(builder: NodeBuilder, x: Output, *, axis: int, count: Size, largest: bool) -> Output:
    """By keys in the order of the numbers, because `TopKV2` has no order for NaN."""
    axis %= x.rank
    order = [*(each for each in range(x.rank) if each != axis), axis]
    key = _ordered(builder, builder.transpose(x, order))
    if not largest:
        is_unsigned, is_signed = (key.dtype.kind == each for each in "ui")
        end = np.iinfo(key.dtype).max if is_unsigned else -int(is_signed)
        key = builder("Sub", builder.like(end, key), key)
    _, places = builder("TopKV2", key, builder.sizes.of(count))
    sizes = [*(x.shape[each] for each in order[:-1]), count]
    back = [int(each) for each in np.argsort(order)]
    return builder.transpose(builder.shaped(places, sizes), back)


def _ordered(builder: NodeBuilder, x: Output) -> Output:
    """Numbers in the order of sorting: zeros are equal, and NaN is the largest number."""
    if not x.is_float:
        return x
    nan = builder("IsNan", x)
    if x.dtype != np.float64:  # of more bits, in which there are numbers beyond infinity
        wide = builder("Minimum", builder.cast(x, np.float64), np.asarray(1e300, np.float64))
        return builder("SelectV2", nan, np.asarray(np.inf, np.float64), wide)
    zero, most = np.zeros((), np.float64), np.array(np.iinfo(np.int64).max)
    bits = builder(
        "Bitcast", builder("SelectV2", builder("Equal", x, zero), zero, x), type=np.dtype(np.int64)
    )
    negative = builder("Less", bits, np.array(0, np.int64))
    found = builder("SelectV2", negative, builder("BitwiseXor", bits, most), bits)
    return builder("SelectV2", nan, most, found)
