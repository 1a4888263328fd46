"""Pools; other window reductions are decomposed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pax_export.export.formats.onnx.graph import GraphBuilder
from pax_export.export.formats.onnx.registry import is_pool, rule
from pax_export.export.formats.onnx.values import Value

Results = Sequence[Any]


@rule("reduce_window_max", when=is_pool)
def max_pool(builder: GraphBuilder, results: Results, x: Value, **window: Any) -> str:
    return builder("MaxPool", x, **_told(**window))


@rule("reduce_window_sum", when=is_pool)
def sum_pool(builder: GraphBuilder, results: Results, x: Value, **window: Any) -> str:
    means = builder("AveragePool", x, count_include_pad=1, **_told(**window))
    return builder("Mul", means, builder.like(math.prod(window["window_dimensions"]), x))


def _told(
    *,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    **_: object,
) -> dict[str, Any]:
    return {
        "kernel_shape": list(window_dimensions[2:]),
        "strides": list(window_strides[2:]),
        "pads": [int(pair[side]) for side in (0, 1) for pair in padding[2:]],
    }
