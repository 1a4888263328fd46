"""Sorting and top-k."""

from __future__ import annotations

from typing import Any

import numpy as np

from pax_export.export.formats.onnx.graph import GraphBuilder
from pax_export.export.formats.onnx.registry import rule
from pax_export.export.formats.onnx.values import Value


def _top(builder: GraphBuilder, x: object, count: object, axis: int, largest: bool) -> list[str]:
    """Returns the extreme numbers and their indices; ties in any order."""
    return builder("TopK", x, count, results=2, axis=axis, largest=int(largest), sorted=1)


@rule("rank")
def rank(builder: GraphBuilder, x: Value, *, axis: int, count: Any, largest: bool) -> str:
    """Returns the indices of the first elements in an order; stable, with NaN largest.

    `TopK` is stable by the standard, but not in OpenVINO and IREE: its result is sorted again by
    distinct numbers.
    """
    key: Any = x.name
    size, bad, count = builder.sizes.one(x.shape[axis]), None, builder.sizes.one(count)
    place = np.array(axis, np.int64)
    if not x.is_float and x.dtype.itemsize < 8:
        counted = builder("CumSum", builder.cast(builder("Equal", key, key), np.int64), place)
        scaled = builder("Mul", builder.cast(x, np.int64), size)
        unlike = builder("Sub" if largest else "Add", scaled, counted)
        return builder.cast(_top(builder, unlike, count, axis, largest)[1], np.int32)
    if x.is_float:  # NaN has no order in ONNX: it is infinite, at first
        bad = builder("IsNaN", key)
        key = builder("Where", bad, builder.like(np.inf, x), key)
    ranked, first = _top(builder, key, size, axis, largest)
    along = [np.array([axis], np.int64)]
    ends = [np.array([n], np.int64) for n in (0, 1, -1, np.iinfo(np.int64).max)]
    later = builder("Slice", ranked, ends[1], ends[3], *along)
    before = builder("Slice", ranked, ends[0], ends[2], *along)
    starts = builder.cast(builder("Not", builder("Equal", later, before)), np.int64)
    none = builder("Mul", builder("Slice", first, ends[0], ends[1], *along), ends[0])
    group = builder("Concat", none, starts, axis=axis)
    group = builder("CumSum", group, place)
    if bad is not None:
        at_end = builder("Not", bad) if largest else bad
        moved = builder("GatherElements", builder.cast(at_end, np.int64), first, axis=axis)
        group = builder("Add", builder("Mul", group, np.array([2], np.int64)), moved)
    unlike = builder("Add", builder("Mul", group, size), first)
    # In IREE, sorts of one shape share an array of places, which each changes: one more at the end.
    last = builder("Slice", unlike, ends[2], ends[3], *along)
    more = builder("Add", last, builder.sizes.one(3 * x.shape[axis]))
    unlike = builder("Concat", unlike, more, axis=axis)
    second = _top(builder, unlike, count, axis, largest=False)[1]
    return builder.cast(builder("GatherElements", first, second, axis=axis), np.int32)
