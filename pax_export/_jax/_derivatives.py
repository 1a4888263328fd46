"""Derivatives of operations for which jax's own rules compare sizes that are symbolic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.interpreters import ad
from jax.lax import linalg


def derivative_rules() -> Iterator[tuple[Any, Any, Any]]:
    """For derivatives of products, cumulative reductions and triangular systems.

    jax's rules look at sizes for that: which of two is larger, or whether anything is left to
    multiply.  Where these are symbolic, other rules say the same without; elsewhere jax's hold.
    """
    for primitive, rule in _RULES.items():
        first = ad.primitive_jvps[primitive]
        yield ad.primitive_jvps, primitive, partial(_where_symbolic, first, rule)


def _where_symbolic(
    first: Callable, rule: Callable, primals: Sequence[Any], tangents: Any, **options: Any
) -> Any:
    static = all(isinstance(size, int) for value in primals for size in value.shape)
    return (first if static else rule)(primals, tangents, **options)


def _product(primals: Any, tangents: Any, *, axes: Sequence[int], **_: Any) -> Any:
    def product(values: Any) -> Any:
        for axis in sorted(axes, reverse=True):
            along = _along_static if isinstance(values.shape[axis], int) else _along_symbolic
            values = along(values, axis)
        return values

    return jax.jvp(product, tuple(primals), tuple(tangents))


def _along_static(values: Any, axis: int) -> Any:
    """By halves, so that the gradient is as exact as the product."""
    size = values.shape[axis]
    if size == 0:
        shape = [each for place, each in enumerate(values.shape) if place != axis]
        return lax.full(shape, 1, values.dtype)
    while size > 1:
        half = size // 2
        rest = [lax.slice_in_dim(values, 2 * half, size, axis=axis)] if size % 2 else []
        pair = (lax.slice_in_dim(values, start, start + half, axis=axis) for start in (0, half))
        values = lax.concatenate([lax.mul(*pair), *rest], axis) if rest else lax.mul(*pair)
        size = half + size % 2
    return lax.squeeze(values, (axis,))


def _along_symbolic(values: Any, axis: int) -> Any:
    """One after the other: a loop is the only thing of a size that is not known."""
    ordered = jax.numpy.moveaxis(values, axis, 0)
    start = lax.full(ordered.shape[1:], 1, values.dtype)
    return lax.scan(lambda sofar, each: (sofar * each, None), start, ordered)[0]


def _cumulative(
    primals: Any, tangents: Any, *, axis: int, reverse: bool, combine: Callable, first: float
) -> Any:
    """One after the other, for the same reason; of integers there is no derivative."""

    def reduce(values: Any) -> Any:
        ordered = jax.numpy.moveaxis(values, axis, 0)
        start = lax.full(ordered.shape[1:], first, values.dtype)

        def step(sofar: Any, each: Any) -> tuple[Any, Any]:
            new = combine(sofar, each)
            return new, new

        return jax.numpy.moveaxis(lax.scan(step, start, ordered, reverse=reverse)[1], 0, axis)

    return jax.jvp(reduce, tuple(primals), tuple(tangents))


def _triangular(
    primals: Any,
    tangents: Any,
    *,
    left_side: bool,
    lower: bool,
    transpose_a: bool,
    conjugate_a: bool,
    unit_diagonal: bool,
) -> Any:
    """With X' = inverse(A) (B' - A' X), whichever of the sizes is larger."""
    (matrix, given), (of_matrix, of_given) = primals, tangents
    solve = partial(
        linalg.triangular_solve,
        matrix,
        left_side=left_side,
        lower=lower,
        transpose_a=transpose_a,
        conjugate_a=conjugate_a,
        unit_diagonal=unit_diagonal,
    )
    solution, changes = solve(given), []
    if type(of_matrix) is not ad.Zero:
        rows, columns = (
            lax.broadcasted_iota("int32", of_matrix.shape, of_matrix.ndim - back) for back in (2, 1)
        )
        apart = (rows - columns) if lower else (columns - rows)
        change = jax.numpy.where(apart >= int(unit_diagonal), of_matrix, 0)
        change = jax.numpy.swapaxes(change, -1, -2) if transpose_a else change
        change = jax.numpy.conj(change) if conjugate_a else change
        pair = (change, solution) if left_side else (solution, change)
        changes.append(solve(-jax.numpy.matmul(*pair, precision=lax.Precision.HIGHEST)))
    if type(of_given) is not ad.Zero:
        changes.append(solve(of_given))
    return solution, sum(changes[1:], start=changes[0])


_RULES: Mapping[Any, Callable] = {
    lax.reduce_prod_p: _product,
    lax.cumprod_p: partial(_cumulative, combine=lax.mul, first=1.0),
    lax.cummax_p: partial(_cumulative, combine=lax.max, first=-jax.numpy.inf),
    lax.cummin_p: partial(_cumulative, combine=lax.min, first=jax.numpy.inf),
    lax.cumlogsumexp_p: partial(_cumulative, combine=jax.numpy.logaddexp, first=-jax.numpy.inf),
    linalg.triangular_solve_p: _triangular,
}
