"""Reductions of axes and of windows, cumulative operations, comparisons and sorting."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pax_export._foundations.jaxpr import bind_equation, interpret
from pax_export._foundations.types import (
    Array,
    Equation,
    Jaxpr,
    Primitive,
    Size,
    TracedProgram,
)
from pax_export.export.portable.decompositions import (
    NotDecomposedError,
    decomposes,
    greatest,
    least,
)
from pax_export.export.portable.decompositions.convolutions import is_padded_as_same
from pax_export.export.portable.kept import call
from pax_export.export.portable.program import is_static

Arrays = tuple[Any, ...]
#: Up to this number, elements are combined in pairs; more, or an unknown number, in a loop.
_PAIRED = 4096


def _by_halves(name: str, combine: Callable[[Any, Any], Any], neutral: int) -> Callable[..., Any]:
    @decomposes(name, any_dtype=True)
    def reduce(x: Array, *, axes: Sequence[int], **_: Any) -> Any:
        """By halves, so that a gradient is as exact as a product; a loop for an unknown size."""
        for axis in sorted(axes, reverse=True):
            rows = jnp.moveaxis(x, axis, 0)
            start = lax.full(rows.shape[1:], neutral, x.dtype)
            if not isinstance(rows.shape[0], int):
                x = lax.scan(lambda total, row: (combine(total, row), None), start, rows)[0]
            elif not rows.shape[0]:
                x = start
            else:
                (x,) = _paired((rows,), lambda one, other: (combine(one[0], other[0]),))
        return x

    return reduce


def of_truth_values(equation: Equation) -> bool:
    return equation.invars[0].aval.dtype == jnp.bool_


reduce_prod = _by_halves("reduce_prod", lax.mul, 1)
_by_halves("reduce_and", lax.bitwise_and, -1)
_by_halves("reduce_or", lax.bitwise_or, 0)
_by_halves("reduce_xor", lax.bitwise_xor, 0)


@decomposes("reduce", any_dtype=True)
def reduce(*operands: Array, jaxpr: Jaxpr, dimensions: Sequence[int], **_: Any) -> Arrays:
    """Reduces by any function of two arrays."""
    values, starts = operands[: len(operands) // 2], operands[len(operands) // 2 :]
    function = of_arrays(jaxpr, values[0].ndim - len(dimensions))
    rest = [axis for axis in range(values[0].ndim) if axis not in dimensions]
    shape = [values[0].shape[axis] for axis in rest]
    rows = tuple(jnp.transpose(x, (*dimensions, *rest)).reshape(-1, *shape) for x in values)
    begun = tuple(jnp.broadcast_to(start, shape) for start in starts)
    count = rows[0].shape[0]
    if not isinstance(count, int) or count > _PAIRED or not count:
        return lax.scan(lambda total, row: (function(total, row), None), begun, rows)[0]
    return function(begun, _paired(rows, of_arrays(jaxpr, len(shape) + 1)))


def of_arrays(jaxpr: TracedProgram, rank: int, consts: Sequence[Any] = ()) -> Callable[..., Arrays]:
    """A function of two tuples of numbers, given as a program, as one of arrays of a rank."""

    def combine(one: Arrays, other: Arrays) -> Arrays:
        def of_numbers(*numbers: Array) -> Arrays:
            constants = () if getattr(jaxpr, "consts", None) else consts
            return tuple(interpret(jaxpr, (*constants, *numbers), bind_equation))

        for _ in range(rank):
            of_numbers = jax.vmap(of_numbers)
        return of_numbers(*one, *other)

    return combine


def _paired(rows: Arrays, function: Callable[[Arrays, Arrays], Arrays]) -> Arrays:
    """Combines all rows by repeated pairs of neighbors."""
    count = rows[0].shape[0]
    while count > 1:
        half = count // 2
        joined = function(*(tuple(x[at : 2 * half : 2] for x in rows) for at in range(2)))
        if count % 2:
            joined = tuple(jnp.concatenate([x, y[-1:]]) for x, y in zip(joined, rows))
        rows, count = joined, count - half
    return tuple(x[0] for x in rows)


# --- Window reductions ---


def is_plain_window(equation: Equation) -> bool:
    """Whether windows of float32 have a static size, no dilation, and static or symbolic padding.

    Symbolic padding is that of ``"SAME"``, of a maximum.
    """
    params = equation.params
    sides = [side for pair in params["padding"] for side in pair]
    if equation.invars[0].aval.dtype != jnp.float32 or not is_static(
        (*params["window_dimensions"], *params["window_strides"])
    ):
        return False
    if not is_static(sides):
        return equation.primitive.name == "reduce_window_max" and is_padded_as_same(equation)
    gaps = (*params["base_dilation"], *params["window_dilation"])
    return all(gap == 1 for gap in gaps) and min(sides, default=0) >= 0


def _reduce_axes(
    arrays: Arrays,
    neutral: Arrays,
    combine: Callable[[Arrays, Arrays], Arrays],
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[Any, Any]],
    base_dilation: Sequence[int],
    window_dilation: Sequence[int],
) -> Arrays:
    """Reduces axis by axis, the last one first, in the order of a window's elements."""
    edges = [(low, high, gap - 1) for (low, high), gap in zip(padding, base_dilation)]
    arrays = tuple(lax.pad(x, zero, edges) for x, zero in zip(arrays, neutral))
    for axis, width in reversed(list(enumerate(window_dimensions))):
        if not isinstance(width, int):
            raise NotDecomposedError("with windows of symbolic size")
        step, apart = window_strides[axis], window_dilation[axis]
        if width > 1:
            arrays = _slid(arrays, combine, axis, width, apart, step)
        elif step > 1:
            arrays = _every(arrays, axis, 0, arrays[0].shape[axis], step)
    return arrays


