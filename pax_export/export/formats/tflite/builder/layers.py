"""Operators with weights: products of matrices, and convolutions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pax_export.export.formats.tflite.builder import moves, operators
from pax_export.export.formats.tflite.builder.graph import (
    Tensor,
    TensorLike,
    constant,
    emit,
    tensor,
)
from pax_export.export.formats.tflite.builder.moves import transpose


def matmul(x: Tensor, y: Tensor, transpose_a: bool = False, transpose_b: bool = False) -> Tensor:
    """A product of matrices, or of batches of them; with constant weights, a layer."""
    if len(y.shape) == 2 and y.value is not None and 0 not in y.shape:
        if transpose_a:
            rank = len(x.shape)
            x = transpose(x, [*range(rank - 2), rank - 1, rank - 2])
        weights = y if transpose_b else transpose(y, [1, 0])
        shape = [*x.shape[:-1], weights.shape[0]]
        return emit(
            "FULLY_CONNECTED", [x, weights, None], [(shape, x.dtype)],
            lambda a, b: np.matmul(a, b.T), keep_num_dims=len(shape) > 2,
        )[0]  # fmt: skip
    rows = x.shape[-1 if transpose_a else -2]
    columns = y.shape[-2 if transpose_b else -1]
    shape = [*operators.together(x.shape[:-2], y.shape[:-2]), rows, columns]

    def fold(a: Any, b: Any) -> Any:
        a = np.swapaxes(a, -1, -2) if transpose_a else a
        return np.matmul(a, np.swapaxes(b, -1, -2) if transpose_b else b)

    return emit(
        "BATCH_MATMUL", [x, y], [(shape, x.dtype)], fold, adj_x=transpose_a, adj_y=transpose_b
    )[0]


def conv2d(
    x: Tensor, kernel: Tensor, strides: Sequence[int], dilations: Sequence[int], same: bool = False
) -> Tensor:
    """A convolution with a kernel of height, width, inputs, outputs; padded if it is `same`."""
    weights = transpose(kernel, [3, 0, 1, 2])
    x, padding = (x, "SAME") if same else unpadded(x, kernel.shape, strides, dilations)
    sizes = _windows(x, kernel.shape, strides, padding, dilations)
    return emit(
        "CONV_2D", [x, weights, _no_bias(weights.shape[0])],
        [([x.shape[0], *sizes, weights.shape[0]], x.dtype)], **_steps(strides, padding, dilations),
    )[0]  # fmt: skip


def depthwise_conv2d(
    x: Tensor, kernel: Tensor, strides: Sequence[int], dilations: Sequence[int], same: bool = False
) -> Tensor:
    """A convolution of each channel alone, by a kernel of height, width, channels, multiples."""
    height, width, channels, multiple = kernel.shape
    weights = moves.reshape(kernel, [1, height, width, channels * multiple])
    x, padding = (x, "SAME") if same else unpadded(x, kernel.shape, strides, dilations)
    sizes = _windows(x, kernel.shape, strides, padding, dilations)
    return emit(
        "DEPTHWISE_CONV_2D", [x, weights, _no_bias(weights.shape[3])],
        [([x.shape[0], *sizes, weights.shape[3]], x.dtype)],
        depth_multiplier=int(multiple), **_steps(strides, padding, dilations),
    )[0]  # fmt: skip


def transpose_conv2d(
    x: Tensor,
    kernel: Tensor,
    strides: Sequence[int],
    padding: str,
    sizes: TensorLike,
    shape: Sequence[Any],
) -> Tensor:
    """The gradient of a convolution; `sizes` is the shape of the result.

    The kernel has height, width, inputs, outputs, and is turned as a convolution has it.
    """
    weights = transpose(kernel, [3, 0, 1, 2])
    inputs = [tensor(sizes, np.int32), weights, x, _no_bias(weights.shape[0])]
    return emit(
        "TRANSPOSE_CONV", inputs, [(shape, x.dtype)],
        padding=padding, stride_h=int(strides[0]), stride_w=int(strides[1]),
    )[0]  # fmt: skip


def conv2d_of_blocks(x: Tensor, kernel: Tensor) -> Tensor:
    """A `transpose_conv2d` with equal strides and square kernel, without padding."""
    size, _, inner, outer = kernel.shape
    weights = moves.reshape(transpose(kernel, [2, 0, 1, 3]), [1, 1, inner, size * size * outer])
    found = conv2d(x, weights, (1, 1), (1, 1))
    batch, *sides = found.shape[:3]
    shape = [batch, *(each * size for each in sides), outer]
    return emit("DEPTH_TO_SPACE", [found], [(shape, x.dtype)], block_size=int(size))[0]


def conv3d(
    x: Tensor, kernel: Tensor, strides: Sequence[int], dilations: Sequence[int], same: bool
) -> Tensor:
    """A convolution of three dimensions, without padding unless it is `same`."""
    padding = "SAME" if same else "VALID"
    sizes = _windows(x, kernel.shape, strides, padding, dilations)
    options = dict(zip(("stride_d", "stride_h", "stride_w"), map(int, strides)))
    return emit(
        "CONV_3D", [x, kernel], [([x.shape[0], *sizes, kernel.shape[-1]], x.dtype)],
        padding=padding, dilation_d_factor=1, dilation_h_factor=1, dilation_w_factor=1, **options,
    )[0]  # fmt: skip


def unpadded(
    x: Tensor, window: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> tuple[Tensor, str]:
    """Returns an operator's input without the zeros that the operator pads itself."""
    if x.made_by != "PAD" or x.operator is None:
        return x, "VALID"
    source, widths = x.operator.inputs
    if widths.value is None or not _is_same(source, widths.value, window, strides, dilations):
        return x, "VALID"
    return source, "SAME"


