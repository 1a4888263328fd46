"""Matrix products, convolutions and pools."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pax_export._foundations.types import Equation
from pax_export.export.formats.onnx.graph import GraphBuilder, Operand, is_number, rule
from pax_export.export.formats.onnx.rules.slices import backwards
from pax_export.export.formats.onnx.values import Value, carrier
from pax_export.export.portable.decompositions.convolutions import is_plain_convolution
from pax_export.export.portable.decompositions.reductions import is_plain_window

#: The largest number of axes over which onnxruntime convolves.
_MOST_AXES = 3


def _is_convolution(equation: Equation) -> bool:
    params, kernel = equation.params, equation.invars[1].aval
    if is_plain_convolution(equation):
        return True
    names = "window_strides padding lhs_dilation rhs_dilation".split()
    taps = [kernel.shape[axis] for axis in params["dimension_numbers"].rhs_spec]
    groups = params["feature_group_count"], params["batch_group_count"]
    is_single = carrier(equation.outvars[0].aval.dtype) == np.float32
    if not is_single or groups[1] != 1 or not all(map(is_number, (*taps, *groups))):
        return False
    return _pads_of_transposed(taps[2:], *(params[name] for name in names)) is not None


@rule("conv_general_dilated", when=_is_convolution)
def conv_general_dilated(
    builder: GraphBuilder,
    x: Value,
    kernel: Value,
    *,
    window_strides: Sequence[int],
    padding: Sequence[tuple[Any, Any]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    dimension_numbers: Any,
    feature_group_count: int,
    **_: object,
) -> Any:
    x_spec, kernel_spec, out_spec = dimension_numbers
    operands = (builder.cast(each, np.float32) for each in (x, kernel))
    left, right = (builder.transpose(*each) for each in zip(operands, (x_spec, kernel_spec)))
    taps = [kernel.shape[axis] for axis in kernel_spec]
    attributes = {"group": int(feature_group_count), "dilations": list(rhs_dilation)}
    pads = _pads_of_transposed(taps[2:], window_strides, padding, lhs_dilation, rhs_dilation)
    if pads is not None:
        turned = _transpose_kernel(builder, right, taps, feature_group_count)
        result = builder(
            "ConvTranspose", left, turned, strides=list(lhs_dilation), **attributes, **pads
        )
    else:
        attributes |= {
            "kernel_shape": [int(each) for each in taps[2:]],
            "strides": list(window_strides),
        }
        attributes |= pads_of(padding)
        result = builder("Conv", left, right, **attributes)
    back = [int(axis) for axis in np.argsort(out_spec)]
    return builder.transpose(result, back)


def _pads_of_transposed(
    widths: Sequence[Any],
    strides: Sequence[int],
    padding: Sequence[tuple[Any, Any]],
    gaps: Sequence[int],
    dilations: Sequence[int],
) -> dict[str, Any] | None:
    """Returns the pads of a transposed convolution; None if it is not one."""
    numbers = (*widths, *(side for pair in padding for side in pair))
    if not (1 <= len(widths) <= _MOST_AXES and all(map(is_number, numbers))):
        return None
    if all(gap == 1 for gap in gaps) or any(step != 1 for step in strides):
        return None
    reach = [gap * (width - 1) for gap, width in zip(dilations, widths)]
    low = [int(each - pair[0]) for each, pair in zip(reach, padding)]
    high = [int(each - pair[1]) for each, pair in zip(reach, padding)]
    more = [max(0, -each) for each in high]
    if any(each < 0 for each in low) or any(each >= gap for each, gap in zip(more, gaps)):
        return None
    attributes: dict[str, Any] = {"pads": [*low, *(max(0, each) for each in high)]}
    attributes["kernel_shape"] = [int(each) for each in widths]
    return attributes | ({"output_padding": more} if any(more) else {})


def _transpose_kernel(
    builder: GraphBuilder, kernel: Operand, taps: Sequence[int], groups: int
) -> Any:
    """Returns the kernel of a transposed convolution: backwards, with input features first."""
    outside, inside, *space = map(int, taps)
    axes = range(2, len(taps))
    kernel = backwards(builder, kernel, axes)
    if groups == 1:
        return builder.transpose(kernel, [1, 0, *axes])
    apart = builder.reshape(kernel, [groups, outside // groups, inside, *space])
    beside = builder.transpose(apart, [0, 2, 1, *(axis + 1 for axis in axes)])
    return builder.reshape(beside, [groups * inside, outside // groups, *space])


# --- pools ------------------------------------------------------------------


def _is_pool(equation: Equation) -> bool:
    """Whether windows are those of a pool: over the last axes, padded by less than a window."""
    params, rank = equation.params, equation.invars[0].aval.ndim
    widths = params["window_dimensions"]
    if not 3 <= rank <= 5 or any(
        each != 1 for each in (*widths[:2], *params["window_strides"][:2])
    ):
        return False
    ends = ((side, width) for pair, width in zip(params["padding"], widths) for side in pair)
    return is_plain_window(equation) and all(
        side < width for side, width in ends if is_number(side)
    )


@rule("reduce_window_sum", when=_is_pool)
def sum_pool(builder: GraphBuilder, x: Value, **window: Any) -> str:
    means = builder("AveragePool", x, count_include_pad=1, **_pool_attributes(window))
    return builder("Mul", means, builder.like(math.prod(window["window_dimensions"]), x))


def _pool_attributes(window: Mapping[str, Any]) -> dict[str, Any]:
    names = {"kernel_shape": "window_dimensions", "strides": "window_strides"}
    attributes = {name: list(window[of][2:]) for name, of in names.items()}
    return attributes | pads_of(window["padding"][2:])


rule("reduce_window_max", when=_is_pool)(
    lambda builder, x, **window: builder("MaxPool", x, **_pool_attributes(window))
)


def pads_of(padding: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    """Returns the attribute for padding, which is ``"SAME"`` if it is symbolic."""
    ends = [pair[side] for side in (0, 1) for pair in padding]
    if not all(map(is_number, ends)):
        return {"auto_pad": "SAME_UPPER"}
    return {"pads": [int(each) for each in ends]}


# --- Matrix and tensor products ------------------------------------------------------------------


@rule("dot_general")
def dot_general(
    builder: GraphBuilder, x: Value, y: Value, *, dimension_numbers: Any, **_: object
) -> Any:
    (result,) = builder.results
    kind = carrier(result.dtype)
    if kind == np.bool_:  # whether any pair is true in both
        count = product(builder, x, y, dimension_numbers, result.shape, np.dtype(np.float32))
        return builder.cast(count, kind)
    return product(builder, x, y, dimension_numbers, result.shape, kind)


def product(
    builder: GraphBuilder, x: Value, y: Value, dimension_numbers: Any, shape: Sequence, kind: Any
) -> Any:
    """The name of the product in numbers of a kind, which carries them."""
    (x_sum, y_sum), (x_batch, y_batch) = dimension_numbers
    x_free = [axis for axis in range(x.rank) if axis not in (*x_sum, *x_batch)]
    y_free = [axis for axis in range(y.rank) if axis not in (*y_sum, *y_batch)]
    left_order, right_order = [*x_batch, *x_free, *x_sum], [*y_batch, *y_sum, *y_free]
    if x_batch and len(x_free) == len(y_free) == len(x_sum) == 1:
        turns = _turns([*y_batch, *y_free, *y_sum], [*x_batch, *x_sum, *x_free])
        if turns < _turns(left_order, right_order):
            numbers = (y_sum, x_sum), (y_batch, x_batch)
            result = product(builder, y, x, numbers, shape, kind)
            return builder.transpose(result, [*range(len(x_batch)), len(shape) - 1, len(shape) - 2])
    left = builder.transpose(builder.cast(x, kind), left_order)
    right = builder.transpose(builder.cast(y, kind), right_order)
    batch = [x.shape[axis] for axis in x_batch]
    rows = [x.shape[axis] for axis in x_free]
    columns = [y.shape[axis] for axis in y_free]
    inner = [x.shape[axis] for axis in x_sum]
    # Without a batch, row axes need no reshape.
    flat = len(rows) == 1 or (bool(rows) and not batch)
    if len(inner) != 1 or not flat:
        lines = rows if flat else [math.prod(rows)]
        left = builder.reshape(left, [*batch, *lines, math.prod(inner)])
    if len(inner) != 1 or len(columns) != 1:
        right = builder.reshape(right, [*batch, math.prod(inner), math.prod(columns)])
    result = builder("MatMul", left, right)
    return result if flat and len(columns) == 1 else builder.reshape(result, shape)


def _turns(*orders: list[int]) -> int:
    """Returns the number of operands to transpose."""
    return sum(order != sorted(order) for order in orders)
