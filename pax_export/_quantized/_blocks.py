"""Products over blocks of rows, for CPUs.

XLA writes a whole matrix out in float32 before it multiplies with it.  A loop over blocks of at
most 512 rows keeps what is written in the cache of the processor, so that memory is read for the
integers alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pax_export._quantized._integers import GROUP, Form, dequantized, halves, scales_per_group

#: The largest number of rows of an integer matrix multiplied at a time.
_LARGEST, _SMALLEST = 512, 192


def blockwise(x: Any, integers: object, scales: object, form: Form, contracted: int) -> Any:
    """``x [..., k]`` times a matrix ``[k, n]`` (contracted -2) or ``[n, k]`` (-1)."""
    dtype = jnp.result_type(x.dtype, form.dtype)
    flat = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    whole = form._replace(dtype="float32")
    if contracted == -2:
        made = _over_rows(flat, integers, scales, whole)
    else:
        made = _over_outputs(flat, integers, scales, whole)
    return made.reshape(*x.shape[:-1], made.shape[-1]).astype(dtype)


def _block(size: int) -> int:
    """How many rows a block has: a divisor if there is a good one, in whole groups."""
    if size <= _LARGEST:
        return size
    fitting = [n for n in range(_LARGEST, _SMALLEST - 1, -GROUP) if size % n == 0]
    return fitting[0] if fitting else _LARGEST


def _over_rows(x: Any, integers: Any, scales: Any, form: Form) -> Any:
    """The sum over blocks of what is contracted."""
    size = x.shape[-1]
    block = _block(size)
    count = size // block
    by_column = form.group is None  # one scale for each column: of the whole sum
    groups = None if by_column else scales

    def rows(array: Any, first: int, several: int, of_each: int) -> Any:
        fewer = size // array.shape[0]  # packed integers, and scales of groups
        start, taken = first // fewer, several * of_each // fewer
        return array[start : start + taken].reshape(several, of_each // fewer, array.shape[1])

    def summed(first: int, several: int, of_each: int) -> Any:
        part = x[:, first : first + several * of_each].reshape(-1, several, of_each)
        parts = part.transpose(1, 0, 2)  # what a step of the loop takes lies together
        own = None if groups is None else rows(groups, first, several, of_each)
        return _summed(parts, rows(integers, first, several, of_each), own, form)

    total = summed(0, count, block)
    if size % block:
        total = total + summed(block * count, 1, size % block)
    return total * scales.astype(jnp.float32) if by_column else total


def _summed(x: Any, integers: Any, scales: Any, form: Form) -> Any:
    def step(total: object, given: Any) -> tuple[Any, None]:
        x, integers, scales = given
        return total + _times_block(x, integers, scales, form), None

    zeros = jnp.zeros((x.shape[1], integers.shape[-1]), jnp.float32)
    if len(x) == 1:
        one = None if scales is None else scales[0]
        return _times_block(x[0], integers[0], one, form)
    return jax.lax.scan(step, zeros, (x, integers, scales))[0]


def _times_block(x: Any, integers: Any, scales: Any, form: Form) -> Any:
    if form.bits != 4:
        if scales is None:
            return x @ integers.astype(jnp.float32)
        return x @ dequantized(integers, scales, form)
    by_group = None if scales is None else scales_per_group(scales.astype(jnp.float32), -2)
    apart = x.reshape(x.shape[0], -1, 2, GROUP // 2)
    made = None
    for place, half in enumerate(halves(integers, -2)):
        numbers = half.astype(jnp.float32)
        numbers = numbers if by_group is None else numbers * by_group
        matrix = numbers.reshape(-1, numbers.shape[-1])
        part = apart[:, :, place].reshape(x.shape[0], -1) @ matrix
        made = part if made is None else made + part
    return made


def _over_outputs(x: object, integers: Any, scales: object, form: Form) -> Any:
    """The products of each block of outputs, one after the other."""
    size = integers.shape[0]
    block = _block(size)
    count = size // block

    def multiplied(given: Any) -> Any:
        own, of_own = given
        if form.group is None:
            numbers = dequantized(own, jnp.ones((), jnp.float32), form)
            return (x @ numbers.T) * of_own.astype(jnp.float32).T
        return x @ dequantized(own, of_own, form).T

    if count < 2:
        return multiplied((integers, scales))
    cut = block * count

    def blocks(array: Any) -> Any:
        return array[:cut].reshape(count, block, array.shape[1])

    made = jax.lax.map(multiplied, (blocks(integers), blocks(scales)))
    made = made.transpose(1, 0, 2).reshape(-1, cut)
    if cut == size:
        return made
    rest: Callable[[Any], Any] = lambda array: array[cut:]  # noqa: E731
    return jnp.concatenate([made, multiplied((rest(integers), rest(scales)))], 1)
