"""Products with quantized matrices on GPUs, where XLA fuses the dequantization into the product.

It does so where the other operand is only cast or is summed over; a product with scaled integers
would write the whole matrix out first.  docs/decisions/quantization.md has the measurements.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from pax_export._quantized._integers import GROUP, Form, dequantized, halves, scales_per_group
from pax_export._types import DTypeLike


def product_on_gpu(
    x: jax.Array, integers: jax.Array, *scales: jax.Array, contracted: int, **form: Any
) -> jax.Array:
    """``x [..., k]`` times a matrix ``[k, n]`` (contracted -2) or ``[n, k]`` (-1)."""
    layout = Form(**form)
    dtype = jnp.result_type(x.dtype, layout.dtype)
    x, rows = x.astype(dtype), math.prod(x.shape[:-1])
    if layout.group is None and scales[0].shape[contracted] == 1:
        of_outputs = scales[0].astype(jnp.float32).reshape(-1)
        made = _dot(x, integers.astype(dtype), contracted) * of_outputs
    elif layout.bits == 8 or layout.axis != contracted:
        made = _dot(x, dequantized(integers, *scales, form=layout).astype(dtype), contracted)
    elif isinstance(rows, int) and rows == 1:
        made = _sum_of_groups(x, integers, scales, contracted)
    else:
        made = _two_products(x, integers, scales, contracted, dtype)
    return made.astype(dtype)


def _dot(x: jax.Array, weight: jax.Array, contracted: int) -> jax.Array:
    numbers = (((x.ndim - 1,), (weight.ndim + contracted,)), ((), ()))
    return jax.lax.dot_general(x, weight, numbers, preferred_element_type=jnp.float32)


def _numbers(integers: jax.Array, zeros: Any, axis: int) -> list[jax.Array]:
    """The low and the high halves, ``[groups, 16, n]`` or ``[n, groups, 16]``, without scales."""
    both = [half.astype(jnp.float32) for half in halves(integers, axis)]
    return [half - scales_per_group(each, axis) for half in both for each in zeros] or both


def _sum_of_groups(x: jax.Array, integers: jax.Array, scales: Any, axis: int) -> jax.Array:
    """One row times a matrix: sums over groups, each multiplied by its scale."""
    by_group, *zeros = (each.astype(jnp.float32) for each in scales)
    grouped = x.astype(jnp.float32).reshape(-1, 2, GROUP // 2)
    parts = grouped[..., None] if axis == -2 else grouped
    low, high = _numbers(integers, zeros, axis)
    sums = (parts[:, 0] * low + parts[:, 1] * high).sum(axis)
    return (sums * by_group).sum(axis).reshape(*x.shape[:-1], -1)


def _two_products(
    x: jax.Array, integers: jax.Array, scales: Any, axis: int, dtype: DTypeLike
) -> jax.Array:
    """A product with the low halves of all groups, and one with the high ones."""
    by_group, *zeros = (each.astype(jnp.float32) for each in scales)
    grouped = x.reshape(*x.shape[:-1], -1, 2, GROUP // 2)
    made: Any = 0.0
    for place, half in enumerate(_numbers(integers, zeros, axis)):
        scaled = (half * scales_per_group(by_group, axis)).astype(dtype)
        part = grouped[..., place, :].reshape(*x.shape[:-1], -1)
        made = made + _dot(part, scaled.reshape(integers.shape), axis)
    return made
