"""Bit counts, and neighboring floats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core.primitives import random_gamma_p

from pax_export._foundations.types import Array, DTypeLike
from pax_export.export.portable.decompositions.registry import NotDecomposedError, decomposes


def _unsigned(x: Array) -> Any:
    dtype = jnp.dtype(x.dtype)
    return x if dtype.kind == "u" else lax.bitcast_convert_type(x, f"u{dtype.name}")


def _repeated(byte: int, x: Array) -> Any:
    """Returns a number of x's dtype with equal bytes."""
    return jnp.array(int.from_bytes(bytes([byte]) * x.dtype.itemsize), x.dtype)


@decomposes("population_count")
def population_count(x: Array, **_: object) -> Any:
    """Sums of neighboring bits, pairs and nibbles; then of bytes."""
    count = _unsigned(x)
    count = count - ((count >> 1) & _repeated(0x55, count))
    pairs = _repeated(0x33, count)
    count = (count & pairs) + ((count >> 2) & pairs)
    count = (count + (count >> 4)) & _repeated(0x0F, count)
    shift = 8
    while shift < 8 * x.dtype.itemsize:
        count = count + (count >> shift)
        shift *= 2
    return (count & jnp.array(0xFF, count.dtype) if shift > 8 else count).astype(x.dtype)


@decomposes("clz")
def clz(x: Array, **_: object) -> Any:
    """The bits that are not set when all below the highest one are."""
    filled, shift = _unsigned(x), 1
    while shift < 8 * x.dtype.itemsize:
        filled = filled | (filled >> shift)
        shift *= 2
    return population_count(~filled).astype(x.dtype)


@decomposes("mulhi")
def mulhi(x: Array, y: Array, **_: object) -> Any:
    """The upper half of a product, by products of the halves of both."""
    half = 4 * x.dtype.itemsize
    one, other = _unsigned(x), _unsigned(y)
    low = jnp.array((1 << half) - 1, one.dtype)
    x_low, x_high, y_low, y_high = one & low, one >> half, other & low, other >> half
    cross = x_high * y_low + ((x_low * y_low) >> half)
    carry = x_low * y_high + (cross & low)
    high = x_high * y_high + (cross >> half) + (carry >> half)
    if jnp.dtype(x.dtype).kind == "u":
        return high
    high = lax.bitcast_convert_type(high, x.dtype)
    return high - jnp.where(x < 0, y, 0) - jnp.where(y < 0, x, 0)


@decomposes("nextafter")
def nextafter(x: Array, y: Array, **_: object) -> Any:
    """The bits of a number without its sign are a whole number in the order of sizes."""
    dtype = jnp.dtype(x.dtype)
    whole = f"int{8 * dtype.itemsize}"
    bits = lax.bitcast_convert_type(x, whole)
    target = lax.bitcast_convert_type(y, whole)
    sign = jnp.array(jnp.iinfo(whole).min, whole)
    away = (jnp.abs(x) < jnp.abs(y)) & ((bits < 0) == (target < 0))
    moved = bits + jnp.where(away, 1, -1).astype(whole)
    smallest = (target & sign) | jnp.array(1, whole)
    moved = jnp.where(x == 0, smallest, moved)
    found = lax.bitcast_convert_type(moved, dtype)
    found = jnp.where(x == y, y, found)
    return jnp.where(jnp.isnan(x) | jnp.isnan(y), jnp.nan, found).astype(dtype)


@decomposes("bitcast_convert_type")
def bitcast_convert_type(x: Array, *, new_dtype: DTypeLike, **_: object) -> Any:
    """Converts half precision by the bits of float32, which have the same layout."""
    new = jnp.dtype(new_dtype)
    if x.dtype == new:
        return x
    if "bfloat16" in (x.dtype, new) and x.dtype.itemsize == new.itemsize:
        if new != jnp.bfloat16:
            wide = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
            return lax.bitcast_convert_type((wide >> 16).astype(jnp.uint16), new)
        wide = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
        return lax.bitcast_convert_type(wide, jnp.float32).astype(new)
    if "float16" in (x.dtype, new) and x.dtype.itemsize == new.itemsize:
        if new != jnp.float16:
            return lax.bitcast_convert_type(_bits_of_half(x.astype(jnp.float32)), new)
        return _half_of_bits(lax.bitcast_convert_type(x, jnp.uint16)).astype(new)
    raise NotDecomposedError(f"from {x.dtype} to {new}")


def _bits_of_half(x: Array) -> Any:
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign, exponent = (bits >> 16) & 0x8000, (bits >> 23) & 0xFF
    normal = (((exponent - 112) << 10) & 0x7C00) | ((bits >> 13) & 0x3FF)
    small = (jnp.abs(x) * 2.0**24).astype(jnp.uint32)  # below 2**-14
    size = jnp.where(exponent < 113, small, normal)
    size = jnp.where(jnp.isinf(x), 0x7C00, jnp.where(jnp.isnan(x), 0x7E00, size))
    return (sign | size.astype(jnp.uint32)).astype(jnp.uint16)


def _half_of_bits(x: Array) -> Any:
    wide = x.astype(jnp.uint32)
    sign, exponent, fraction = (wide & 0x8000) << 16, (wide >> 10) & 0x1F, wide & 0x3FF
    normal = ((exponent + 112) << 23) | (fraction << 13)
    special = jnp.uint32(0x7F800000) | (fraction << 13)
    bits = sign | jnp.where(exponent == 0x1F, special, normal)
    small = fraction.astype(jnp.float32) * 2.0**-24
    small = jnp.where(sign == 0, small, -small)
    return jnp.where(exponent == 0, small, lax.bitcast_convert_type(bits, jnp.float32))


# --- random bits ------------------------------------------------------------


_TURNS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


@decomposes("threefry2x32")
def threefry2x32(first: Array, second: Array, one: Array, two: Array) -> tuple[Any, Any]:
    """Twenty rounds of sums and rotations of 32 bits."""
    keys = (first, second, first ^ second ^ jnp.uint32(_PARITY))
    one, two = one + keys[0], two + keys[1]
    for turn in range(5):
        for turns in _TURNS[turn % 2]:
            one = one + two
            two = one ^ ((two << turns) | (two >> (32 - turns)))
        one = one + keys[(turn + 1) % 3]
        two = two + keys[(turn + 2) % 3] + jnp.uint32(turn + 1)
    return one, two


@decomposes("iota_2x32_shape")
def iota_2x32_shape(*, shape: Sequence[Any], **_: object) -> tuple[Any, Any]:
    """The index of each element in two words; the upper one is 0 below 2**32."""
    low = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    return jnp.zeros_like(low), low


@decomposes("random_gamma")
def random_gamma(keys: Array, shapes: Array, *, log_space: bool) -> Any:
    """Samples as jax does, by rejection; its operations on keys are replaced in turn."""
    return random_gamma_p.impl(keys, shapes, log_space=log_space)
