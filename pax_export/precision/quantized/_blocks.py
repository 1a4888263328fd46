"""Products with integers on CPUs: in blocks of rows, which read the integers once.

docs/decisions/quantization.md has the measurements.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pax_export._foundations.jax import ADDS_ROWS_FAST
from pax_export._foundations.types import Array, ArrayLike
from pax_export.precision.quantized._integers import GROUP, Form, low_and_high, plain_dot

#: The largest number of rows of an integer matrix multiplied at a time, and that of elements where
#: there are few rows of inputs: in float32 they stay in the second cache of a core.
_LARGEST, _ELEMENTS = 512, 1 << 16
#: The largest number of rows of inputs that are few; and of how many columns a wider matrix is
#: multiplied one after the other then.
_FEW, _WIDE = 16, 2048
#: The largest number of rows of inputs for which rows of a matrix are added (with two, older
#: versions of jax take three times as long as in blocks), and how many numbers of each column one
#: after the other in a wide matrix: with 16 XLA takes twice as long.
_FEWEST, _AT_ONCE = 2 if ADDS_ROWS_FAST else 1, 8
#: How many rows of integers are added in a loop over all of a matrix: of 4 bits, and of 8 bits in
#: wide and in narrow ones; and which are narrow. With 4 rows older versions of jax fuse the slice
#: of a scanned layer's matrix with the loop, which then takes three times as long.
_TOGETHER_4, _TOGETHER_8, _NARROW = 4 if ADDS_ROWS_FAST else 8, (16, 32), 1024
#: The least number of elements of a matrix of bfloat16 that is read in blocks.
_LEAST_NARROW = 1 << 18


def blockwise(x: Array, integers: Array, scales: Sequence[Any], form: Form, contracted: int) -> Any:
    """``x [..., k]`` times a matrix ``[k, n]`` (contracted -2) or ``[n, k]`` (-1).

    ``scales`` are the scales and the optional zero points.
    """
    dtype = jnp.result_type(x.dtype, form.dtype)
    flat = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    whole = form._replace(dtype="float32")
    if contracted == -2:
        result = _over_rows(flat, integers, scales, whole)
    else:
        result = _over_outputs(flat, integers, scales, whole)
    return result.reshape(*x.shape[:-1], result.shape[-1]).astype(dtype)


def is_read_in_blocks(x: Array, weight: Array, contracted: int) -> bool:
    """Whether blocks of an ordinary matrix take less time on a CPU: few rows, bfloat16."""
    sizes = x.shape[:-1]
    return (
        ADDS_ROWS_FAST
        and weight.dtype == jnp.bfloat16
        and weight.ndim == 2
        and weight.size >= _LEAST_NARROW
        and x.dtype in (jnp.bfloat16, jnp.float32)
        and all(isinstance(size, int) for size in sizes)
        and 1 <= math.prod(sizes) <= (_FEW if contracted == -2 else 1)
    )


def _are_few(rows: ArrayLike) -> bool:
    return not isinstance(rows, int) or rows <= _FEW  # a symbolic number mostly is few


def _block(size: int, width: int, rows: ArrayLike) -> int:
    """Returns the rows per block: a divisor if there is a suitable one, in whole groups."""
    most = _LARGEST
    if _are_few(rows):
        most = min(most, max(_ELEMENTS // width // GROUP, 1) * GROUP)
    if size <= most:
        return size
    fitting = [n for n in range(most, most // 2 - 1, -GROUP) if size % n == 0]
    return fitting[0] if fitting else most


def _over_rows(x: Array, integers: Array, scales: Sequence[Any], form: Form) -> Any:
    """Sums over blocks of the contracted axis; 2,048 columns of a wide matrix at a time."""
    width = integers.shape[-1]
    by_column = form.group is None  # one scale per column: a factor of the whole sum
    stored = (integers,) if by_column else (integers, *scales)
    narrow, few = width < 2 * _WIDE, isinstance(x.shape[0], int) and x.shape[0] <= _FEWEST
    if few and (narrow or ADDS_ROWS_FAST):
        total = (_by_groups if narrow else _row_by_row)(x, stored, form)
    elif narrow or not _are_few(x.shape[0]):
        total = _of_columns(x, stored, form, 0, width)
    else:
        rest = width % _WIDE
        of_block = functools.partial(_of_columns, x, stored, form)
        result = jax.lax.map(
            lambda first: of_block(first, _WIDE), jnp.arange(0, width - rest, _WIDE)
        )
        total = result.transpose(1, 0, 2).reshape(x.shape[0], width - rest)
        if rest:
            total = jnp.concatenate([total, of_block(width - rest, rest)], 1)
    return total * scales[0].astype(jnp.float32) if by_column else total


def _by_groups(x: Array, stored: Sequence[Any], form: Form) -> Any:
    """Sums a few rows of a matrix at a time, in one loop over all of them, and then these sums.

    XLA gives such a loop to all cores, which it does to none within a scan.
    """
    integers, *scales = stored
    integers = jax.lax.optimization_barrier(integers)  # the slice of a scanned layer stays apart
    width = integers.shape[1]
    count = _TOGETHER_4 if form.bits == 4 else _TOGETHER_8[width < _NARROW]
    cut = integers.shape[0] // count * count  # groups leave no rest
    groups = 1 if form.group is None else scales[0].shape[0]
    rows = integers[:cut].reshape(groups, cut // groups // count, count, width)
    parts = [each[:, :cut].reshape(x.shape[0], *rows.shape[:3]) for each in _parts(x, form)]
    total: Any = 0.0
    scale, *zeros = (each.astype(jnp.float32)[:, None] for each in scales or [jnp.ones((1, 1))])
    for index in range(count):
        for part, own in zip(parts, _halves(rows[:, :, index], form)):
            own = own.astype(jnp.float32) - (zeros[0] if zeros else 0)
            total = total + part[..., index, None] * own
    # Apart, and by a product: XLA computes sums over rows slowly.
    total = jax.lax.optimization_barrier(total * scale)
    total = total.reshape(x.shape[0], cut // count, width)
    result = jnp.einsum("g,bgn->bn", jnp.ones(total.shape[1]), total)
    if cut < integers.shape[0]:
        result = result + x[:, cut:] @ integers[cut:].astype(jnp.float32)
    return result


def _row_by_row(x: Array, stored: Sequence[Any], form: Form) -> Any:
    """Sums rows of a matrix in one loop over its columns, which writes no numbers out."""
    integers, *scales = stored
    parts = _parts(x, form)
    count = _AT_ONCE // len(parts)
    of_group = GROUP // len(parts)

    def step(total: Array, row: Array) -> tuple[Any, None]:
        own = jax.lax.dynamic_slice_in_dim(integers, row, count)
        by_group = [jax.lax.dynamic_slice_in_dim(each, row // of_group, 1) for each in scales]
        scale, *zeros = (each.astype(jnp.float32) for each in by_group or [jnp.ones(())])
        product: Any = 0.0
        for part, numbers in zip(parts, _halves(own, form)):
            numbers = numbers.astype(jnp.float32) - (zeros[0] if zeros else 0)
            some = jax.lax.dynamic_slice_in_dim(part, row, count, 1)
            for index in range(count):
                product = product + some[:, index : index + 1] * numbers[index : index + 1]
        return total + product * scale, None

    size = integers.shape[0]
    cut = size // count * count
    total = jnp.zeros((x.shape[0], integers.shape[1]), jnp.float32)
    if cut:
        total = jax.lax.scan(step, total, jnp.arange(0, cut, count))[0]
    rest = integers[cut:].astype(jnp.float32)  # groups leave none
    return total + x[:, cut:] @ rest if cut < size else total


def _parts(x: Array, form: Form) -> list[Any]:
    if form.bits == 8:
        return [x]
    apart = x.reshape(x.shape[0], -1, 2, GROUP // 2)
    return [apart[:, :, index].reshape(x.shape[0], -1) for index in (0, 1)]


def _halves(integers: Array, form: Form) -> tuple[Any, ...]:
    return low_and_high(integers) if form.bits == 4 else (integers,)


def _of_columns(x: Array, stored: Sequence[Any], form: Form, first: ArrayLike, width: int) -> Any:
    size = x.shape[-1]
    block = _block(size, width, x.shape[0])

    def product(row: ArrayLike, count: int) -> Any:
        own = []
        for each in stored:
            fewer = size // each.shape[0]  # packed integers, and scales of groups
            chunk = (count // fewer, width)
            own.append(jax.lax.dynamic_slice(each, (row // fewer, first), chunk))
        return _times_block(jax.lax.dynamic_slice_in_dim(x, row, count, 1), own, form)

    if size <= block:
        return product(0, size)
    cut = size // block * block
    start = jnp.zeros((x.shape[0], width), jnp.float32)
    step = lambda total, row: (total + product(row, block), None)  # noqa: E731
    total = jax.lax.scan(step, start, jnp.arange(0, cut, block))[0]
    return total + product(cut, size - cut) if size > cut else total


def _times_block(x: Array, stored: Sequence[Any], form: Form) -> Any:
    """The product with rows ``[k, n]`` of a matrix, or ``[n, k]`` where groups are along ``k``."""
    integers, *scales = stored
    if form.group is None:
        return x @ integers.astype(jnp.float32)
    scales = [each.astype(jnp.float32) for each in scales]
    parts, numbers = _parts(x, form), _halves(integers, form)  # products of half the length
    of_group = GROUP // len(parts)
    by_group, *zeros = (_each_of_group(each, form.axis, of_group) for each in scales)
    result = None
    for part, own in zip(parts, numbers):
        own = own.astype(jnp.float32)
        own = (own - zeros[0] if zeros else own) * by_group
        product = plain_dot(part, own, form.axis)
        result = product if result is None else result + product
    return result


def _each_of_group(scales: Array, axis: int, size: int) -> Any:
    index = scales.ndim + axis + 1
    wide = jnp.broadcast_to(
        jnp.expand_dims(scales, index), (*scales.shape[:index], size, *scales.shape[index:])
    )
    if axis == -2:
        return wide.reshape(-1, scales.shape[1])
    # Written out: in a loop over elements XLA would divide for each of them.
    return jax.lax.optimization_barrier(wide.reshape(scales.shape[0], -1))


def _times_table_row(
    x: Array, integers: Array, scales: Sequence[Any], form: Form, lanes: int
) -> Any:
    """One row times each row of a table: sums of neighbors that are ``lanes`` apart, and of these.

    Like `_by_groups`, it is a loop for all cores.
    """
    scale, *zeros = (each.astype(jnp.float32) for each in scales)
    total: Any = 0.0
    for index, numbers in enumerate(x.reshape(integers.shape[1] // lanes, -1, lanes)):
        of_group = slice(index, index + 1) if form.group else slice(None)
        product: Any = 0.0
        for some, own in zip(
            numbers, _halves(integers[:, index * lanes : (index + 1) * lanes], form)
        ):
            own = own.astype(jnp.float32)
            product = product + (own - zeros[0][:, of_group] if zeros else own) * some
        total = total + (product * scale[:, of_group] if form.group else product)
    # A product: jax 0.10 computes a sum of lanes ten times as slowly.
    result = (jax.lax.optimization_barrier(total) @ jnp.ones(lanes))[None]
    return result if form.group else result * scale.T


def _lanes(size: int, form: Form) -> int | None:
    """Returns how many integers of a row are neighbors in a loop with at most 64 steps, or None."""
    if form.group is not None:
        return GROUP * form.bits // 8
    fitting = (lanes for lanes in range(16, 129, 16) if size % lanes == 0)
    return next((lanes for lanes in fitting if size // lanes <= 64), None)


def _over_outputs(x: Array, integers: Array, scales: Sequence[Any], form: Form) -> Any:
    """The products of each block of outputs, one after the other."""
    lanes = _lanes(integers.shape[1], form) if x.shape[0] == 1 else None
    if lanes is not None:
        return _times_table_row(x, integers, scales, form, lanes)
    size = integers.shape[0]
    block = _block(size, x.shape[-1], x.shape[0])
    count = size // block

    def multiplied(numbers: Sequence[Array]) -> Any:
        if form.group is None:
            own, of_own = numbers
            return (x @ own.astype(jnp.float32).T) * of_own.astype(jnp.float32).T
        return _times_block(x, numbers, form)

    stored = (integers, *scales)
    if count < 2:
        return multiplied(stored)
    cut = block * count

    def blocks(array: Array) -> Any:
        return array[:cut].reshape(count, block, array.shape[1])

    result = jax.lax.map(multiplied, tuple(map(blocks, stored)))
    result = result.transpose(1, 0, 2).reshape(-1, cut)
    if cut == size:
        return result
    return jnp.concatenate([result, multiplied([each[cut:] for each in stored])], 1)
