"""Rounding that corrects itself (GPTQ): what one row of a matrix loses, later rows make up for.

Frantar et al. 2022, https://arxiv.org/abs/2210.17323: rows are rounded one after the other, and
the error of each is spread over those that are not rounded yet, by the inverse of the sum of
``x xᵀ`` over the inputs.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import scipy.linalg

from pax_export._quantized import Form, QuantizedArray, packed
from pax_export.quantization._places import QuantizableArray
from pax_export.quantization._rounding import rounded

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
    return place.axis == -2 and all(size == 1 for size in kernel)


def rounded_by_inputs(
    place: QuantizableArray, array: QuantizedArray, sums: list[np.ndarray]
) -> QuantizedArray:
    """A quantized weight whose integers make up for each other's errors.

    Args:
        place: the weight.
        array: the same, rounded to the nearest.
        sums: of its inputs, for each layer of a scan.
    """
    weight = np.asarray(place.weight, np.float64)
    matrices = weight.reshape(-1, *weight.shape[-2:])
    scales = np.asarray(array.scales).reshape(len(matrices), -1, weight.shape[-1])
    form = array.form
    made = [_one(*each, form) for each in zip(matrices, scales, sums)]
    integers = np.stack([each for each, _ in made]).reshape(weight.shape).astype(np.int8)
    new = np.stack([each for _, each in made]).reshape(array.scales.shape)
    held = packed(jnp.asarray(integers), form.axis) if form.bits == 4 else jnp.asarray(integers)
    return array.replace(integers=held, scales=jnp.asarray(new, array.scales.dtype))


def _one(
    matrix: np.ndarray, scales: np.ndarray, moments: np.ndarray, form: Form
) -> tuple[np.ndarray, np.ndarray]:
    """Integers and scales of one matrix ``[inputs, outputs]``."""
    matrix, scales = matrix.copy(), scales.astype(np.float64)
    size = len(matrix)
    damped = moments + np.eye(size) * max(_DAMPING * np.trace(moments) / size, 1e-12)
    # The upper factor of the inverse: its rows are how an error is spread.
    factor = scipy.linalg.cholesky(scipy.linalg.inv(damped))
    low, high = (-8, 7) if form.bits == 4 else (-127, 127)
    integers = np.empty_like(matrix)
    group = size if form.group is None else form.group
    for row in range(size):
        if form.group is not None and row % group == 0:
            rows = jnp.asarray(matrix[row : row + group], jnp.float32)
            scales[row // group] = np.asarray(rounded(rows, form, (-2,)).scales[0])
        scale = scales[row // group]
        integers[row] = np.clip(np.rint(matrix[row] / scale), low, high)
        error = (matrix[row] - integers[row] * scale) / factor[row, row]
        matrix[row + 1 :] -= np.outer(factor[row, row + 1 :], error)
    return integers, scales
