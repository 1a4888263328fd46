"""Sorting and top-k."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pax_export.export.formats.onnx.graph import GraphBuilder
from pax_export.export.formats.onnx.registry import rule
from pax_export.export.formats.onnx.values import Value

Results = Sequence[Any]


def _top(builder: GraphBuilder, x: object, count: object, axis: int, largest: bool) -> list[str]:
    """The extreme numbers and where they are; equal ones in any order."""
    return builder("TopK", x, count, results=2, axis=axis, largest=int(largest), sorted=1)


def _key(builder: GraphBuilder, x: Value) -> Any:
    return builder.cast(x, np.int32) if x.dtype == np.bool_ else x.name


def _order(
    builder: GraphBuilder,
    key: Any,
    x: Value,
    axis: int,
    count: object,
    largest: bool = False,
    nan_first: bool = False,
) -> str:
    """Where the first numbers of an order are; equal ones stay in their order, NaN are at an end.

    ONNX says that `TopK` keeps the order of equal numbers, and OpenVINO and IREE do not: what it
    returns is ordered once more, by numbers of which no two are equal.
    """
    size, bad = builder.sizes.one(x.shape[axis]), None
    place = np.array(axis, np.int64)
    if not x.is_float and x.dtype.itemsize < 8:
        counted = builder("CumSum", builder.cast(builder("Equal", key, key), np.int64), place)
        scaled = builder("Mul", builder.cast(key, np.int64), size)
        unlike = builder("Sub" if largest else "Add", scaled, counted)
        return _top(builder, unlike, count, axis, largest)[1]
    if x.is_float:  # NaN has no order in ONNX: it is one of the infinite numbers, at first
        bad = builder("IsNaN", key)
        end = np.inf if largest == nan_first else -np.inf
        key = builder("Where", bad, builder.like(end, x), key)
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
        at_end = builder("Not", bad) if nan_first else bad
        moved = builder("GatherElements", builder.cast(at_end, np.int64), first, axis=axis)
        group = builder("Add", builder("Mul", group, np.array([2], np.int64)), moved)
    unlike = builder("Add", builder("Mul", group, size), first)
    second = _top(builder, unlike, count, axis, largest=False)[1]
    return builder("GatherElements", first, second, axis=axis)


@rule("sort")
def sort(
    builder: GraphBuilder,
    results: Results,
    *operands: Value,
    dimension: int,
    num_keys: int,
    **_: object,
) -> list[str]:
    keys = operands[:num_keys]
    size = builder.sizes.one(operands[0].shape[dimension])
    order: str | None = None
    for each in reversed(keys):  # the last key first, since equal numbers stay in order
        key = _key(builder, each)
        if order is not None:
            key = builder("GatherElements", key, order, axis=dimension)
        found = _order(builder, key, each, dimension, size)
        order = found if order is None else builder("GatherElements", order, found, axis=dimension)
    return [builder("GatherElements", x, order, axis=dimension) for x in operands]


@rule("top_k")
def top_k(
    builder: GraphBuilder, results: Results, x: Value, *, k: object, axis: int = -1, **_: object
) -> list[str]:
    axis = axis % x.rank
    return extremes(builder, results, x, k, axis, largest=True)


@rule("approx_top_k")
def approx_top_k(
    builder: GraphBuilder,
    results: Results,
    x: Value,
    *,
    k: object,
    reduction_dimension: int,
    is_max_k: bool,
    **_: object,
) -> list[str]:
    return extremes(builder, results, x, k, reduction_dimension % x.rank, largest=is_max_k)


def extremes(
    builder: GraphBuilder, results: Results, x: Value, count: object, axis: int, largest: bool
) -> list[str]:
    amount = builder.sizes.one(count)
    place = _order(builder, _key(builder, x), x, axis, amount, largest, nan_first=True)
    found = builder("GatherElements", x, place, axis=axis)
    index = place if results[1].dtype == np.int64 else builder.cast(place, np.int32)
    return [found, index]
