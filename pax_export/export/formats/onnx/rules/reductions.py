"""Reductions and cumulative operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pax_export.export.formats.onnx.graph import GraphBuilder
from pax_export.export.formats.onnx.registry import rule
from pax_export.export.formats.onnx.rules.products import product
from pax_export.export.formats.onnx.values import Value, carrier
from pax_export.export.portable.decompositions.reductions import of_truth_values

Axes = Sequence[int]


def reduced(builder: GraphBuilder, operator: str, x: object, axes: Axes, keep: bool = False) -> Any:
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


def _in_float32(equation: Any) -> bool:
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
    def apply(builder: GraphBuilder, x: Value, *, axes: Axes, index_dtype: Any, **_: object) -> str:
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
