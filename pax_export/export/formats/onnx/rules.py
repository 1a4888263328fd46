"""Operations of jax in other operations of jax, for which jax2onnx has rules that run.

onnxruntime pools over three axes at most, and jax2onnx pools over all that an
array has, its batch and its channels among them.  A window that slides along
several axes is one along each, and that is the largest, or the sum, of as many
slices as it is wide.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

Sizes = Sequence[int]


def _pooled(combine: Callable, neutral: Callable) -> Callable:
    def rule(
        x: Any,
        *,
        window_dimensions: Sizes,
        window_strides: Sizes,
        padding: Sequence[tuple[int, int]],
        base_dilation: Sizes,
        window_dilation: Sizes,
    ) -> Any:
        negative = any(size < 0 for pair in padding for size in pair)
        if negative or any(size != 1 for size in base_dilation):
            return None  # nobody writes that in a model; the converter may refuse it
        for axis, width in enumerate(window_dimensions):
            low, high = padding[axis]
            step, apart = window_strides[axis], window_dilation[axis]
            if (width, step, low, high) != (1, 1, 0, 0):
                padded = _padded(x, axis, low, high, neutral(x.dtype))
                x = _slid(combine, padded, axis, width, step, apart)
        return x

    return rule


def _padded(x: Any, axis: int, low: int, high: int, value: Any) -> Any:
    # Not lax.pad: jax2onnx's rule for it does not take a symbolic batch.
    def block(size: int) -> list[Any]:
        shape = [size if index == axis else length for index, length in enumerate(x.shape)]
        return [lax.full(shape, value, x.dtype)] if size else []

    parts = [*block(low), x, *block(high)]
    return lax.concatenate(parts, axis) if len(parts) > 1 else x


def _slid(combine: Callable, x: Any, axis: int, width: int, step: int, apart: int) -> Any:
    count = (x.shape[axis] - (width - 1) * apart - 1) // step + 1
    slices = [
        lax.slice_in_dim(x, start, start + (count - 1) * step + 1, step, axis)
        for start in range(0, width * apart, apart)
    ]
    return functools.reduce(combine, slices)


def _least(dtype: Any) -> np.ndarray:
    if jax.numpy.issubdtype(dtype, jax.numpy.inexact):
        return np.asarray(-np.inf, dtype)
    return np.asarray(jax.numpy.iinfo(dtype).min, dtype)


#: By the name of the primitive: a function of its operands and parameters.
RULES: dict[str, Callable] = {
    "reduce_window_max": _pooled(lax.max, _least),
    "reduce_window_sum": _pooled(lax.add, lambda dtype: np.zeros((), dtype)),
}
