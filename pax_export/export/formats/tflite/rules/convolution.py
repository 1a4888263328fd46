"""Convolutions of one, two and three dimensions, dilated, grouped and transposed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pax_export._foundations.types import Equation
from pax_export.export.formats.tflite.builder import layers, moves
from pax_export.export.formats.tflite.builder import operators as lite
from pax_export.export.formats.tflite.builder.graph import Tensor
from pax_export.export.formats.tflite.rules.arithmetic import converted
from pax_export.export.formats.tflite.rules.layout import cut, padded
from pax_export.export.formats.tflite.tensors import (
    CARRIERS,
    Operation,
    in_order,
    is_static,
    reshape,
    rule,
    wrapped,
)
from pax_export.export.portable.decompositions.convolutions import is_plain_convolution
from pax_export.export.portable.decompositions.reductions import is_plain_window


def _is_convolution(equation: Equation) -> bool:
    dilation = equation.params["rhs_dilation"]
    if is_plain_convolution(equation):
        return len(dilation) < 3 or all(each == 1 for each in dilation)
    return _is_transposed(equation)


@rule("conv_general_dilated", when=_is_convolution)
def convolution(op: Operation, x: Tensor, kernel: Tensor) -> Any:
    params, result_kind = op.params, op.results[0].dtype.name
    numbers = params["dimension_numbers"]
    x_axes = [numbers.lhs_spec[0], *numbers.lhs_spec[2:], numbers.lhs_spec[1]]
    kernel_axes = [*numbers.rhs_spec[2:], numbers.rhs_spec[1], numbers.rhs_spec[0]]
    shape = [op.operands[0].shape[axis] for axis in x_axes]
    window = [op.operands[1].shape[axis] for axis in kernel_axes]
    x, kernel = (
        converted(each, struct.dtype.name, result_kind) if each.dtype != lite.float32 else each
        for each, struct in zip((x, kernel), op.operands)
    )
    x, kernel = moves.transpose(x, x_axes), moves.transpose(kernel, kernel_axes)
    if any(each != 1 for each in params["lhs_dilation"]):
        found = _convolve_transposed(op, x, kernel, shape, window, params["lhs_dilation"])
    else:
        if not _pads_itself(op):
            widths = [(0, 0), *params["padding"], (0, 0)]
            x = padded(op, x, lite.constant(0.0), widths)
            shape = [size + low + high for size, (low, high) in zip(shape, widths)]
        found = _convolve_groups(op, x, kernel, shape, window)
    batch, features, *space = numbers.out_spec
    return in_order(wrapped(found, result_kind), [batch, *space, features], op.shape)


def _pads_itself(op: Operation) -> bool:
    """Whether padding is symbolic, and that of the operator."""
    return not all(is_static(end) for pair in op.params["padding"] for end in pair)


def _is_transposed(equation: Equation) -> bool:
    """Whether TFLite has the convolution as an operator: images with zeros between elements."""
    params, (x, kernel) = equation.params, equation.invars
    lhs, rhs, _ = params["dimension_numbers"]
    sizes = [x.aval.shape[axis] for axis in lhs[1:]]
    sizes += [kernel.aval.shape[axis] for axis in rhs]
    ends = [end for pair in params["padding"] for end in pair]
    ones = [*params["window_strides"], *params["rhs_dilation"]]
    ones += [params["feature_group_count"], params["batch_group_count"]]
    if len(lhs) != 4 or not all(map(is_static, (*sizes, *ends, *ones))) or 0 in sizes:
        return False
    is_float = CARRIERS.get(equation.outvars[0].aval.dtype.name) == "float32"
    return is_float and all(each == 1 for each in ones) and max(params["lhs_dilation"]) > 1


def _convolve_transposed(
    op: Operation, x: Tensor, kernel: Any, shape: Any, window: Any, spread: Sequence[int]
) -> Any:
    turned = moves.reverse(moves.reverse(kernel, [0]), [1])
    rest = list(zip(op.params["padding"], spread, window))
    alone = {step == width and tuple(edges) == (width - 1,) * 2 for edges, step, width in rest}
    if alone == {True} and len(set(spread)) == 1:
        return layers.conv2d_of_blocks(x, turned)  # faster than the operator, of any batch most
    if all(_is_same(*each) for each in rest):
        padding, full = "SAME", [size * step for size, step in zip(shape[1:], spread)]
    else:
        padding = "VALID"
        full = [(size - 1) * step + width for size, (_, step, width) in zip(shape[1:], rest)]
    whole = [shape[0], *full, window[-1]]
    static = [int(size) if is_static(size) else None for size in whole]
    sizes = op.sizes.vector(whole)
    found = layers.transpose_conv2d(x, turned, spread, padding, sizes, static)
    if padding == "SAME":
        return found
    # The program usually pads less than the operator.
    edges = [(low - width + 1, high - width + 1) for (low, high), _, width in rest]
    for axis, ((low, high), size) in enumerate(zip(edges, full), 1):
        if min(low, high) < 0:
            found = cut(found, axis, max(-low, 0), size + min(high, 0), 1)
    return padded(op, found, lite.constant(0.0), [(0, 0), *np.maximum(edges, 0).tolist(), (0, 0)])


def _is_same(edges: Sequence[int], step: int, width: int) -> bool:
    """Returns whether the result is larger by exactly the strides."""
    cut = width - step
    return cut >= 0 and tuple(edges) == (width - 1 - cut // 2, width - 1 - cut + cut // 2)


def _convolve_groups(
    op: Operation, x: Tensor, kernel: Tensor, shape: list[Any], window: list[Any]
) -> Any:
    strides, dilation = (
        [int(each) for each in op.params[name]] for name in ("window_strides", "rhs_dilation")
    )
    groups, channels, features = (int(op.params["feature_group_count"]), shape[-1], window[-1])
    if len(strides) == 1:  # a row is an image of height 1
        x, kernel = reshape(x, [shape[0], 1, *shape[1:]], op.sizes), moves.expand_dims(kernel, 0)
        strides, dilation = [1, *strides], [1, *dilation]
    options: Any = strides, dilation, _pads_itself(op)
    if groups == channels > 1 and len(strides) == 2:
        kernel = moves.reshape(kernel, [*kernel.shape[:2], channels, features // channels])
        found = layers.depthwise_conv2d(x, kernel, *options)
    else:
        convolve: Any = layers.conv2d if len(strides) == 2 else layers.conv3d
        whole, pieces = (x, kernel), []
        for group in range(groups):
            if groups > 1:
                each = channels // groups, features // groups
                whole = tuple(
                    cut(part, len(strides) + 1, group * n, (group + 1) * n, 1)
                    for part, n in zip((x, kernel), each)
                )
            pieces.append(convolve(*whole, *options))
        found = pieces[0] if groups == 1 else moves.concat(pieces, -1)
    return moves.squeeze(found, 1) if len(window) == 3 else found


# --- pools ------------------------------------------------------------------


def is_pool(equation: Equation) -> bool:
    """Returns whether an equation is a float32 pool over one or two spatial axes."""
    rank = equation.invars[0].aval.ndim
    return rank in (3, 4) and is_plain_window(equation) and len(_axes(equation.params)) == rank - 2


def _axes(params: Mapping[str, Any]) -> list[int]:
    windows = zip(params["window_dimensions"], params["window_strides"], params["padding"])
    return [axis for axis, each in enumerate(windows) if each != (1, 1, (0, 0))]


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