def _slid(
    arrays: Arrays, combine: Callable[..., Any], axis: int, width: int, apart: int, step: int
) -> Arrays:
    """Windows along one axis; wide ones of windows of twice the width in each step."""
    size = arrays[0].shape[axis]
    count = size - (width - 1) * apart  # with a stride of 1
    is_wide = width > 4 and step < width
    if not is_wide and isinstance(count, int):
        last = (count - 1) // step * step + 1
        starts = range(0, width * apart, apart)
        return functools.reduce(
            combine, [_every(arrays, axis, at, at + last, step) for at in starts]
        )
    found: Any = None
    start, reach, length = 0, 1, size
    while True:
        if width & reach:
            piece = _every(arrays, axis, start, start + count, 1)
            found = piece if found is None else combine(found, piece)
            start += reach * apart
        if 2 * reach > width:
            break
        length = length - reach * apart
        left = _every(arrays, axis, 0, length, 1)
        right = _every(arrays, axis, reach * apart, reach * apart + length, 1)
        arrays, reach = combine(left, right), 2 * reach
    return found if step == 1 else _every(found, axis, 0, count, step)


def _every(arrays: Arrays, axis: int, start: int, stop: Size, step: int) -> Arrays:
    # Not `slice_in_dim`, which compares symbolic sizes with 0.
    shape = arrays[0].shape
    starts, stops, steps = [0] * len(shape), list(shape), [1] * len(shape)
    starts[axis], stops[axis], steps[axis] = start, stop, step
    return tuple(lax.slice(x, starts, stops, steps) for x in arrays)


def _pool(combine: Callable[[Any, Any], Any], neutral: Callable[[Any], Any]) -> Callable[..., Any]:
    def pool(x: Array, **window: Any) -> Any:
        def both(one: Arrays, other: Arrays) -> Arrays:
            return (combine(one[0], other[0]),)

        return _reduce_axes((x,), (neutral(x.dtype),), both, **window)[0]

    return pool


decomposes("reduce_window_sum", single=True, any_dtype=True)(
    _pool(lax.add, lambda dtype: jnp.zeros((), dtype))
)
decomposes("reduce_window_max")(_pool(lax.max, least))
decomposes("reduce_window_min")(_pool(lax.min, greatest))


