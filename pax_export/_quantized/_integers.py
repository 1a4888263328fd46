"""Packing of low-bit integers in arrays, and dequantization.

Each group of 32 4-bit integers along an axis is 16 bytes: low halves are the first 16 integers,
high halves the others, so neither half is shuffled before a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

#: The number of 4-bit integers that are packed together and share a scale.
GROUP = 32
_HALF = GROUP // 2


class Form(NamedTuple):
    """The format of integers and scales; static.

    Attributes:
        bits: 8 or 4.
        group: the number of neighbors along ``axis`` that share a scale; None if scales broadcast.
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


def packed(integers: object, axis: int) -> Any:
    """Packs 4-bit integers, two per byte; the size of the axis is a multiple of 32."""
    low, high = _split(integers, axis, _HALF)
    return _joined(((low & 15) | (high << 4)).astype("int8"), axis)


def halves(integers: Any, axis: int) -> tuple[Any, Any]:
    """The low and the high integers of packed bytes, grouped: ``[..., groups, 16, ...]``."""
    place = integers.ndim + axis
    shape = integers.shape
    return low_and_high(integers.reshape(*shape[:place], -1, _HALF, *shape[place + 1 :]))


def low_and_high(integers: Any) -> tuple[Any, Any]:
    """The two integers of each byte; of numpy's arrays by numpy, which compiles nothing."""
    if isinstance(integers, np.ndarray):
        return integers << np.int8(4) >> np.int8(4), integers >> np.int8(4)
    four = jnp.int8(4)
    low = lax.shift_right_arithmetic(lax.shift_left(integers, four), four)
    return low, lax.shift_right_arithmetic(integers, four)


def unpacked(integers: object, axis: int) -> Any:
    """The inverse of `packed`."""
    low, high = halves(integers, axis)
    namespace = np if isinstance(low, np.ndarray) else jnp
    return _joined(namespace.concatenate([low, high], axis), axis)


def scales_per_group(scales: Any, axis: int) -> Any:
    """Scales that multiply ``[..., groups, of a group, ...]``."""
    return jnp.expand_dims(scales, scales.ndim + axis + 1)


def dequantized(integers: Any, scales: Any, *zeros: Any, form: Form) -> Any:
    """The numbers, in operations of jax: ``(integers - zeros) * scales`` in float32, then cast."""
    if form.bits == 4:
        integers = unpacked(integers, form.axis)
    numbers, scales = integers.astype(jnp.float32), scales.astype(jnp.float32)
    if form.group is None:
        return (numbers * scales).astype(form.dtype)
    place = numbers.ndim + form.axis
    shape = numbers.shape
    grouped = numbers.reshape(*shape[:place], -1, form.group, *shape[place + 1 :])
    for each in zeros:
        grouped = grouped - scales_per_group(each, form.axis).astype(jnp.float32)
    return (grouped * scales_per_group(scales, form.axis)).reshape(shape).astype(form.dtype)


def _split(array: Any, axis: int, size: int) -> tuple[Any, Any]:
    place, shape = array.ndim + axis, array.shape
    grouped = array.reshape(*shape[:place], -1, 2, size, *shape[place + 1 :])
    taken = (slice(None),) * (place + 1)
    return grouped[(*taken, 0)], grouped[(*taken, 1)]


def _joined(array: Any, axis: int) -> Any:
    place = array.ndim - 1 + axis
    shape = array.shape
    return array.reshape(*shape[:place], -1, *shape[place + 2 :])
