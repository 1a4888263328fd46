"""Three JAX primitives on integers and scales, which exporters write as their runtime's kernels.

Others use `dequantized` and an ordinary product. CPUs compute products in blocks of rows, which
reads the integers once; docs/decisions/quantization.md has the measurements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching

from pax_export._quantized._integers import GROUP, Form, dequantized, halves, scales_per_group
from pax_export._quantized._primitive import is_zero, primitive


def dequantize(*stored: Any, form: Form) -> Any:
    """Returns the array that integers, scales and optional zero points represent."""
    return _dequantize.bind(*stored, **form._asdict())


def quantized_dot(x: Any, *stored: Any, form: Form, contracted: int) -> Any:
    """``x [..., k]`` times a matrix, over its rows (-2) or its columns (-1)."""
    return _dot.bind(x, *stored, contracted=contracted, **form._asdict())


def quantized_rows(index: Any, *stored: Any, form: Form) -> Any:
    """Returns rows of a quantized table."""
    return _rows.bind(index, *stored, **form._asdict())


def plain_dot(x: Any, weight: Any, contracted: int) -> Any:
    """The same product of an ordinary matrix."""
    numbers = (((x.ndim - 1,), (weight.ndim + contracted,)), ((), ()))
    dtype = jnp.result_type(x, weight)
    return jax.lax.dot_general(x.astype(dtype), weight.astype(dtype), numbers)


def decomposed_dequantize(*stored: Any, **form: Any) -> Any:
    """`dequantize` in other operations of jax."""
    return dequantized(*stored, form=Form(**form))


def decomposed_dot(x: Any, *stored: Any, contracted: int, **form: Any) -> Any:
    """`quantized_dot` as an ordinary product with the dequantized array."""
    return plain_dot(x, dequantize(*stored, form=Form(**form)), contracted)


def _plain(x: Any, *stored: Any, contracted: int, **form: Any) -> Any:
    return plain_dot(x, dequantized(*stored, form=Form(**form)), contracted)


def _in_blocks(x: Any, integers: Any, *scales: Any, contracted: int, **form: Any) -> Any:
    return blockwise(x, integers, scales, Form(**form), contracted)


def few_rows(index: Any, *stored: Any, **form: Any) -> Any:
    """`quantized_rows` in ordinary operations: dequantizes only the selected rows."""
    return dequantized(*(each[index] for each in stored), form=Form(**form))


_dequantize = primitive("dequantize", decomposed_dequantize)
_dot = primitive("quantized_dot", _plain, _in_blocks)
_rows = primitive("quantized_rows", few_rows)


# --- under transforms -----------------------------------------------------------------
# All three are linear in x and in the scales; tangents are those of ordinary operations, which
# can be transposed.  Integers and zero points have none.


def _sum(*tangents: Any) -> Any:
    found = [each for each in tangents if each is not None]
    return functools.reduce(jnp.add, found)


def _jvp_of(
    primitive: Any, of_x: Callable[..., Any] | None, of_scales: Callable[..., Any], scales: int
) -> Callable[..., Any]:
    """Returns the JVP rule of an operation whose operand number `scales` has the scales."""

    def jvp(primals: Any, tangents: Any, **told: Any) -> tuple[Any, Any]:
        made = primitive.bind(*primals, **told)
        x_dot = None
        if of_x is not None and not is_zero(tangents[0]):
            x_dot = of_x(tangents[0], *primals[1:], **told)
        s_dot = None
        if not is_zero(tangents[scales]):
            others = (*primals[:scales], tangents[scales], *primals[scales + 1 :])
            s_dot = of_scales(*others, **told)
        if x_dot is None and s_dot is None:
            return made, jnp.zeros_like(made)
        return made, _sum(x_dot, s_dot).astype(made.dtype)

    return jvp


ad.primitive_jvps[_dequantize] = _jvp_of(_dequantize, None, decomposed_dequantize, 1)
ad.primitive_jvps[_dot] = _jvp_of(_dot, _plain, _plain, 2)
ad.primitive_jvps[_rows] = _jvp_of(_rows, None, few_rows, 2)


def _batched(primitive: Any, plain: Callable[..., Any], leading: bool) -> Callable[..., Any]:
    """The rule of `jax.vmap`: where only the first operand is mapped, one more leading axis."""

    def batch(operands: Any, axes: Any, **told: Any) -> tuple[Any, int]:
        of_first, *of_others = axes  # None: not mapped
        if leading and of_first is not None and set(of_others) == {None}:
            first = jnp.moveaxis(operands[0], axes[0], 0)
            return primitive.bind(first, *operands[1:], **told), 0
        if not leading and None not in axes:  # integers and scales of several arrays
            moved = [jnp.moveaxis(each, axis, 0) for each, axis in zip(operands, axes)]
            return primitive.bind(*moved, **told), 0
        return jax.vmap(functools.partial(plain, **told), axes)(*operands), 0

    return batch


batching.primitive_batchers[_dequantize] = _batched(_dequantize, decomposed_dequantize, False)
batching.primitive_batchers[_dot] = _batched(_dot, _plain, True)
batching.primitive_batchers[_rows] = _batched(_rows, few_rows, True)


#: The largest number of rows of an integer matrix multiplied at a time.
_LARGEST, _SMALLEST = 512, 192
#: The largest number of rows of inputs for which 4-bit outputs are computed in blocks, and the
#: size of a block.
_FEW, _SHORT = 4, 64


def blockwise(x: Any, integers: object, scales: Sequence[Any], form: Form, contracted: int) -> Any:
    """``x [..., k]`` times a matrix ``[k, n]`` (contracted -2) or ``[n, k]`` (-1).

    ``scales`` are the scales and the optional zero points.
    """
    dtype = jnp.result_type(x.dtype, form.dtype)
    flat = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    whole = form._replace(dtype="float32")
    if contracted == -2:
        made = _over_rows(flat, integers, scales, whole)
    else:
        made = _over_outputs(flat, integers, scales, whole)
    return made.reshape(*x.shape[:-1], made.shape[-1]).astype(dtype)


def _block(size: int) -> int:
    """Returns the rows per block: a divisor if there is a suitable one, in whole groups."""
    if size <= _LARGEST:
        return size
    fitting = [n for n in range(_LARGEST, _SMALLEST - 1, -GROUP) if size % n == 0]
    return fitting[0] if fitting else _LARGEST


def _over_rows(x: Any, integers: Any, scales: Sequence[Any], form: Form) -> Any:
    """Sums over blocks of the contracted axis."""
    size = x.shape[-1]
    block = _block(size)
    count = size // block
    by_column = form.group is None  # one scale per column: a factor of the whole sum
    groups = () if by_column else scales

    def rows(array: Any, first: int, several: int, of_each: int) -> Any:
        fewer = size // array.shape[0]  # packed integers, and scales of groups
        start, taken = first // fewer, several * of_each // fewer
        return array[start : start + taken].reshape(several, of_each // fewer, array.shape[1])

    def summed(first: int, several: int, of_each: int) -> Any:
        part = x[:, first : first + several * of_each].reshape(-1, several, of_each)
        parts = part.transpose(1, 0, 2)  # the data of one loop step are contiguous
        own = [rows(each, first, several, of_each) for each in (integers, *groups)]
        return _summed(parts, own, form)

    total = summed(0, count, block)
    if size % block:
        total = total + summed(block * count, 1, size % block)
    return total * scales[0].astype(jnp.float32) if by_column else total


def _summed(x: Any, stored: Sequence[Any], form: Form) -> Any:
    def step(total: object, given: Any) -> tuple[Any, None]:
        return total + _times_block(given[0], given[1], form), None

    if len(x) == 1:
        return _times_block(x[0], [each[0] for each in stored], form)
    zeros = jnp.zeros((x.shape[1], stored[0].shape[-1]), jnp.float32)
    return jax.lax.scan(step, zeros, (x, stored))[0]


def _times_block(x: Any, stored: Sequence[Any], form: Form) -> Any:
    """The product with rows ``[k, n]`` of a matrix, or ``[n, k]`` where groups are along ``k``."""
    integers, *scales = stored
    if form.bits != 4:
        if not scales:
            return x @ integers.astype(jnp.float32)
        numbers = dequantized(*stored, form=form)
        return x @ (numbers if form.axis == -2 else numbers.T)
    by_group, *zeros = (scales_per_group(each.astype(jnp.float32), form.axis) for each in scales)
    apart = x.reshape(x.shape[0], -1, 2, GROUP // 2)
    made = None
    for place, half in enumerate(halves(integers, form.axis)):
        numbers = half.astype(jnp.float32)
        numbers = (numbers - zeros[0] if zeros else numbers) * by_group
        if form.axis == -2:
            matrix = numbers.reshape(-1, numbers.shape[-1])
        else:
            matrix = numbers.reshape(numbers.shape[0], -1).T
        part = apart[:, :, place].reshape(x.shape[0], -1) @ matrix
        made = part if made is None else made + part
    return made


def _sums_of_groups(x: Any, stored: Sequence[Any], form: Form) -> Any:
    """The product with rows ``[n, k]`` of 4 bits: a sum for each group, and then its scale."""
    integers, *scales = stored
    by_group, *zeros = (each.astype(jnp.float32).T[:, None] for each in scales)
    apart = x.reshape(x.shape[0], -1, 2, GROUP // 2).transpose(1, 0, 2, 3)
    numbers = (((2,), (2,)), ((0,), (1,)))
    parts = [
        jax.lax.dot_general(apart[:, :, place], half.astype(jnp.float32), numbers)
        for place, half in enumerate(halves(integers, form.axis))
    ]
    sums = parts[0] + parts[1]
    for each in zeros:
        sums = sums - apart.sum((2, 3))[:, :, None] * each
    return (sums * by_group).sum(0)


def _over_outputs(x: Any, integers: Any, scales: Sequence[Any], form: Form) -> Any:
    """The products of each block of outputs, one after the other."""
    size = integers.shape[0]
    is_short = form.bits == 4 and x.shape[0] <= _FEW
    block = min(size, _SHORT) if is_short else _block(size)
    count = size // block

    def multiplied(given: Any) -> Any:
        if is_short:
            return _sums_of_groups(x, given, form)
        if form.group is None:
            own, of_own = given
            return (x @ own.astype(jnp.float32).T) * of_own.astype(jnp.float32).T
        return _times_block(x, given, form)

    stored = (integers, *scales)
    if count < 2:
        return multiplied(stored)
    cut = block * count

    def blocks(array: Any) -> Any:
        return array[:cut].reshape(count, block, array.shape[1])

    made = jax.lax.map(multiplied, tuple(map(blocks, stored)))
    made = made.transpose(1, 0, 2).reshape(-1, cut)
    if cut == size:
        return made
    return jnp.concatenate([made, multiplied([each[cut:] for each in stored])], 1)
