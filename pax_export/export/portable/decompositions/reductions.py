"""Full reductions, by products and by custom functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pax_export._foundations.jaxpr import bind_equation, interpret
from pax_export.export.portable.decompositions.registry import decomposes

Arrays = tuple[Any, ...]
#: Up to this number, elements are combined in pairs; more, or an unknown number, in a loop.
_PAIRED = 4096


def _by_halves(name: str, combine: Callable[[Any, Any], Any], neutral: int) -> Callable[..., Any]:
    @decomposes(name, any_dtype=True)
    def reduce(x: Any, *, axes: Sequence[int], **_: Any) -> Any:
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


def of_truth_values(equation: Any) -> bool:
    return equation.invars[0].aval.dtype == jnp.bool_


reduce_prod = _by_halves("reduce_prod", lax.mul, 1)
_by_halves("reduce_and", lax.bitwise_and, -1)
_by_halves("reduce_or", lax.bitwise_or, 0)
_by_halves("reduce_xor", lax.bitwise_xor, 0)


@decomposes("reduce", any_dtype=True)
def reduce(*operands: Any, jaxpr: Any, dimensions: Sequence[int], **_: Any) -> Arrays:
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


def of_arrays(jaxpr: Any, rank: int, consts: Sequence[Any] = ()) -> Callable[..., Arrays]:
    """A function of two tuples of numbers, given as a program, as one of arrays of a rank."""

    def combine(one: Arrays, other: Arrays) -> Arrays:
        def of_numbers(*given: Any) -> Arrays:
            held = () if getattr(jaxpr, "consts", None) else consts
            return tuple(interpret(jaxpr, (*held, *given), bind_equation))

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
