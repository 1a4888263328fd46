"""Rounds numbers to integers and scales."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pax_export._quantized import GROUP, Form, QuantizedArray, packed

_MOST = 127
#: The largest number of a group of 4 bits, divided by these, is tried as its scale: below 7 the
#: largest is represented, above 8 it is clipped and the others are finer.
_DIVISORS = tuple(np.linspace(6.75, 9.25, 11))
#: A half has no more digits below this; a scale of fewer is not what it was meant to be.
_SMALLEST_SCALE = 2.0**-14


def rounded(weight: Any, form: Form, reduced: tuple[int, ...]) -> QuantizedArray:
    """A weight in few bits.

    Args:
        weight: the array.
        form: the bits, the groups and their axis.
        reduced: without groups, the axes along which one scale serves, from the last (-1).
    """
    if form.group is None:
        integers, scales = _by_channel(weight, tuple(weight.ndim + axis for axis in reduced))
        return QuantizedArray(integers, scales, form)
    integers, scales = _by_group(weight, form.bits, form.axis, form.group)
    if form.bits == 4:
        integers = packed(integers, form.axis)
    return QuantizedArray(integers, scales, form)


def fits_halves(weight: Any, axis: int) -> bool:
    """Whether the scales of groups have all digits of a float16, or their groups are zeros."""
    largest = jnp.max(jnp.abs(_grouped(weight, axis, GROUP)), axis=weight.ndim + axis + 1)
    least = jnp.min(jnp.where(largest > 0, largest, jnp.inf)) / max(_DIVISORS)
    return bool((least >= _SMALLEST_SCALE) & (jnp.max(largest) / min(_DIVISORS) < 65504))


@functools.partial(jax.jit, static_argnums=1)
def _by_channel(weight: Any, reduced: tuple[int, ...]) -> tuple[Any, Any]:
    numbers = weight.astype(jnp.float32)
    largest = jnp.max(jnp.abs(numbers), reduced, keepdims=True)
    scales = jnp.where(largest > 0, largest / _MOST, 1.0)
    return jnp.clip(jnp.rint(numbers / scales), -_MOST, _MOST).astype(jnp.int8), scales


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _by_group(weight: Any, bits: int, axis: int, group: int) -> tuple[Any, Any]:
    numbers = _grouped(weight.astype(jnp.float32), axis, group)
    place = weight.ndim + axis + 1
    largest = jnp.max(jnp.abs(numbers), place, keepdims=True)
    low, high = (-8, 7) if bits == 4 else (-_MOST, _MOST)

    def tried(divisor: Any) -> tuple[Any, Any, Any]:
        half = (largest / divisor).astype(jnp.float16)
        scales = jnp.where(half > 0, half, jnp.float16(1))  # also of what is smaller than a half
        wide = scales.astype(jnp.float32)
        integers = jnp.clip(jnp.rint(numbers / wide), low, high)
        error = jnp.sum((integers * wide - numbers) ** 2, place, keepdims=True)
        return integers.astype(jnp.int8), scales, error

    divisors = jnp.asarray(_DIVISORS if bits == 4 else (127.0,), jnp.float32)

    def better(place: object, best: Any) -> Any:
        new = tried(divisors[place])
        chosen = new[2] < best[2]
        return tuple(jnp.where(chosen, a, b) for a, b in zip(new, best))

    integers, scales, _ = jax.lax.fori_loop(1, len(divisors), better, tried(divisors[0]))
    return integers.reshape(weight.shape), jnp.squeeze(scales, place)


def _grouped(weight: Any, axis: int, group: int) -> Any:
    place, shape = weight.ndim + axis, weight.shape
    return weight.reshape(*shape[:place], -1, group, *shape[place + 1 :])
