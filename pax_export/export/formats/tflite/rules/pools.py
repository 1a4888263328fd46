"""Pools."""

from __future__ import annotations

from typing import Any

import numpy as np

from pax_export._types import PyTree
from pax_export.export.formats.tflite.builder import layers, moves
from pax_export.export.formats.tflite.builder import operators as lite
from pax_export.export.formats.tflite.builder.graph import Tensor
from pax_export.export.formats.tflite.rule import Operation, rule
from pax_export.export.formats.tflite.tensors import in_order, is_static, reshape
from pax_export.export.portable.decompositions.windows import is_plain_window


def is_pool(equation: Any) -> bool:
    """Returns whether an equation is a float32 pool over one or two spatial axes."""
    rank = equation.invars[0].aval.ndim
    return rank in (3, 4) and is_plain_window(equation) and len(_axes(equation.params)) == rank - 2


def _axes(params: PyTree) -> list[int]:
    given = zip(params["window_dimensions"], params["window_strides"], params["padding"])
    return [axis for axis, each in enumerate(given) if each != (1, 1, (0, 0))]


@rule("reduce_window_max", "reduce_window_sum", when=is_pool)
def pool(op: Operation, x: Tensor) -> Any:
    params, axes = op.params, _axes(op.params)
    rank = len(op.shape)
    batch, channels = (axis for axis in range(rank) if axis not in axes)
    order = [batch, *axes, channels]
    x = moves.transpose(x, order)
    window, strides, widths = (
        [tuple(params[name])[axis] for axis in axes]
        for name in ("window_dimensions", "window_strides", "padding")
    )
    if rank == 3:  # one row is an image of height 1
        sizes = [op.operands[0].shape[axis] for axis in order]
        x = reshape(x, [sizes[0], 1, *sizes[1:]], op.sizes)
        window, strides, widths = [1, *window], [1, *strides], [(0, 0), *widths]
    is_known = all(is_static(end) for pair in widths for end in pair)
    edges: Any = np.array([(0, 0), *widths, (0, 0)], np.int32) if is_known else None
    if op.name == "reduce_window_max":
        found = layers.max_pool(x, window, strides, edges)
    else:
        x = moves.pad(x, edges) if edges.any() else x
        count = float(np.prod(window))
        found = lite.multiply(layers.average_pool(x, window, strides), count)
    if rank == 3:
        found = reshape(found, [op.shape[axis] for axis in order], op.sizes)
    return in_order(found, order, op.shape)
