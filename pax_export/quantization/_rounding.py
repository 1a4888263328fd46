"""Integers of weights: the nearest ones, those of GPTQ, and those of weights in training."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

from pax_export._foundations.types import Array
from pax_export.core import Module, ParameterModule
from pax_export.precision.quantized import GROUP, ArrayLike, Form, QuantizedArray, packed
from pax_export.quantization._weights import QuantizableArray


class Levels(NamedTuple):
    """The quantization levels of an array divided by its scales.

    Attributes:
        least: the smallest level.
        most: the largest level.
        divisors: divisors of a group's range that are tried for its scale.  With 4 bits, a divisor
            below 7 represents the largest element, and one above 8 clips it with finer steps for
            the others.
        dtype: the dtype of the levels, before they are packed.
    """

    least: int
    most: int
    divisors: tuple[float, ...]
    dtype: str = "int8"


#: By `Form.scheme` and bits.
LEVELS = {
    ("symmetric", 8): Levels(-127, 127, (127.0,)),
    ("symmetric", 4): Levels(-8, 7, tuple(np.linspace(6.75, 9.25, 11))),
    ("asymmetric", 4): Levels(-8, 7, tuple(np.linspace(13.5, 18.5, 11))),
    ("float", 8): Levels(-448, 448, (448.0,), "float8_e4m3fn"),
}
#: Smaller float16 numbers are denormal and have fewer digits, so a scale there is inexact.
_SMALLEST_SCALE = 2.0**-14


def quantized(
    target: QuantizableArray, bits: int, group: int | None = None, scheme: str = "symmetric"
) -> tuple[QuantizedArray, str]:
    """The nearest integers of a weight, and why they are not those that were asked for."""
    weight, why = jnp.asarray(target.weight), ""
    form = Form(bits, GROUP, target.axis, np.dtype(weight.dtype).name, scheme)
    size = weight.shape[target.axis]
    if bits == 4 or group is not None:
        if size % GROUP:
            why = f"int8 for each channel: {size} is no multiple of {GROUP}"
        elif not _fits_halves(weight, form):
            why = "int8 for each channel: scales of groups are outside of float16"
        else:
            return rounded(weight, form, target.reduced), ""
    # Zero points are those of groups.
    form = form._replace(bits=8, group=None, scheme="float" if scheme == "float" else "symmetric")
    return rounded(weight, form, target.reduced), why


def rounded(weight: Array, form: Form, reduced: tuple[int, ...]) -> QuantizedArray:
    """A weight in few bits.

    Args:
        weight: the array.
        form: the bits, the groups and their axis.
        reduced: without groups, the axes along which one scale serves, from the last (-1).
    """
    levels = LEVELS[form.scheme, form.bits]
    if form.group is None:
        axes = tuple(weight.ndim + axis for axis in reduced)
        integers, scales = _by_channel(weight, axes, levels)
        return QuantizedArray(integers, scales, form)
    integers, scales, zeros = _by_group(weight, form, levels)
    return QuantizedArray(integers, scales, form, None, zeros)


# Each function is one program of jax: operations one by one would be a dozen for each shape.
@functools.partial(jax.jit, static_argnums=1)
def _fits_halves(weight: Array, form: Form) -> Any:
    """Whether the scales of groups have all digits of a float16, or their groups are zeros."""
    span, _ = _ranges(_grouped(weight, form.axis), weight.ndim + form.axis + 1, form.scheme)
    divisors = LEVELS[form.scheme, form.bits].divisors
    least = jnp.min(jnp.where(span > 0, span, jnp.inf)) / max(divisors)
    return (least >= _SMALLEST_SCALE) & (jnp.max(span) / min(divisors) < 65504)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _by_channel(weight: Array, reduced: tuple[int, ...], levels: Levels) -> tuple[Any, Any]:
    numbers = weight.astype(jnp.float32)
    largest = jnp.max(jnp.abs(numbers), reduced, keepdims=True)
    scales = jnp.where(largest > 0, largest / levels.most, 1.0)
    return _nearest(numbers / scales, levels).astype(levels.dtype), scales


def _nearest(numbers: Array, levels: Levels) -> Any:
    whole = jnp.rint(numbers) if levels.dtype == "int8" else numbers  # else the cast rounds
    return jnp.clip(whole, levels.least, levels.most)


def _ranges(numbers: Array, inner: int, scheme: str) -> tuple[Any, Any]:
    if scheme == "symmetric":
        largest = jnp.max(jnp.abs(numbers), inner, keepdims=True)
        return largest, jnp.zeros_like(largest)
    # Zero points are levels, so that ranges contain 0.
    high = jnp.maximum(jnp.max(numbers, inner, keepdims=True), 0)
    low = jnp.minimum(jnp.min(numbers, inner, keepdims=True), 0)
    return high - low, (high + low) / 2


@functools.partial(jax.jit, static_argnums=(1, 2))
def _by_group(weight: Array, form: Form, levels: Levels) -> Any:
    numbers = _grouped(weight.astype(jnp.float32), form.axis)
    inner = weight.ndim + form.axis + 1
    span, middle = _ranges(numbers, inner, form.scheme)
    has_zeros = form.scheme == "asymmetric"
    center = (levels.least + levels.most) / 2 if has_zeros else 0

    def tried(divisor: Array) -> tuple[Any, ...]:
        half = (span / divisor).astype(jnp.float16)
        scales = jnp.where(half > 0, half, jnp.float16(1))  # also of what is smaller than a half
        wide = scales.astype(jnp.float32)
        zeros = _nearest(center - middle / wide, levels)
        integers = _nearest(numbers / wide + zeros, levels)
        error = jnp.sum(((integers - zeros) * wide - numbers) ** 2, inner, keepdims=True)
        return integers.astype(jnp.int8), scales, zeros.astype(jnp.int8), error

    divisors = jnp.asarray(levels.divisors, jnp.float32)

    def better(number: ArrayLike, best: tuple[Array, ...]) -> Any:
        new = tried(divisors[number])
        chosen = new[-1] < best[-1]
        return tuple(jnp.where(chosen, a, b) for a, b in zip(new, best))

    integers, scales, zeros, _ = jax.lax.fori_loop(1, len(divisors), better, tried(divisors[0]))
    scales, zeros = (jnp.squeeze(each, inner) for each in (scales, zeros))
    integers = integers.reshape(weight.shape)
    stored = packed(integers, form.axis) if form.bits == 4 else integers
    return stored, scales, zeros if has_zeros else None


def _grouped(weight: Array, axis: int) -> Array:
    inner, shape = weight.ndim + axis, weight.shape
    return weight.reshape(*shape[:inner], -1, GROUP, *shape[inner + 1 :])


# --- GPTQ, Frantar et al. 2022, https://arxiv.org/abs/2210.17323 -----------------------------
# Rows are rounded one by one, and the error of each is distributed over the remaining ones, by
# the inverse of the sum of ``x xᵀ`` over the inputs.

#: This part of the mean of the diagonal is added to it, so that the matrix has an inverse.
_DAMPING = 0.01


class InputMoments:
    """The sum of ``x xᵀ`` over the inputs of products, by the numbers of these."""

    def __init__(self) -> None:
        self.sums: dict[int, np.ndarray] = {}

    def see_inputs(self, number: Array, x: Array) -> None:
        rows = np.asarray(x, np.float32)
        rows = rows.reshape(-1, rows.shape[-1])
        found = self.sums.get(int(number), 0.0)
        self.sums[int(number)] = found + (rows.T @ rows).astype(np.float64)


def rounded_by_inputs(
    target: QuantizableArray, array: QuantizedArray, sums: list[np.ndarray]
) -> QuantizedArray:
    """Returns a quantized weight whose integers compensate each other's errors."""
    form = array.form

    def turned(numbers: Array) -> np.ndarray:
        numbers = np.asarray(numbers)  # as [inputs, outputs], and back
        return numbers if form.axis == -2 else numbers.swapaxes(-1, -2)

    weight = turned(target.weight).astype(np.float64)
    matrices = weight.reshape(-1, *weight.shape[-2:])
    scales = turned(array.scales).reshape(len(matrices), -1, weight.shape[-1])
    results = [_one(*each, form._replace(axis=-2)) for each in zip(matrices, scales, sums)]
    integers, new, zeros = (np.stack(each) for each in zip(*results))
    integers = turned(integers.reshape(weight.shape)).astype(np.int8)
    stored = packed(integers, form.axis) if form.bits == 4 else integers
    new, zeros = (
        None if like is None else turned(each.reshape(turned(like).shape)).astype(like.dtype)
        for like, each in ((array.scales, new), (array.zeros, zeros))
    )
    stored, new, zeros = jax.device_put((stored, new, zeros))
    return array.replace(integers=stored, scales=new, zeros=zeros)


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


