"""Reductions and cumulative operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pax_export._foundations.types import DTypeLike, Equation
from pax_export.export.formats.onnx.graph import GraphBuilder, Operand, rule
from pax_export.export.formats.onnx.rules.convolutions import product
from pax_export.export.formats.onnx.values import Value, carrier
from pax_export.export.portable.decompositions.reductions import of_truth_values

Axes = Sequence[int]


def reduced(
    builder: GraphBuilder, operator: str, x: Operand, axes: Axes, keep: bool = False
) -> Any:
    if not len(axes):
        return x
    return builder(operator, x, np.array(axes, np.int64), keepdims=int(keep))


@rule("reduce_sum")
def reduce_sum(builder: GraphBuilder, x: Value, *, axes: Axes, **_: object) -> Any:
    if x.is_float or not len(axes):
        return reduced(builder, "ReduceSum", x, axes)
    # onnxruntime adds whole numbers as float64 and stops at the ends of their type.
    if x.dtype.itemsize == 8:
        sizes = [x.shape[axis] for axis in axes]
        ones = Value(builder.expand(builder.like(1, x), sizes), x.dtype, tuple(sizes))
        numbers = ((tuple(axes), tuple(range(len(axes)))), ((), ()))
        return product(builder, x, ones, numbers, builder.results[0].shape, x.carrier)
    total = reduced(builder, "ReduceSum", builder.cast(x, np.int64), axes)
    return builder.cast(total, x.carrier)


def _in_float32(equation: Equation) -> bool:
    """Converts integers, for which onnxruntime has the product in float64."""
    return carrier(equation.invars[0].aval.dtype) == np.float32


rule("reduce_prod", when=_in_float32)(
    lambda builder, x, *, axes, **_: reduced(builder, "ReduceProd", x, axes)
)
rule("cumsum")(
    lambda builder, x, *, axis, reverse: builder(
        "CumSum", x, np.array(axis, np.int64), reverse=int(reverse)
    )
)


def _logical(operator: str) -> Callable:
    def apply(builder: GraphBuilder, x: Value, *, axes: Axes, **_: object) -> str:
        found = reduced(builder, operator, builder.cast(x, np.int32), axes)
        return builder.cast(found, np.bool_)

    return apply


rule("reduce_or", when=of_truth_values)(_logical("ReduceMax"))
rule("reduce_and", when=of_truth_values)(_logical("ReduceMin"))


def _arg(operator: str) -> Callable:
    def apply(
        builder: GraphBuilder, x: Value, *, axes: Axes, index_dtype: DTypeLike, **_: object
    ) -> str:
        (axis,) = axes
        found = builder(operator, x, axis=axis, keepdims=0)
        if x.is_float:  # the first NaN counts as the extreme
            bad = builder.cast(builder("IsNaN", x), np.int32)
            any_bad = builder.cast(reduced(builder, "ReduceMax", bad, [axis]), np.bool_)
            first = builder("ArgMax", bad, axis=axis, keepdims=0)
            found = builder("Where", any_bad, first, found)
        return found if np.dtype(index_dtype) == np.int64 else builder.cast(found, np.int32)

    return apply


rule("argmax")(_arg("ArgMax"))
rule("argmin")(_arg("ArgMin"))


# --- sorting ----------------------------------------------------------------


def _top(builder: GraphBuilder, x: Operand, count: Operand, axis: int, largest: bool) -> list[str]:
    """Returns the extreme numbers and their indices; ties in any order."""
    return builder("TopK", x, count, results=2, axis=axis, largest=int(largest), sorted=1)


@rule("rank")
def rank(builder: GraphBuilder, x: Value, *, axis: int, count: Operand, largest: bool) -> str:
    """Returns the indices of the first elements in an order; stable, with NaN largest.

    `TopK` is stable by the standard, but not in OpenVINO and IREE: its result is sorted again by
    distinct numbers.
    """
    key: Any = x.name
    size, bad, count = builder.sizes.one(x.shape[axis]), None, builder.sizes.one(count)
    dimension = np.array(axis, np.int64)
    if not x.is_float and x.dtype.itemsize < 8:
        counted = builder("CumSum", builder.cast(builder("Equal", key, key), np.int64), dimension)
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
    group = builder("CumSum", group, dimension)
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
