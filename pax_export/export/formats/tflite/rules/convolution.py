"""Convolutions of one, two and three dimensions, dilated, grouped and transposed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from pax_export.export.formats.tflite.builder import layers, moves
from pax_export.export.formats.tflite.builder import operators as lite
from pax_export.export.formats.tflite.builder.graph import Tensor
from pax_export.export.formats.tflite.rule import NotInTfliteError, Operation, rule
from pax_export.export.formats.tflite.rules.arithmetic import converted
from pax_export.export.formats.tflite.rules.layout import padded
from pax_export.export.formats.tflite.tensors import (
    CARRIERS,
    is_static,
    reshape,
    transpose,
    wrapped,
)


@rule("conv_general_dilated")
def convolution(op: Operation, x: Tensor, kernel: Tensor) -> Any:
    params, result_kind = op.params, op.results[0].dtype.name
    numbers = params["dimension_numbers"]
    x_axes = [numbers.lhs_spec[0], *numbers.lhs_spec[2:], numbers.lhs_spec[1]]
    kernel_axes = [*numbers.rhs_spec[2:], numbers.rhs_spec[1], numbers.rhs_spec[0]]
    shape = [op.operands[0].shape[axis] for axis in x_axes]
    window = [op.operands[1].shape[axis] for axis in kernel_axes]
    if not all(map(is_static, window[:-2])):
        raise NotInTfliteError("the kernel must have sizes that are numbers.")
    carried = CARRIERS[result_kind]
    if carried != "float32":
        raise NotInTfliteError("it convolves float numbers only.")
    x, kernel = (
        converted(each, struct.dtype.name, result_kind) if each.dtype != carried else each
        for each, struct in zip((x, kernel), op.operands)
    )
    x, kernel = transpose(x, x_axes), transpose(kernel, kernel_axes)
    spread = params["lhs_dilation"] or (1,) * (len(shape) - 2)
    whole = [op.shape[axis] for axis in _result_axes(numbers)]
    if _is_transposed(op, shape, window, spread):
        found = _transposed(op, x, kernel, shape, window, [int(each) for each in spread])
        return _restore_axes(wrapped(found, result_kind), numbers, whole)
    widths = [
        (0, 0, 0),
        *((low, high, step - 1) for (low, high), step in zip(params["padding"], spread)),
        (0, 0, 0),
    ]
    x = padded(op, x, lite.constant(0.0), shape, widths)
    shape = [_padded(size, width) for size, width in zip(shape, widths)]
    found = _grouped(op, x, kernel, shape, window)
    found = wrapped(found, result_kind)
    return _restore_axes(found, numbers, whole)


def _result_axes(numbers: Any) -> list[int]:
    specs = numbers.out_spec
    return [specs[0], *specs[2:], specs[1]]


def _restore_axes(found: Any, numbers: Tensor, whole: Sequence[Any]) -> Any:
    """A result in the order of axes that the program has."""
    found.set_shape([int(size) if is_static(size) else None for size in whole])
    axes = _result_axes(numbers)
    return transpose(found, [axes.index(axis) for axis in range(len(axes))])


def _is_transposed(op: Operation, shape: Any, window: Any, spread: Sequence[Any]) -> bool:
    """Whether it is an image spread with zeros, as TFLite has an operator for."""
    params = op.params
    ones = [*params["window_strides"], *(params["rhs_dilation"] or ())]
    numbers = [params["feature_group_count"], params["batch_group_count"], *spread, *shape[1:]]
    numbers += [*window, *(end for pair in params["padding"] for end in pair)]
    if len(shape) != 4 or not all(map(is_static, numbers)) or max(spread) == 1:
        return False
    alone = params["feature_group_count"] == params["batch_group_count"] == 1
    return alone and all(each == 1 for each in ones) and 0 not in (*shape[1:], *window)


def _transposed(
    op: Operation, x: Any, kernel: Any, shape: Any, window: Any, spread: Sequence[int]
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
    # What the program pads is less than what the operator does, mostly.
    edges = [(low - width + 1, high - width + 1, 0) for (low, high), _, width in rest]
    return padded(op, found, lite.constant(0.0), whole, [(0, 0, 0), *edges, (0, 0, 0)])


def _is_same(edges: Sequence[int], step: int, width: int) -> bool:
    """Whether a result has as many times more elements as there are steps."""
    cut = width - step
    return cut >= 0 and tuple(edges) == (width - 1 - cut // 2, width - 1 - cut + cut // 2)


def _padded(size: int, width: Sequence[Any]) -> Any:
    low, high, inner = width
    return size if (low, high, inner) == (0, 0, 0) else size + (size - 1) * inner + low + high


def _grouped(op: Operation, x: Tensor, kernel: Tensor, shape: list[Any], window: list[Any]) -> Any:
    batches = op.params["batch_group_count"]
    if not (is_static(op.params["feature_group_count"]) and is_static(batches)):
        return _by_position(op, x, kernel, shape, window)
    if not all(map(is_static, (shape[-1], *window[-2:]))):
        raise NotInTfliteError("the channels must have sizes that are numbers.")
    if batches > 1:
        return _by_batch(op, x, kernel, shape, window, batches)
    groups = int(op.params["feature_group_count"])
    if groups == 1:
        return _convolved(op, x, kernel, shape, window)
    channels = int(shape[-1])
    if groups == channels and len(window) in (3, 4):
        return _depthwise(op, x, kernel, shape, window)
    each, made = channels // groups, int(window[-1]) // groups
    pieces = []
    for group in range(groups):
        part = x[..., group * each : (group + 1) * each]
        filters = kernel[..., group * made : (group + 1) * made]
        pieces.append(_convolved(op, part, filters, [*shape[:-1], each], [*window[:-1], made]))
    return moves.concat(pieces, -1)


def _by_position(
    op: Operation, x: Tensor, kernel: Tensor, shape: list[Any], window: list[Any]
) -> Any:
    """As many groups as there are examples: by products, one for each place in the kernel."""
    groups = op.params["feature_group_count"]
    if not (is_static(op.params["batch_group_count"]) and op.params["batch_group_count"] == 1):
        raise NotInTfliteError("groups of a batch of any size.")
    strides, dilation = _steps(op)
    inner, made = window[-2], window[-1] // groups
    spatial = list(zip(shape[1:-1], window[:-2], strides, dilation))
    sizes = [(n - (w - 1) * apart - 1) // step + 1 for n, w, step, apart in spatial]
    many = shape[0]
    for size in sizes:
        many = many * size
    count, total = len(sizes), None
    for place in itertools.product(*(range(int(width)) for width in window[:-2])):
        part = x
        for axis, (at, size, step, apart) in enumerate(zip(place, sizes, strides, dilation), 1):
            index: list[Any] = [slice(None)] * (count + 2)
            start = at * apart
            index[axis] = slice(start, op.sizes.of(start + (size - 1) * step + 1), step)
            part = part[tuple(index)]
        part = transpose(reshape(part, [many, groups, inner], op.sizes), [1, 0, 2])
        filters = transpose(reshape(kernel[place], [inner, groups, made], op.sizes), [1, 0, 2])
        found = layers.matmul(part, filters)
        total = found if total is None else total + found
    total = transpose(total, [1, 0, 2])
    return reshape(total, [shape[0], *sizes, window[-1]], op.sizes)


def _by_batch(op: Operation, x: Any, kernel: Tensor, shape: Any, window: Any, groups: int) -> Any:
    """Each group of the batch by its own filters, as gradients of grouped convolutions have it."""
    size, made = shape[0] // groups, int(window[-1]) // groups
    split = reshape(x, [groups, size, *shape[1:]], op.sizes)
    pieces = [
        _convolved(
            op,
            split[group],
            kernel[..., group * made : (group + 1) * made],
            [size, *shape[1:]],
            [*window[:-1], made],
        )
        for group in range(groups)
    ]
    return moves.concat(pieces, -1)


def _steps(op: Operation) -> tuple[list[int], list[int]]:
    strides = [int(each) for each in op.params["window_strides"]]
    dilation = op.params["rhs_dilation"] or (1,) * len(strides)
    return strides, [int(each) for each in dilation]


def _convolved(op: Operation, x: Any, kernel: Tensor, shape: Any, window: Any) -> Any:
    strides, dilation = _steps(op)
    if len(strides) == 0:
        return layers.matmul(x, kernel)
    if len(strides) == 1:
        x = reshape(x, [shape[0], 1, *shape[1:]], op.sizes)
        kernel = moves.expand_dims(kernel, 0)
        strides, dilation = [1, *strides], [1, *dilation]
    if len(strides) == 2:
        found = layers.conv2d(x, kernel, strides, dilation)
        return moves.squeeze(found, 1) if len(window) == 3 else found
    if len(strides) == 3:
        if any(each > 1 for each in dilation):
            kernel = _dilated(op, kernel, window, dilation)
        return layers.conv3d(x, kernel, strides)
    raise NotInTfliteError(f"it convolves three dimensions at most, and here are {len(strides)}.")


def _dilated(op: Operation, kernel: Tensor, window: object, dilation: Sequence[int]) -> Any:
    """A kernel with zeros between its elements."""
    widths = [*((0, 0, step - 1) for step in dilation), (0, 0, 0), (0, 0, 0)]
    return padded(op, kernel, lite.constant(0.0), window, widths)


def _depthwise(op: Operation, x: Any, kernel: Any, shape: Any, window: Any) -> Any:
    strides, dilation = _steps(op)
    if len(strides) == 1:
        x = reshape(x, [shape[0], 1, *shape[1:]], op.sizes)
        kernel = moves.expand_dims(kernel, 0)
        strides, dilation = [1, *strides], [1, *dilation]
    channels = int(shape[-1])
    kernel = moves.reshape(kernel, [*kernel.shape[:2], channels, int(window[-1]) // channels])
    found = layers.depthwise_conv2d(x, kernel, strides, dilation)
    return moves.squeeze(found, 1) if len(window) == 3 else found