@decomposes("reduce_window")
def reduce_window(
    *operands: Array, jaxpr: TracedProgram, consts: Sequence[Array] = (), **window: Any
) -> Arrays:
    """Reduces windows by any function of two arrays.

    A window begins with the start, which need not be neutral; so padding has no part in it.
    """
    values, starts = operands[: len(operands) // 2], operands[len(operands) // 2 :]
    function = of_arrays(jaxpr, values[0].ndim, consts)

    def both(one: Arrays, other: Arrays) -> Arrays:
        (*first, is_first), (*second, is_second) = one, other
        joined = function(tuple(first), tuple(second))
        chosen = (
            jnp.where(is_first, jnp.where(is_second, new, left), right)
            for new, left, right in zip(joined, first, second)
        )
        return (*chosen, is_first | is_second)

    arrays = (*values, jnp.ones(values[0].shape, bool))
    *found, some = _reduce_axes(arrays, (*starts, jnp.array(False)), both, **window)
    begun = [jnp.broadcast_to(start, each.shape) for start, each in zip(starts, found)]
    return both((*begun, jnp.ones_like(some)), (*found, some))[:-1]


def _selecting(
    select_prim: Primitive,
) -> tuple[Callable[[Arrays, Arrays], Arrays], Callable[..., Any]]:
    """Selects one of two by its first array; the earlier one of ties."""

    def select(one: Arrays, other: Arrays) -> Arrays:
        is_first = select_prim.bind(one[0], other[0])
        return tuple(jnp.where(is_first, left, right) for left, right in zip(one, other))

    return select, least if select_prim.name == "ge" else greatest


@decomposes("select_and_gather_add")
def select_and_gather_add(
    tangents: Array, operand: Array, *, select_prim: Primitive, **window: Any
) -> Any:
    """The tangent at the place of each window that is selected."""
    select, neutral = _selecting(select_prim)
    zeros = (neutral(operand.dtype), jnp.zeros((), tangents.dtype))
    return _reduce_axes((operand, tangents), zeros, select, **window)[1]


@decomposes("select_and_scatter_add")
def select_and_scatter_add(
    source: Array,
    operand: Array,
    *,
    select_prim: Primitive,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[Any, Any]],
    **_: object,
) -> Any:
    """Adds each number of the source at the place of its window that is selected."""
    select, neutral = _selecting(select_prim)
    edges = [(low, high, 0) for low, high in padding]
    wide = lax.pad(operand, neutral(operand.dtype), edges)
    count = math.prod(wide.shape)
    positions = lax.iota(jnp.int32, count).reshape(wide.shape)
    once, none = (1,) * wide.ndim, ((0, 0),) * wide.ndim
    zeros = (neutral(operand.dtype), jnp.int32(0))
    window = (window_dimensions, window_strides, none, once, once)
    _, chosen = _reduce_axes((wide, positions), zeros, select, *window)
    at = chosen.reshape(-1)
    if source.dtype == jnp.bool_:
        found = jnp.zeros(count, jnp.int32).at[at].max(source.reshape(-1).astype(jnp.int32)) != 0
    else:
        found = jnp.zeros(count, source.dtype).at[at].add(source.reshape(-1))
    inside = [(-low, -high, 0) for low, high in padding]
    return lax.pad(found.reshape(wide.shape), jnp.zeros((), source.dtype), inside)


# --- cumulative operations --------------------------------------------------


#: Up to this number, elements are combined by doubling; more, or an unknown number, in a loop.
_DOUBLED = 4096


def _accumulated(
    combine: Callable[[Any, Any], Any], neutral: Callable[[Any], Any]
) -> Callable[..., Any]:
    def accumulate(x: Array, *, axis: int, reverse: bool) -> Any:
        size = x.shape[axis]
        if not isinstance(size, int) or size > _DOUBLED:
            return by_loop(x, axis, reverse, combine, neutral(x.dtype))
        apart = 1
        while apart < size:
            edges = [(0, 0, 0)] * x.ndim
            edges[axis] = (-apart, apart, 0) if reverse else (apart, -apart, 0)
            x = combine(x, lax.pad(x, neutral(x.dtype), edges))
            apart *= 2
        return x

    return accumulate


def by_loop(x: Array, axis: int, reverse: bool, combine: Callable[..., Any], neutral: Array) -> Any:
    """Accumulates the elements one by one."""
    rows = jnp.moveaxis(x, axis, 0)

    def step(total: Array, row: Array) -> Any:
        total = combine(total, row)
        return total, total

    start = jnp.full(rows.shape[1:], neutral, x.dtype)
    return jnp.moveaxis(lax.scan(step, start, rows, reverse=reverse)[1], 0, axis)


def _log_sum(x: Array, y: Array) -> Any:
    # Infinities of the same sign have no difference.
    apart = jnp.where(x == y, 0, -jnp.abs(x - y))
    return lax.max(x, y) + jnp.log(jnp.exp(apart) + 1)


_product = _accumulated(lax.mul, lambda dtype: jnp.ones((), dtype))
decomposes("cumprod", single=True, any_dtype=True)(_product)
decomposes("cummax")(_accumulated(lax.max, least))
decomposes("cummin")(_accumulated(lax.min, greatest))
decomposes("cumlogsumexp", single=True)(_accumulated(_log_sum, least))


# --- The order of numbers ---


