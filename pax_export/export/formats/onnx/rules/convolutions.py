"""Convolutions: `Conv` for float32, sums of products for other dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pax_export.export.formats.onnx.graph import GraphBuilder
from pax_export.export.formats.onnx.registry import Refused, rule
from pax_export.export.formats.onnx.rules.slices import backwards, padded, spaced
from pax_export.export.formats.onnx.values import Value, carrier, is_number

Results = Sequence[Any]
#: Over more axes than this onnxruntime does not convolve.
_MOST_AXES = 3


@rule("conv_general_dilated")
def conv_general_dilated(
    builder: GraphBuilder,
    results: Results,
    x: Value,
    kernel: Value,
    *,
    window_strides: Sequence[int],
    padding: Sequence[tuple[Any, Any]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    dimension_numbers: Any,
    feature_group_count: int,
    batch_group_count: int,
    **_: object,
) -> Any:
    (result,) = results
    kind, zero = carrier(result.dtype), np.zeros((), carrier(result.dtype))
    x_spec, kernel_spec, out_spec = dimension_numbers
    left = builder.transpose(_as(builder, x, kind), x_spec)
    right = builder.transpose(_as(builder, kernel, kind), kernel_spec)
    sizes = [x.shape[axis] for axis in x_spec]
    taps = [kernel.shape[axis] for axis in kernel_spec]
    back = [int(axis) for axis in np.argsort(out_spec)]
    pads = _pads_of_transposed(taps[2:], window_strides, padding, lhs_dilation, rhs_dilation)
    if pads is not None and kind == np.float32 and batch_group_count == 1:
        pads |= {"strides": list(lhs_dilation), "dilations": list(rhs_dilation)}
        turned = _transpose_kernel(builder, right, taps, feature_group_count)
        made = builder("ConvTranspose", left, turned, group=int(feature_group_count), **pads)
        return builder.fit(builder.transpose(made, back), result.dtype)
    left = spaced(builder, left, sizes, [0, 0, *(each - 1 for each in lhs_dilation)], zero)
    groups: Any = feature_group_count
    if batch_group_count != 1:
        left, sizes = _groups_as_features(builder, left, sizes, batch_group_count, lhs_dilation)
        groups = batch_group_count
    count = len(window_strides)
    plain = kind == np.float32 and 1 <= count <= _MOST_AXES and is_number(groups)
    simple = plain and all(is_number(n) and n >= 0 for pair in padding for n in pair)
    if not simple:
        left = padded(builder, left, [(0, 0), (0, 0), *padding], zero)
    if plain and all(map(is_number, taps[2:])):
        pads = [pair[side] for side in (0, 1) for pair in padding] if simple else [0] * 2 * count
        made = builder(
            "Conv",
            left,
            right,
            kernel_shape=[int(each) for each in taps[2:]],
            strides=list(window_strides),
            dilations=list(rhs_dilation),
            pads=[int(each) for each in pads],
            group=int(groups),
        )
    else:
        out = [result.shape[axis] for axis in out_spec]
        made = _by_products(
            builder, left, right, sizes, taps, out, window_strides, rhs_dilation, groups
        )
    return builder.fit(builder.transpose(made, back), result.dtype)


def _pads_of_transposed(
    widths: Sequence[Any],
    strides: Sequence[int],
    padding: Sequence[tuple[Any, Any]],
    gaps: Sequence[int],
    dilations: Sequence[int],
) -> dict[str, Any] | None:
    """What a transposed convolution is told of its ends; None for what is none."""
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
    told: dict[str, Any] = {"pads": [*low, *(max(0, each) for each in high)]}
    told["kernel_shape"] = [int(each) for each in widths]
    return told | ({"output_padding": more} if any(more) else {})


def _transpose_kernel(
    builder: GraphBuilder, kernel: object, taps: Sequence[int], groups: int
) -> Any:
    """A kernel as a transposed convolution has it: backwards, and with features in first."""
    outside, inside, *space = map(int, taps)
    axes = range(2, len(taps))
    kernel = backwards(builder, kernel, axes)
    if groups == 1:
        return builder.transpose(kernel, [1, 0, *axes])
    apart = builder.reshape(kernel, [groups, outside // groups, inside, *space])
    beside = builder.transpose(apart, [0, 2, 1, *(axis + 1 for axis in axes)])
    return builder.reshape(beside, [groups * inside, outside // groups, *space])


def _as(builder: GraphBuilder, x: Value, kind: object) -> Any:
    return x.name if x.carrier == kind else builder.cast(x, kind)


def _groups_as_features(
    builder: GraphBuilder, left: object, sizes: list, count: int, dilation: Sequence[int]
) -> tuple[Any, list]:
    """Groups of examples beside each other, as groups of features."""
    space = [(size - 1) * gap + 1 for size, gap in zip(sizes[2:], dilation)]
    few = sizes[0] // count
    apart = builder.reshape(left, [count, few, sizes[1], *space])
    beside = builder.transpose(apart, [1, 0, *range(2, len(sizes) + 1)])
    return builder.reshape(beside, [few, count * sizes[1], *space]), [few, count * sizes[1], *space]


def _by_products(
    builder: GraphBuilder,
    left: object,
    right: object,
    sizes: Sequence[Any],
    taps: Sequence[Any],
    out: Sequence[Any],
    strides: Sequence[int],
    dilations: Sequence[int],
    groups: object,
) -> Any:
    """A sum over the places of the kernel, each a product of matrices."""
    batch, space = sizes[0], out[2:]
    if not all(map(is_number, taps[2:])):
        raise Refused("with a kernel of symbolic size")
    deep, wide = taps[1], taps[0] // groups
    total: Any = None
    for place in np.ndindex(*taps[2:]):
        piece, weight = left, right
        for index, at in enumerate(place):
            start = at * dilations[index]
            end = start + (space[index] - 1) * strides[index] + 1
            piece = builder.slice(piece, index + 2, start, end, strides[index])
            weight = builder.slice(weight, index + 2, at, at + 1)
        columns = builder.reshape(piece, [batch, groups, deep, _count(space)])
        matrix = builder.reshape(weight, [1, groups, wide, deep])
        term = builder("MatMul", matrix, columns)
        total = term if total is None else builder("Add", total, term)
    return builder.reshape(total, out)


def _count(sizes: Sequence[Any]) -> Any:
    count: Any = 1
    for size in sizes:
        count = count * size
    return count
