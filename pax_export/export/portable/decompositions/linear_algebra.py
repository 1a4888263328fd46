"""Matrix factorizations and solvers, by loops over columns or rows.

Shapes: a matrix is [..., rows, columns]; loops run over the last two axes and broadcast over
the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from pax_export._foundations.types import Array, DTypeLike, Size
from pax_export.export.portable.decompositions import NotDecomposedError, decomposes
from pax_export.precision import quantized


def transposed(x: Array) -> Any:
    return jnp.swapaxes(x, -1, -2)


def require_static(matrix: Array) -> None:
    """Refuses matrices with a symbolic number of rows or columns."""
    if not all(isinstance(size, int) for size in matrix.shape[-2:]):
        raise NotDecomposedError("of matrices of symbolic size")


def _row(matrix: Array, index: Array | int) -> Any:
    return lax.dynamic_index_in_dim(matrix, index, matrix.ndim - 2, keepdims=False)


def _column(matrix: Array, index: Array | int) -> Any:
    return lax.dynamic_index_in_dim(matrix, index, matrix.ndim - 1, keepdims=False)


def _entry(vector: Array, index: Array | int) -> Any:
    """Returns one element of each vector, as an axis of size 1."""
    return lax.dynamic_index_in_dim(vector, index, vector.ndim - 1, keepdims=True)


def _loop(count: Size, step: Callable[..., Any], start: Any) -> Any:
    """A loop over columns; without any, its body would have no column to read."""
    return start if isinstance(count, int) and count == 0 else lax.fori_loop(0, count, step, start)


@decomposes("cholesky", any_dtype=True)
def cholesky(a: Array, **_: object) -> Any:
    """Column by column, from the lower half; NaN where the matrix is not positive definite."""
    positions = jnp.arange(a.shape[-1])

    def step(j: Array, lower: Array) -> Any:
        column = _column(a, j) - (lower * jnp.conj(_row(lower, j))[..., None, :]).sum(-1)
        pivot = jnp.sqrt(_entry(column, j).real)
        column = jnp.where(positions >= j, column / pivot, 0)
        return jnp.where(positions == j, column[..., None], lower)

    lower = _loop(a.shape[-1], step, jnp.zeros_like(a))
    failed = jnp.isnan(jnp.diagonal(lower, axis1=-2, axis2=-1)).any(-1)
    return jnp.where(failed[..., None, None], jnp.nan, lower)


@decomposes("triangular_solve", any_dtype=True)
def triangular_solve(
    a: Array,
    b: Array,
    *,
    left_side: bool,
    lower: bool,
    transpose_a: bool,
    conjugate_a: bool,
    unit_diagonal: bool,
    **_: object,
) -> Any:
    a = jnp.conj(a) if conjugate_a else a
    if transpose_a:
        a, lower = transposed(a), not lower
    if left_side:
        return _substitute(a, b, lower, unit_diagonal)
    # x a = b is a' x' = b'
    return transposed(_substitute(transposed(a), transposed(b), not lower, unit_diagonal))


def _substitute(a: Array, b: Array, lower: bool, unit: bool) -> Any:
    """Forward substitution of a lower triangle, backward substitution of an upper one."""
    size = a.shape[-1]
    positions = jnp.arange(size)

    def step(count: Size, x: Array) -> Any:
        i = count if lower else size - 1 - count
        row = _row(a, i)
        known = jnp.where(positions < i if lower else positions > i, row, 0)
        rest = _row(b, i) - (known[..., :, None] * x).sum(-2)
        if not unit:
            rest = rest / _entry(row, i)
        return jnp.where((positions == i)[:, None], rest[..., None, :], x)

    return _loop(size, step, jnp.zeros_like(b))


@decomposes("lu", any_dtype=True)
def lu(a: Array, **_: object) -> tuple[Any, Any, Any]:
    """Factorizes with the largest element of each column as pivot."""
    rows, columns = a.shape[-2:]
    steps = rows if rows == columns else min(rows, columns)
    numbers, across = jnp.arange(rows), jnp.arange(columns)

    def step(j: Array, state: tuple[Array, ...]) -> Any:
        a, pivots, order = state
        column = _column(a, j)
        size = jnp.abs(column.real)
        size = size + jnp.abs(column.imag) if jnp.iscomplexobj(a) else size  # as in LAPACK
        size = jnp.where(numbers >= j, size, -1)
        pivot = jnp.argmax(size, -1).astype(jnp.int32)[..., None]
        pivots = jnp.where(jnp.arange(steps) == j, pivot, pivots)
        a = _exchanged(a, j, pivot, numbers)
        order = _exchanged(order[..., None], j, pivot, numbers)[..., 0]
        row, column = _row(a, j), _column(a, j)
        top = _entry(row, j)
        factors = jnp.where(numbers > j, column / jnp.where(top == 0, 1, top), 0)
        a = a - factors[..., :, None] * jnp.where(across > j, row, 0)[..., None, :]
        below = (numbers > j)[:, None] & (across == j)
        return jnp.where(below, factors[..., :, None], a), pivots, order

    pivots = jnp.zeros((*a.shape[:-2], steps), jnp.int32)
    order = jnp.broadcast_to(numbers.astype(jnp.int32), a.shape[:-1])
    return _loop(steps, step, (a, pivots, order))


def _exchanged(a: Array, j: Array, pivot: Array, numbers: Array) -> Any:
    """A matrix with row j and row `pivot` in each other's place."""
    is_pivot = (numbers == pivot)[..., None]
    here = lax.dynamic_index_in_dim(a, j, a.ndim - 2)
    there = jnp.where(is_pivot, a, 0).sum(-2, keepdims=True).astype(a.dtype)
    return jnp.where((numbers == j)[:, None], there, jnp.where(is_pivot, here, a))


