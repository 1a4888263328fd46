"""Low-bit integers in arrays: packing, dequantization, and products with them on GPUs.

Each group of 32 4-bit integers along an axis is 16 bytes: low halves are the first 16 integers,
high halves the others, so neither half is shuffled before a product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pax_export._foundations.types import Array, DTypeLike

#: The number of 4-bit integers that are packed together and share a scale.
GROUP = 32
_HALF = GROUP // 2


class Form(NamedTuple):
    """The format of integers and scales; static.

    Attributes:
        bits: 8 or 4.
        group: `GROUP`, the number of neighbors along ``axis`` that share a scale, or None if scales
            broadcast.
        axis: the axis of groups and packed bytes, counted from the last (-1).
        dtype: the name of the dtype of the represented array.
        scheme: ``"symmetric"``; ``"asymmetric"``, where each group has a zero point; or
            ``"float"``, where the integers are float8 numbers.
    """

    bits: int
    group: int | None
    axis: int
    dtype: str
    scheme: str = "symmetric"

    def shape(self, integers: Sequence[int]) -> tuple[int, ...]:
        """The shape of the numbers, by that of the stored integers."""
        sizes = list(integers)
        if self.bits == 4:
            sizes[self.axis] *= 2
        return tuple(sizes)


def packed(integers: Array, axis: int) -> Any:
    """Packs 4-bit integers, two per byte; the size of the axis is a multiple of 32."""
    low, high = _split(integers, axis, _HALF)
    return _joined(((low & 15) | (high << 4)).astype("int8"), axis)


def halves(integers: Array, axis: int) -> tuple[Any, Any]:
    """The low and the high integers of packed bytes, grouped: ``[..., groups, 16, ...]``."""
    leading = integers.ndim + axis
    shape = integers.shape
    return low_and_high(integers.reshape(*shape[:leading], -1, _HALF, *shape[leading + 1 :]))


def low_and_high(integers: Array) -> tuple[Any, Any]:
    """The two integers of each byte; of numpy's arrays by numpy, which compiles nothing."""
    if isinstance(integers, np.ndarray):
        return integers << np.int8(4) >> np.int8(4), integers >> np.int8(4)
    four = jnp.int8(4)
    low = lax.shift_right_arithmetic(lax.shift_left(integers, four), four)
    return low, lax.shift_right_arithmetic(integers, four)


def unpacked(integers: Array, axis: int) -> Any:
    """The inverse of `packed`."""
    low, high = halves(integers, axis)
    namespace = np if isinstance(low, np.ndarray) else jnp
    return _joined(namespace.concatenate([low, high], axis), axis)


def scales_per_group(scales: Array, axis: int) -> Any:
    """Scales that multiply ``[..., groups, of a group, ...]``."""
    return jnp.expand_dims(scales, scales.ndim + axis + 1)


def dequantized(integers: Array, scales: Array, *zeros: Array, form: Form) -> Any:
    """The numbers, in operations of jax: ``(integers - zeros) * scales`` in float32, then cast."""
    if form.bits == 4:
        integers = unpacked(integers, form.axis)
    numbers, scales = integers.astype(jnp.float32), scales.astype(jnp.float32)
    if form.group is None:
        return (numbers * scales).astype(form.dtype)
    leading = numbers.ndim + form.axis
    shape = numbers.shape
    grouped = numbers.reshape(*shape[:leading], -1, form.group, *shape[leading + 1 :])
    for each in zeros:
        grouped = grouped - scales_per_group(each, form.axis).astype(jnp.float32)
    return (grouped * scales_per_group(scales, form.axis)).reshape(shape).astype(form.dtype)


def _split(array: Array, axis: int, size: int) -> tuple[Any, Any]:
    leading, shape = array.ndim + axis, array.shape
    grouped = array.reshape(*shape[:leading], -1, 2, size, *shape[leading + 1 :])
    leading_slices = (slice(None),) * (leading + 1)
    return grouped[(*leading_slices, 0)], grouped[(*leading_slices, 1)]


