"""Convolutions and pools, with features last."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pax_export.export.formats.saved_model.operations.graph import (
    NodeBuilder,
    Output,
    is_number,
    rule,
)
from pax_export.export.portable.decompositions.convolutions import is_plain_convolution
from pax_export.export.portable.decompositions.windows import is_plain_window


def _is_convolution(equation: Any) -> bool:
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
    dimension_numbers: Any,
    feature_group_count: int,
    **_: object,
) -> Output:
    lhs, rhs, out = dimension_numbers
    (result,) = builder.results
    given = builder.cast(x, np.float32), builder.cast(kernel, np.float32)
    left = builder.transpose(given[0], [lhs[0], *lhs[2:], lhs[1]])
    right = builder.transpose(given[1], [*rhs[2:], rhs[1], rhs[0]])
    window = _Window(list(window_strides), list(rhs_dilation), list(padding))
    if len(padding) == 1:  # as a row of an image
        left = builder.reshape(left, [left.shape[0], 1, *left.shape[1:]])
        right = builder.reshape(right, [1, *right.shape])
        window = _Window([1, *window.strides], [1, *window.gaps], [(0, 0), *window.padding])
    made = _convolved(builder, left, right, window, int(feature_group_count))
    sizes = [result.shape[axis] for axis in (out[0], *out[2:], out[1])]
    if len(padding) == 1:
        made = builder("Squeeze", made, squeeze_dims=[1])
    made = dataclasses.replace(made, shape=tuple(sizes))
    back = np.argsort([out[0], *out[2:], out[1]])
    return builder.cast(builder.transpose(made, [int(axis) for axis in back]), result.dtype)


@dataclasses.dataclass(frozen=True)
class _Window:
    strides: list[int]
    gaps: list[int]
    padding: list[tuple[Any, Any]]

    def attributes(self) -> dict[str, Any]:
        return {"strides": [1, *self.strides, 1], "dilations": [1, *self.gaps, 1], **self.pads()}

    def pads(self) -> dict[str, Any]:
        ends = [end for pair in self.padding for end in pair]
        if not all(map(is_number, ends)):
            return {"padding": b"SAME"}
        if not any(ends):
            return {"padding": b"VALID"}
        return {"padding": b"EXPLICIT", "explicit_paddings": [0, 0, *map(int, ends), 0, 0]}


def _convolved(
    builder: NodeBuilder, x: Output, kernel: Output, window: _Window, groups: int
) -> Output:
    *taps, deep, wide = kernel.shape
    if len(taps) == 3:
        edges = [(0, 0), *window.padding, (0, 0)]
        if any(map(any, edges)):
            x = builder("PadV2", x, np.array(edges, np.int32), builder.like(0, x))
        told = {"strides": [1, *window.strides, 1], "padding": b"VALID"}
        return builder("Conv3D", x, kernel, **told)
    if groups == 1 or deep != 1 or len(set(window.strides)) != 1:
        return builder("Conv2D", x, kernel, **window.attributes())
    kernel = builder.reshape(kernel, [*taps, groups, wide // groups])
    return builder("DepthwiseConv2dNative", x, kernel, **window.attributes())


# --- pools ------------------------------------------------------------------


def _is_pool(equation: Any) -> bool:
    """Whether windows are those of a pool of images, with features last."""
    told, rank = equation.params, equation.invars[0].aval.ndim
    widths, steps = told["window_dimensions"], told["window_strides"]
    if rank != 4 or any(each != 1 for each in (widths[0], widths[3], steps[0], steps[3])):
        return False
    return is_plain_window(equation)


@rule("reduce_window_max", when=_is_pool)
def max_pool(builder: NodeBuilder, x: Output, **window: Any) -> Output:
    """NaN if an element is, which the operator passes over."""
    made = _pooled(builder, "MaxPool", x, window, -np.inf)
    is_bad = builder.cast(dataclasses.replace(builder("IsNan", x), shape=x.shape), x.dtype)
    bad = _pooled(builder, "MaxPool", is_bad, window, 0)
    flagged = builder("Greater", bad, builder.like(0, x))
    return builder("SelectV2", flagged, builder.like(np.nan, x), made)


@rule("reduce_window_sum", when=_is_pool)
def sum_pool(builder: NodeBuilder, x: Output, **window: Any) -> Output:
    mean = _pooled(builder, "AvgPool", x, window, 0)
    return builder("Mul", mean, builder.like(math.prod(window["window_dimensions"]), x))


def _pooled(builder: NodeBuilder, operator: str, x: Output, window: Any, edge: float) -> Output:
    edges, told = window["padding"], {"padding": b"VALID"}
    if not all(is_number(end) for pair in edges for end in pair):
        told = {"padding": b"SAME"}
    elif any(map(any, edges)):
        x = builder("PadV2", x, np.array(edges, np.int32), builder.like(edge, x))
    sizes = {"ksize": window["window_dimensions"], "strides": window["window_strides"]}
    told |= {name: list(map(int, each)) for name, each in sizes.items()}
    return builder(operator, x, **told)