@decomposes("lu_pivots_to_permutation")
def lu_pivots_to_permutation(pivots: Array, *, permutation_size: int) -> Any:
    """As jax indexes: negative pivots count from the end, and one beyond takes the last number."""
    numbers = jnp.arange(permutation_size, dtype=jnp.int32)

    def step(j: Array, order: Array) -> Any:
        pivot = _entry(pivots, j)
        pivot = jnp.where(pivot < 0, pivot + permutation_size, pivot)
        inside = jnp.clip(pivot, 0, permutation_size - 1)
        there = jnp.where(numbers == inside, order, 0).sum(-1, keepdims=True, dtype=order.dtype)
        exchanged = jnp.where(numbers == pivot, _entry(order, j), order)
        return jnp.where(numbers == j, there, exchanged)

    start = jnp.broadcast_to(numbers, (*pivots.shape[:-1], permutation_size))
    return _loop(pivots.shape[-1], step, start)


@decomposes("geqrf")
def geqrf(a: Array, **_: object) -> tuple[Any, Any]:
    """Householder reflections below the diagonal, and their factors, as LAPACK stores them."""
    require_static(a)
    rows, columns = a.shape[-2:]
    steps = min(rows, columns)
    numbers, across = jnp.arange(rows), jnp.arange(columns)

    def step(j: Array, state: tuple[Array, ...]) -> Any:
        a, taus = state
        column = _column(a, j)
        alpha = _entry(column, j)
        below = jnp.where(numbers > j, column, 0)
        norm = _norm(below)
        done = norm == 0
        beta = -jnp.where(alpha < 0, -1, 1) * _norm(jnp.concatenate([alpha, norm], -1))
        tau = jnp.where(done, 0, (beta - alpha) / jnp.where(done, 1, beta))
        vector = below / jnp.where(done, 1, alpha - beta)
        whole = jnp.where(numbers == j, 1, vector)
        seen = jnp.where(across > j, (whole[..., :, None] * a).sum(-2), 0)
        a = a - tau[..., None] * whole[..., :, None] * seen[..., None, :]
        new = jnp.where(numbers == j, jnp.where(done, alpha, beta), vector)
        new = jnp.where(numbers < j, column, new)
        a = jnp.where(across == j, new[..., :, None], a)
        return a, jnp.where(jnp.arange(steps) == j, tau, taus)

    taus = jnp.zeros((*a.shape[:-2], steps), a.dtype)
    return _loop(steps, step, (a, taus))


def _norm(vector: Array) -> Any:
    """The length of vectors; scaled, so that large and small numbers have finite squares."""
    largest = jnp.abs(vector).max(-1, keepdims=True)
    scale = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
    scaled = vector / scale
    return scale * jnp.sqrt((scaled * scaled).sum(-1, keepdims=True))


@decomposes("ormqr")
def ormqr(
    a: Array, taus: Array, c: Array, *, left: bool = True, transpose: bool = False, **_: object
) -> Any:
    """Multiplies by the reflections that `geqrf` stored, one by one, or by their transpose."""
    require_static(a)
    if not left:
        return transposed(ormqr(a, taus, transposed(c), transpose=not transpose))
    steps, numbers = taus.shape[-1], jnp.arange(a.shape[-2])

    def step(count: Size, product: Array) -> Any:
        j = count if transpose else steps - 1 - count
        vector = jnp.where(numbers > j, _column(a, j), jnp.where(numbers == j, 1, 0))
        vector = vector.astype(a.dtype)
        seen = (vector[..., :, None] * product).sum(-2)
        tau = _entry(taus, j)
        return product - tau[..., None] * vector[..., :, None] * seen[..., None, :]

    return _loop(steps, step, c)