def _joined(array: Array, axis: int) -> Any:
    leading = array.ndim - 1 + axis
    shape = array.shape
    return array.reshape(*shape[:leading], -1, *shape[leading + 2 :])


# --- products with quantized matrices on GPUs -----------------------------------------
# It does so where the other operand is only cast or is summed over; a product with scaled
# integers would write the whole matrix out first. docs/decisions/quantization.md has the
# measurements.


def product_on_gpu(
    x: jax.Array, integers: jax.Array, *scales: jax.Array, contracted: int, **form: Any
) -> jax.Array:
    """``x [..., k]`` times a matrix ``[k, n]`` (contracted -2) or ``[n, k]`` (-1)."""
    layout = Form(**form)
    dtype = jnp.result_type(x.dtype, layout.dtype)
    x, rows = x.astype(dtype), math.prod(x.shape[:-1])
    if layout.group is None and scales[0].shape[contracted] == 1:
        of_outputs = scales[0].astype(jnp.float32).reshape(-1)
        product = _dot(x, integers.astype(dtype), contracted) * of_outputs
    elif layout.bits == 8 or layout.axis != contracted:
        product = _dot(x, dequantized(integers, *scales, form=layout).astype(dtype), contracted)
    elif isinstance(rows, int) and rows == 1:
        product = _sum_of_groups(x, integers, scales, contracted)
    else:
        product = _two_products(x, integers, scales, contracted, dtype)
    return product.astype(dtype)


def _dot(x: jax.Array, weight: jax.Array, contracted: int) -> jax.Array:
    numbers = (((x.ndim - 1,), (weight.ndim + contracted,)), ((), ()))
    return jax.lax.dot_general(x, weight, numbers, preferred_element_type=jnp.float32)


def _numbers(integers: jax.Array, zeros: Sequence[jax.Array], axis: int) -> list[jax.Array]:
    """The low and the high halves, ``[groups, 16, n]`` or ``[n, groups, 16]``, without scales."""
    both = [half.astype(jnp.float32) for half in halves(integers, axis)]
    return [half - scales_per_group(each, axis) for half in both for each in zeros] or both


def _sum_of_groups(
    x: jax.Array, integers: jax.Array, scales: Sequence[jax.Array], axis: int
) -> jax.Array:
    """One row times a matrix: sums over groups, each multiplied by its scale."""
    by_group, *zeros = (each.astype(jnp.float32) for each in scales)
    grouped = x.astype(jnp.float32).reshape(-1, 2, GROUP // 2)
    parts = grouped[..., None] if axis == -2 else grouped
    low, high = _numbers(integers, zeros, axis)
    sums = (parts[:, 0] * low + parts[:, 1] * high).sum(axis)
    return (sums * by_group).sum(axis).reshape(*x.shape[:-1], -1)


def _two_products(
    x: jax.Array, integers: jax.Array, scales: Sequence[jax.Array], axis: int, dtype: DTypeLike
) -> jax.Array:
    """A product with the low halves of all groups, and one with the high ones."""
    by_group, *zeros = (each.astype(jnp.float32) for each in scales)
    grouped = x.reshape(*x.shape[:-1], -1, 2, GROUP // 2)
    product: Any = 0.0
    for leading, half in enumerate(_numbers(integers, zeros, axis)):
        scaled = (half * scales_per_group(by_group, axis)).astype(dtype)
        part = grouped[..., leading, :].reshape(*x.shape[:-1], -1)
        product = product + _dot(part, scaled.reshape(integers.shape), axis)
    return product


def plain_dot(x: Array, weight: Array, contracted: int) -> Any:
    """The same product of an ordinary matrix."""
    numbers = (((x.ndim - 1,), (weight.ndim + contracted,)), ((), ()))
    dtype = jnp.result_type(x, weight)
    return jax.lax.dot_general(x.astype(dtype), weight.astype(dtype), numbers)
