"""Reductions along axes, positions of extremes, and running sums and products."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pax_export._foundations.types import DTypeLike, Equation
from pax_export.export.formats.saved_model.operations.graph import NodeBuilder, Output, rule
from pax_export.export.portable.decompositions.reductions import of_truth_values

Axes = Sequence[int]


def reduced(
    builder: NodeBuilder, operator: str, x: Output, axes: Axes, keep: bool = False
) -> Output:
    if not len(axes):
        return x
    # As jax on CPUs: TensorFlow's sum of many small numbers stops at a power of two.
    write = builder.in_float32 if operator in ("Sum", "Prod") else builder
    return write(operator, x, list(map(int, axes)), **({"keep_dims": True} if keep else {}))


def _reduction(operator: str) -> Callable:
    return lambda builder, x, *, axes, **_: reduced(builder, operator, x, axes)


rule("reduce_sum")(_reduction("Sum"))
rule("reduce_prod")(_reduction("Prod"))
rule("reduce_or", when=of_truth_values)(_reduction("Any"))
rule("reduce_and", when=of_truth_values)(_reduction("All"))


def _has_extreme(equation: Equation) -> bool:
    return equation.invars[0].aval.dtype != np.bool_


rule("reduce_max", when=_has_extreme)(_reduction("Max"))
rule("reduce_min", when=_has_extreme)(_reduction("Min"))
rule("extreme")(
    lambda builder, x, *, axes, largest: reduced(builder, "Max" if largest else "Min", x, axes)
)
rule("mean")(lambda builder, x, *, axes, keepdims: reduced(builder, "Mean", x, axes, keepdims))


def _running(name: str, operator: str) -> None:
    @rule(name)
    def running(builder: NodeBuilder, x: Output, *, axis: int, reverse: bool) -> Output:
        return builder.in_float32(operator, x, axis, reverse=bool(reverse))


_running("cumsum", "Cumsum")
_running("cumprod", "Cumprod")


def _position(name: str, operator: str) -> None:
    @rule(name)
    def position(builder: NodeBuilder, x: Output, *, axes: Axes, index_dtype: DTypeLike) -> Output:
        """The first of equal elements, or the first NaN, which TensorFlow skips."""
        axis = np.array(axes[0], np.int32)
        kind = np.dtype(np.int64 if np.dtype(index_dtype).itemsize > 4 else np.int32)
        index = builder(operator, x, axis, output_type=kind)
        if x.is_float:
            nan = builder("IsNan", x)
            first = builder("ArgMax", builder.cast(nan, np.float32), axis, output_type=kind)
            index = builder("SelectV2", builder("Any", nan, axis), first, index)
        return builder.cast(index, index_dtype)


_position("argmax", "ArgMax")
_position("argmin", "ArgMin")