@decomposes("householder_product")
def householder_product(a: Array, taus: Array, **_: object) -> Any:
    """The product of reflections that `geqrf` stored."""
    require_static(a)
    return ormqr(a, taus, jnp.broadcast_to(jnp.eye(*a.shape[-2:], dtype=a.dtype), a.shape))


@decomposes("qr")
def qr(
    a: Array, *, full_matrices: bool = False, pivoting: bool = False, **_: object
) -> tuple[Any, Any]:
    require_static(a)
    if pivoting:
        raise NotDecomposedError("with pivots")
    rows, columns = a.shape[-2:]
    reflectors, taus = geqrf(a)
    steps = rows if full_matrices else min(rows, columns)
    wide = reflectors[..., :steps]
    if steps > columns:
        wide = jnp.pad(wide, [(0, 0)] * (wide.ndim - 1) + [(0, steps - columns)])
    return householder_product(wide, taus), jnp.triu(reflectors)[..., :steps, :]


@decomposes("ragged_dot_general")
def ragged_dot_general(
    x: Array,
    y: Array,
    counts: Array,
    *,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
    preferred_element_type: DTypeLike | None = None,
    **_: object,
) -> Any:
    """Multiplies groups of rows by their own matrices: selects each row from all products."""
    numbers, plain = ragged_dot_dimension_numbers, (((1,), (1,)), ((), ()))
    dims = tuple(tuple(map(tuple, pair)) for pair in numbers.dot_dimension_numbers)
    rows = tuple(numbers.lhs_ragged_dimensions)
    if dims != plain or rows != (0,) or counts.ndim != 1:
        raise NotDecomposedError("in this arrangement")
    every = lax.dot_general(x, y, plain, preferred_element_type=preferred_element_type)
    ends = jnp.cumsum(counts)
    positions = jnp.arange(x.shape[0], dtype=counts.dtype)[:, None]
    mine = (positions >= ends - counts) & (positions < ends)
    return jnp.where(mine[..., None], every, 0).sum(1, dtype=every.dtype)


@decomposes("symmetric_product", any_dtype=True)
def symmetric_product(a: Array, c: Array, *, alpha: float, beta: float, **_: object) -> Any:
    return alpha * (a @ transposed(a)) + beta * c


@decomposes("cholesky_update")
def cholesky_update(r: Array, w: Array) -> Any:
    """Rotates the rows of an upper factor and a vector, one by one, as whole rows, as jax does."""
    numbers = jnp.arange(r.shape[-1])

    def step(j: Array, state: tuple[Array, ...]) -> Any:
        r, w = state
        row = lax.dynamic_slice_in_dim(r, j, 1, -2)[..., 0, :]
        here, other = _entry(row, j), _entry(w, j)
        length = _norm(jnp.concatenate([here, other], -1))
        divisor = jnp.where(length == 0, 1, length)
        cosine, sine = jnp.where(other == 0, 1, here / divisor), other / divisor
        turned, w = cosine * row + sine * w, cosine * w - sine * row
        return jnp.where(numbers[:, None] == j, turned[..., None, :], r), w

    return _loop(r.shape[-1], step, (r, w))[0]


@decomposes("tridiagonal_solve", any_dtype=True)
def tridiagonal_solve(low: Array, middle: Array, high: Array, b: Array, **_: object) -> Any:
    """Thomas' algorithm: eliminates the lower diagonal forwards, the upper one backwards."""
    rows = [jnp.moveaxis(each, -1, 0) for each in (low, middle, high)]
    right_sides = jnp.moveaxis(b, -2, 0)

    def forwards(state: tuple[Array, ...], row: tuple[Array, ...]) -> Any:
        ratio, x = state
        below, here, above, right = row
        pivot = here - below * ratio
        new = above / pivot, (right - below[..., None] * x) / pivot[..., None]
        return new, new

    def backwards(x: Array, row: tuple[Array, ...]) -> Any:
        ratio, right = row
        x = right - ratio[..., None] * x
        return x, x

    zero: Any = tuple(jnp.zeros(each.shape[1:], each.dtype) for each in (rows[0], right_sides))
    _, both = lax.scan(forwards, zero, (*rows, right_sides))
    _, found = lax.scan(backwards, zero[1], both, reverse=True)
    return jnp.moveaxis(found, 0, -2)


# --- products with quantized or narrow weights ------------------------------


decomposes("dequantize")(quantized.decomposed_dequantize)
decomposes("quantized_dot")(quantized.decomposed_dot)
decomposes("quantized_rows")(quantized.few_rows)
decomposes("round_inputs")(quantized.round_inputs)
decomposes("round_rows")(quantized.round_rows)
decomposes("bound_outputs")(quantized.unbounded)
decomposes("narrow_dot")(quantized.FASTER_IN_JAX["narrow_dot"])
decomposes("pointwise_convolution")(quantized.FASTER_IN_JAX["pointwise_convolution"])
