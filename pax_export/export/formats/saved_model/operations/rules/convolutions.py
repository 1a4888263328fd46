"""Convolutions and pools, with features last."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.lax import ConvDimensionNumbers

from pax_export._foundations.types import Equation, Size
from pax_export.export.formats.saved_model.operations.graph import NodeBuilder, Output, rule
from pax_export.export.portable.decompositions.convolutions import is_plain_convolution
from pax_export.export.portable.decompositions.reductions import is_plain_window
from pax_export.export.portable.sizes import is_number


def _is_convolution(equation: Equation) -> bool:
    params = equation.params
    numbers = [end for pair in params["padding"] for end in pair]
    axes, groups = len(params["padding"]), params["feature_group_count"]
    if not is_plain_convolution(equation) or axes > 3:
        return False
    if axes == 3:  # which has a kernel for plain ones only
        plain = set(params["rhs_dilation"]) == {1} and all(map(is_number, numbers))
        return plain and groups == 1
    return True


@rule("conv_general_dilated", when=_is_convolution)
def conv_general_dilated(
    builder: NodeBuilder,
    x: Output,
    kernel: Output,
    *,
    window_strides: Sequence[int],
    padding: Sequence[tuple[Any, Any]],
    rhs_dilation: Sequence[int],
    dimension_numbers: ConvDimensionNumbers,
    feature_group_count: int,
    **_: object,
) -> Output:
    lhs, rhs, out = dimension_numbers
    (result,) = builder.results
    operands = builder.cast(x, np.float32), builder.cast(kernel, np.float32)
    left = builder.transpose(operands[0], [lhs[0], *lhs[2:], lhs[1]])
    right = builder.transpose(operands[1], [*rhs[2:], rhs[1], rhs[0]])
    window = _Window(list(window_strides), list(rhs_dilation), list(padding))
    if len(padding) == 1:  # as a row of an image
        left = builder.reshape(left, [left.shape[0], 1, *left.shape[1:]])
        right = builder.reshape(right, [1, *right.shape])
        window = _Window([1, *window.strides], [1, *window.gaps], [(0, 0), *window.padding])
    output = _convolved(builder, left, right, window, int(feature_group_count))
    sizes = [result.shape[axis] for axis in (out[0], *out[2:], out[1])]
    if len(padding) == 1:
        output = builder("Squeeze", output, squeeze_dims=[1])
    output = dataclasses.replace(output, shape=tuple(sizes))
    back = np.argsort([out[0], *out[2:], out[1]])
    return builder.cast(builder.transpose(output, [int(axis) for axis in back]), result.dtype)


@dataclasses.dataclass(frozen=True)
class _Window:
    strides: list[int]
    gaps: list[int]
    padding: list[tuple[Any, Any]]

    def over(self, x: Output, taps: Sequence[int]) -> dict[str, Any]:
        """The attributes, with padding that is that of "SAME" as such, the fastest one."""
        attributes = {"strides": [1, *self.strides, 1], "dilations": [1, *self.gaps, 1]}
        each = zip(x.shape[1:-1], taps, self.strides, self.gaps, self.padding)
        if all(_is_same(*axis) for axis in each):
            return attributes | {"padding": b"SAME"}
        ends = [int(end) for pair in self.padding for end in pair]
        if not any(ends):
            return attributes | {"padding": b"VALID"}
        return attributes | {"padding": b"EXPLICIT", "explicit_paddings": [0, 0, *ends, 0, 0]}


def _is_same(size: Size, taps: int, step: int, gap: int, ends: tuple[Any, Any]) -> bool:
    if not all(map(is_number, ends)):
        return True
    total = (taps - 1) * gap
    if step > 1:
        if not is_number(size):
            return False
        total = max((-(-size // step) - 1) * step + total + 1 - size, 0)
    return tuple(ends) == (total // 2, total - total // 2)


def _convolved(
    builder: NodeBuilder, x: Output, kernel: Output, window: _Window, groups: int
) -> Output:
    *taps, deep, wide = kernel.shape
    options = window.over(x, taps)
    is_plain = len(taps) == 2 and (groups == 1 or deep != 1 or len(set(window.strides)) != 1)
    if not is_plain and options["padding"] == b"EXPLICIT":
        # Others have no such padding; TensorFlow aborts if it fuses depthwise ones with it.
        ends = np.array([(0, 0), *window.padding, (0, 0)], np.int32)
        x, options = builder("PadV2", x, ends, builder.like(0, x)), options | {"padding": b"VALID"}
        del options["explicit_paddings"]
    if len(taps) == 3:
        return builder("Conv3D", x, kernel, **options)
    if is_plain:
        return builder("Conv2D", x, kernel, **options)
    kernel = builder.reshape(kernel, [*taps, groups, wide // groups])
    return builder("DepthwiseConv2dNative", x, kernel, **options)


# --- pools ------------------------------------------------------------------


def _is_pool(equation: Equation) -> bool:
    """Whether windows are those of a pool of images, with features last."""
    params, rank = equation.params, equation.invars[0].aval.ndim
    widths, steps = params["window_dimensions"], params["window_strides"]
    if rank != 4 or any(each != 1 for each in (widths[0], widths[3], steps[0], steps[3])):
        return False
    return is_plain_window(equation)


@rule("reduce_window_max", when=_is_pool)
def max_pool(builder: NodeBuilder, x: Output, **window: Any) -> Output:
    """NaN if an element is, which the operator passes over."""
    largest = _pooled(builder, "MaxPool", x, window, -np.inf)
    is_bad = builder.cast(dataclasses.replace(builder("IsNan", x), shape=x.shape), x.dtype)
    bad = _pooled(builder, "MaxPool", is_bad, window, 0)
    flagged = builder("Greater", bad, builder.like(0, x))
    return builder("SelectV2", flagged, builder.like(np.nan, x), largest)


@rule("reduce_window_sum", when=_is_pool)
def sum_pool(builder: NodeBuilder, x: Output, **window: Any) -> Output:
    mean = _pooled(builder, "AvgPool", x, window, 0)
    return builder("Mul", mean, builder.like(math.prod(window["window_dimensions"]), x))


def _pooled(
    builder: NodeBuilder, operator: str, x: Output, window: Mapping[str, Any], edge: float
) -> Output:
    edges, attributes = window["padding"], {"padding": b"VALID"}
    if not all(is_number(end) for pair in edges for end in pair):
        attributes = {"padding": b"SAME"}
    elif any(map(any, edges)):
        x = builder("PadV2", x, np.array(edges, np.int32), builder.like(edge, x))
    sizes = {"ksize": window["window_dimensions"], "strides": window["window_strides"]}
    attributes |= {name: list(map(int, each)) for name, each in sizes.items()}
    return builder(operator, x, **attributes)