# --- RoundedArray: a weight for quantization-aware training --------------------------------------


class RoundedArray(ArrayLike, ParameterModule):
    """A trainable weight whose layers compute with its quantized values.

    `quantize` with ``train=True`` creates them. The gradient is that of the weight itself, without
    rounding (straight-through), so any optimizer trains it.

    Args:
        weight: the trained array.
        form: the format of its integers.
        reduced: the axes that share a scale, without groups.
        inputs: as for `QuantizedArray`; their gradients also ignore the rounding.
        outputs: as for `QuantizedArray`.

    Attributes:
        weight: as passed.
        form: as passed.
        reduced: as passed.
        inputs: as passed.
        outputs: as passed.

    Example:
        >>> import pax_export as pax
        >>> training, _ = pax.quantize(pax.Linear(64, 8), bits=4, train=True)
        >>> training.weight
        RoundedArray(float32[64,8], bits=4, group=32)
        >>> small, _ = pax.quantize(training)
        >>> small.weight
        QuantizedArray(float32[64,8], bits=4, group=32)
    """

    def __init__(
        self,
        weight: Array,
        form: Form,
        reduced: tuple[int, ...],
        inputs: Module | None = None,
        outputs: Module | None = None,
    ):
        super().__init__()
        self.weight = weight
        self.form = form
        self.reduced = reduced
        self.inputs = inputs
        self.outputs = outputs

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return self.weight.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the weight."""
        return self.weight.dtype

    @property
    def nbytes(self) -> int:
        """The number of bytes of the weight."""
        return self.weight.nbytes

    def quantized(self) -> QuantizedArray:
        """Returns the integers of the current weight."""
        result = rounded(jnp.asarray(self.weight), self.form, self.reduced)
        return result.replace(inputs=self.inputs, outputs=self.outputs)

    def dequantized(self) -> jax.Array:
        """Returns the quantized values, with the gradient of the weight."""
        weight = jnp.asarray(self.weight)
        return weight + jax.lax.stop_gradient(self.quantized().dequantized() - weight)

    def _repr(self, info: dict[str, Any] | None = None) -> str:
        return self.quantized()._repr().replace("Quantized", "Rounded")