_UNSIGNED = (np.uint32, np.uint64)
#: Primitives that depend on the order of numbers, and return some of them.
_COMPARISONS = "lt le gt ge argmax argmin".split()
_EXTREMES = "max min".split()


def has_order(equation: Equation) -> bool:
    """Whether targets compare the operands of an equation as they are.

    They store unsigned integers of 32 and 64 bits as signed ones of the same bits, which have
    another order, and do not compare booleans.
    """
    name = equation.primitive.name
    if name not in _COMPARISONS and name not in _EXTREMES:
        return True
    return all(atom.aval.dtype not in (*_UNSIGNED, np.bool_) for atom in equation.invars)


def _with_sign(x: Array) -> Any:
    if x.dtype == np.bool_:
        return x.astype(np.int32)
    return ordered(x) if x.dtype in _UNSIGNED else x


def _by_order(name: str) -> None:
    @decomposes(name)
    def compare(*operands: Array, **parameters: Any) -> Any:
        return getattr(lax, f"{name}_p").bind(*map(_with_sign, operands), **parameters)


for _name in _COMPARISONS:
    _by_order(_name)


def _larger_or_smaller(
    name: str, of_truth: Callable[..., Any], of_numbers: Callable[..., Any]
) -> None:
    @decomposes(name)
    def choose(x: Array, y: Array) -> Any:
        if x.dtype == np.bool_:
            return of_truth(x, y)
        return unordered(of_numbers(ordered(x), ordered(y)))


_larger_or_smaller("max", lax.bitwise_or, lax.max)
_larger_or_smaller("min", lax.bitwise_and, lax.min)


def _reduction(name: str, reduce_truth: Any) -> None:
    @decomposes(name)
    def reduce(x: Array, *, axes: Sequence[int], **_: object) -> Any:
        """NaN if a number is, which operators do not promise."""
        if x.dtype == np.bool_ or not axes:
            return reduce_truth(x, axes) if axes else x
        found = call("extreme", _with_sign(x), axes=tuple(axes), largest=name == "reduce_max")
        if x.dtype in _UNSIGNED:
            return unordered(found)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return found
        return jnp.where(lax.reduce_or(x != x, axes), jnp.asarray(np.nan, x.dtype), found)


_reduction("reduce_max", lax.reduce_or)
_reduction("reduce_min", lax.reduce_and)


def _ranked(x: Array, axis: int, count: Size, largest: bool) -> Any:
    return call("rank", _with_sign(x), axis=axis, count=count, largest=largest)


@decomposes("sort")
def sort(*operands: Array, dimension: int, num_keys: int, **_: object) -> list[Any]:
    """Sorts by the last key first, with stable sorts."""
    order = None
    for key in reversed(operands[:num_keys]):
        if order is not None:
            key = call("take_along", key, order, axis=dimension)
        found = _ranked(key, dimension, key.shape[dimension], largest=False)
        if order is not None:
            found = call("take_along", order, found, axis=dimension)
        order = found
    return [call("take_along", x, order, axis=dimension) for x in operands]


@decomposes("top_k")
def top_k(
    x: Array, *, k: Size, axis: int = -1, largest: bool = True, **_: object
) -> tuple[Any, Any]:
    axis %= x.ndim
    indices = _ranked(x, axis, k, largest)
    return call("take_along", x, indices, axis=axis), indices


@decomposes("approx_top_k")
def approx_top_k(
    x: Array, *, k: Size, reduction_dimension: int, is_max_k: bool, **parameters: Any
) -> tuple[Any, Any]:
    """Returns jax's result on CPUs: exact, in order, of as many elements as jax returns."""
    approximate = lax.approx_max_k if is_max_k else lax.approx_min_k
    found = functools.partial(
        approximate, k=k, reduction_dimension=reduction_dimension, **parameters
    )
    count = jax.eval_shape(found, x)[0].shape[reduction_dimension]
    return top_k(x, k=count, axis=reduction_dimension, largest=is_max_k)


def ordered(x: Array) -> Any:
    """Maps unsigned integers to signed ones in the same order."""
    first = jnp.array(1 << (8 * x.dtype.itemsize - 1), x.dtype)
    return lax.bitcast_convert_type(x ^ first, f"int{8 * x.dtype.itemsize}")


def unordered(x: Array) -> Any:
    """The inverse of `ordered`."""
    return lax.bitcast_convert_type(x ^ jnp.iinfo(x.dtype).min, f"u{x.dtype.name}")
