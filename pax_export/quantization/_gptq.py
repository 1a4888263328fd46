"""GPTQ rounding: later rows of a matrix compensate the rounding errors of earlier ones.

Frantar et al. 2022, https://arxiv.org/abs/2210.17323: rows are rounded one by one, and the error of
each is distributed over the remaining ones, by the inverse of the sum of ``x xᵀ`` over the inputs.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import scipy.linalg

from pax_export._quantized import Form, QuantizedArray, packed
from pax_export.quantization._places import QuantizableArray
from pax_export.quantization._rounding import LEVELS, rounded

#: This part of the mean of the diagonal is added to it, so that the matrix has an inverse.
_DAMPING = 0.01


class InputMoments:
    """The sum of ``x xᵀ`` over the inputs of products, by the numbers of these."""

    def __init__(self) -> None:
        self.sums: dict[int, np.ndarray] = {}

    def __call__(self, number: Any, x: Any) -> None:
        rows = np.asarray(x, np.float32)
        rows = rows.reshape(-1, rows.shape[-1])
        found = self.sums.get(int(number), 0.0)
        self.sums[int(number)] = found + (rows.T @ rows).astype(np.float64)


def is_matrix(place: QuantizableArray) -> bool:
    """Whether a weight multiplies the last axis of its inputs alone, as `Linear` and 1×1 do."""
    kernel = place.weight.shape[-len(place.reduced) - 1 : -2]
    return place.axis >= -2 and not place.is_table and all(size == 1 for size in kernel)


def rounded_by_inputs(
    place: QuantizableArray, array: QuantizedArray, sums: list[np.ndarray]
) -> QuantizedArray:
    """Returns a quantized weight whose integers compensate each other's errors.

    Args:
        place: the weight.
        array: the weight rounded to the nearest integers.
        sums: the sums of its inputs, per layer of a scan.
    """
    form = array.form

    def turned(numbers: Any) -> np.ndarray:
        numbers = np.asarray(numbers)  # as [inputs, outputs], and back
        return numbers if form.axis == -2 else numbers.swapaxes(-1, -2)

    weight = turned(place.weight).astype(np.float64)
    matrices = weight.reshape(-1, *weight.shape[-2:])
    scales = turned(array.scales).reshape(len(matrices), -1, weight.shape[-1])
    made = [_one(*each, form._replace(axis=-2)) for each in zip(matrices, scales, sums)]
    integers, new, zeros = (np.stack(each) for each in zip(*made))
    integers = turned(integers.reshape(weight.shape)).astype(np.int8)
    held = packed(integers, form.axis) if form.bits == 4 else integers
    new, zeros = (
        None if like is None else turned(each.reshape(turned(like).shape)).astype(like.dtype)
        for like, each in ((array.scales, new), (array.zeros, zeros))
    )
    held, new, zeros = jax.device_put((held, new, zeros))
    return array.replace(integers=held, scales=new, zeros=zeros)


def _one(
    matrix: np.ndarray, scales: np.ndarray, moments: np.ndarray, form: Form
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns integers, scales and zero points of one matrix ``[inputs, outputs]``."""
    matrix, scales = matrix.copy(), scales.astype(np.float64)
    zeros = np.zeros_like(scales)
    size = len(matrix)
    damped = moments + np.eye(size) * max(_DAMPING * np.trace(moments) / size, 1e-12)
    # The upper factor of the inverse: its rows are how an error is spread.
    factor = scipy.linalg.cholesky(scipy.linalg.inv(damped))
    levels = LEVELS[form.scheme, form.bits]
    integers = np.empty_like(matrix)
    group = size if form.group is None else form.group
    for row in range(size):
        if form.group is not None and row % group == 0:
            rows = matrix[row : row + group].astype(np.float32)
            chosen = rounded(rows, form, (-2,))
            scales[row // group] = np.asarray(chosen.scales)[0]
            if chosen.zeros is not None:
                zeros[row // group] = np.asarray(chosen.zeros)[0]
        scale, zero = scales[row // group], zeros[row // group]
        integers[row] = np.clip(np.rint(matrix[row] / scale) + zero, levels.least, levels.most)
        error = (matrix[row] - (integers[row] - zero) * scale) / factor[row, row]
        matrix[row + 1 :] -= np.outer(factor[row, row + 1 :], error)
    return integers, scales, zeros