def _is_same(
    x: Tensor, edges: Any, window: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> bool:
    """Returns whether padding equals that of ``"SAME"``."""
    if edges[[0, -1]].any():
        return False
    rest = zip(x.shape[1:-1], window, strides, dilations)
    for (low, high), (size, width, step, apart) in zip(edges[1:-1].tolist(), rest):
        reach = (width - 1) * apart + 1
        if size is None:
            total = reach - 1 if step == 1 else -1
        else:
            total = max((-(-size // step) - 1) * step + reach - size, 0)
        if (low, high) != (total // 2, total - total // 2):
            return False
    return True


def max_pool(x: Tensor, window: Sequence[int], strides: Sequence[int], edges: Any) -> Tensor:
    """The maximum over windows; padding is ``"SAME"`` if `edges` is None."""
    padding = "SAME" if edges is None else "VALID"
    if edges is not None and edges.any():
        if _is_same(x, edges, window, strides, (1, 1)):
            padding = "SAME"
        else:
            # Kernels for zeros are faster.
            x = moves.pad(x, edges, 0.0 if at_least(x) >= 0 else -np.inf)
    return _pool("MAX_POOL_2D", x, window, strides, padding)


def average_pool(x: Tensor, window: Sequence[int], strides: Sequence[int]) -> Tensor:
    return _pool("AVERAGE_POOL_2D", x, window, strides, "VALID")


def _pool(
    name: str, x: Tensor, window: Sequence[int], strides: Sequence[int], padding: str
) -> Tensor:
    height, width = map(int, window)
    sizes = _windows(x, (height, width), strides, padding, (1, 1))
    return emit(
        name, [x], [([x.shape[0], *sizes, x.shape[-1]], x.dtype)], padding=padding,
        stride_h=int(strides[0]), stride_w=int(strides[1]),
        filter_height=height, filter_width=width,
    )[0]  # fmt: skip


def _no_bias(channels: int) -> Tensor:
    # Delegates take no convolution without one.
    return constant(np.zeros(channels, np.float32))


def _steps(strides: Sequence[int], padding: str, dilations: Sequence[int]) -> dict[str, Any]:
    return {
        "padding": padding,
        "stride_h": int(strides[0]),
        "stride_w": int(strides[1]),
        "dilation_h_factor": int(dilations[0]),
        "dilation_w_factor": int(dilations[1]),
    }


def _windows(
    x: Tensor, window: Any, strides: Sequence[int], padding: str, dilations: Sequence[int]
) -> list[Any]:
    """Returns the number of kernel positions per dimension."""
    found: list[Any] = []
    for size, width, step, apart in zip(x.shape[1:-1], window, strides, dilations):
        reach = 0 if padding == "SAME" else (width - 1) * apart
        found.append(None if size is None else max(-(-(size - reach) // step), 0))
    return found


# --- lower bounds -----------------------------------------------------------


#: Operators that only move elements, or reduce several to one of them or their mean.
_KEEP = frozenset("RESHAPE TRANSPOSE BROADCAST_TO MEAN REDUCE_MAX REDUCE_MIN STRIDED_SLICE".split())
_NONNEGATIVE = frozenset("RELU RELU6 ABS EXP LOGISTIC SOFTMAX".split())
#: The length of the chain of operators that is looked at.
_DEPTH = 16


def at_least(x: Tensor, depth: int = _DEPTH) -> float:
    """No number of a tensor is smaller than this, NaN aside."""
    if x.value is not None:
        value = np.asarray(x.value)
        known = value.dtype.kind == "f" and value.size and not np.isnan(value).any()
        return float(value.min()) if known else -math.inf
    if x.operator is None or depth == 0 or x.dtype != np.float32:
        return -math.inf
    name, inputs = x.made_by, x.operator.inputs
    if name in _NONNEGATIVE:
        return 0.0

    def bound(index: int) -> float:
        return at_least(inputs[index], depth - 1)

    if name in _KEEP:
        return bound(0)
    if name == "SUM":
        return 0.0 if bound(0) >= 0 else -math.inf
    if name == "MUL" and inputs[0] is inputs[1]:
        return 0.0
    if name in ("MUL", "DIV"):
        return 0.0 if bound(0) >= 0 and bound(1) >= 0 else -math.inf
    if name == "ADD":
        return bound(0) + bound(1)
    if name == "SELECT_V2":
        return min(bound(1), bound(2))
    return -math.inf
