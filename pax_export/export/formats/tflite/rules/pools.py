"""Pools."""

from __future__ import annotations

from typing import Any

import numpy as np

from pax_export._types import PyTree
from pax_export.export.formats.tflite.builder import layers, moves
from pax_export.export.formats.tflite.builder import operators as lite
from pax_export.export.formats.tflite.builder.graph import Tensor
from pax_export.export.formats.tflite.rule import Operation, rule
from pax_export.export.formats.tflite.tensors import is_static, reshape
from pax_export.export.portable.decompositions.convolutions import is_padded_as_same


def is_pool(equation: Any) -> bool:
    """Returns whether an equation is a float32 pool over one or two spatial axes."""
    struct, params = equation.invars[0].aval, equation.params
    rank = len(struct.shape)
    if rank not in (3, 4) or struct.dtype != np.float32:
        return False
    widths = params["padding"]
    ends = [end for pair in widths for end in pair]
    if not all(map(is_static, ends)):
        is_largest = equation.primitive.name == "reduce_window_max"
        return is_largest and is_padded_as_same(equation) and len(_axes(params)) == rank - 2
    if not all(is_static(each) and each >= 0 for each in (*params["window_dimensions"], *ends)):
        return False
    if any(each != 1 for name in ("base_dilation", "window_dilation") for each in params[name]):
        return False
    return len(_axes(params)) == rank - 2


def _axes(params: PyTree) -> list[int]:
    """Returns the axes of the windows."""
    given = zip(params["window_dimensions"], params["window_strides"], params["padding"])
    return [axis for axis, each in enumerate(given) if each != (1, 1, (0, 0))]


@rule("reduce_window_max", "reduce_window_sum", when=is_pool)
def pool(op: Operation, x: Tensor) -> Any:
    params, axes = op.params, _axes(op.params)
    rank = len(op.shape)
    batch, channels = (axis for axis in range(rank) if axis not in axes)
    order = [batch, *axes, channels]
    moved = [op.shape[axis] for axis in order]
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
        found = reshape(found, moved, op.sizes)
    found.set_shape([int(size) if is_static(size) else None for size in moved])
    return moves.transpose(found, [order.index(axis) for axis in range(rank)])
