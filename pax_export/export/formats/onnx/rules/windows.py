"""Pools; other window reductions are decomposed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pax_export.export.formats.onnx.graph import GraphBuilder
from pax_export.export.formats.onnx.registry import rule
from pax_export.export.formats.onnx.values import Value, is_number
from pax_export.export.portable.decompositions.windows import is_plain_window


def _is_pool(equation: Any) -> bool:
    """Whether windows are those of a pool: over the last axes, padded by less than a window."""
    told, rank = equation.params, equation.invars[0].aval.ndim
    widths = told["window_dimensions"]
    if not 3 <= rank <= 5 or any(each != 1 for each in (*widths[:2], *told["window_strides"][:2])):
        return False
    ends = ((side, width) for pair, width in zip(told["padding"], widths) for side in pair)
    return is_plain_window(equation) and all(
        side < width for side, width in ends if is_number(side)
    )


@rule("reduce_window_sum", when=_is_pool)
def sum_pool(builder: GraphBuilder, x: Value, **window: Any) -> str:
    means = builder("AveragePool", x, count_include_pad=1, **_pool_attributes(**window))
    return builder("Mul", means, builder.like(math.prod(window["window_dimensions"]), x))


def _pool_attributes(
    *,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    **_: object,
) -> dict[str, Any]:
    return {
        "kernel_shape": list(window_dimensions[2:]),
        "strides": list(window_strides[2:]),
        **pads_of(padding[2:]),
    }


rule("reduce_window_max", when=_is_pool)(
    lambda builder, x, **window: builder("MaxPool", x, **_pool_attributes(**window))
)


def pads_of(padding: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    """Returns the attribute for padding, which is ``"SAME"`` if it is symbolic."""
    ends = [pair[side] for side in (0, 1) for pair in padding]
    if not all(map(is_number, ends)):
        return {"auto_pad": "SAME_UPPER"}
    return {"pads": [int(each) for each in ends]}
