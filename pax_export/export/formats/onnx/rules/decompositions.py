"""Linear algebra that ONNX does not have, by loops of plain operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pax_export.export.formats.onnx.graph import Writer
from pax_export.export.formats.onnx.registry import Refused, rule
from pax_export.export.formats.onnx.values import Value, is_complex, is_number
from pax_export.export.formats.special import or_nan

Results = Sequence[Any]
#: After so many sweeps of rotations nothing is left to rotate, in float32 or float64.
_SWEEPS = 12


def _written(writer: Writer, function: Callable, *operands: Value) -> list[Any]:
    """A function of jax in place of an operation."""
    if any(is_complex(each.dtype) for each in operands):
        raise Refused("of complex numbers")
    structs = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in operands]
    return writer.inline(jax.make_jaxpr(function)(*structs), operands)


def _row(matrix: Any, index: Any) -> Any:
    return lax.dynamic_index_in_dim(matrix, index, matrix.ndim - 2, keepdims=False)


def _column(matrix: Any, index: Any) -> Any:
    return lax.dynamic_index_in_dim(matrix, index, matrix.ndim - 1, keepdims=False)


def _cholesky(a: Any) -> Any:
    """Column by column, as the rows before say."""
    places = jnp.arange(a.shape[-1])

    def step(j: Any, lower: Any) -> Any:
        product = jnp.einsum("...ij,...j->...i", lower, _row(lower, j))
        column = _column(a, j) - product
        top = lax.dynamic_index_in_dim(column, j, column.ndim - 1, keepdims=True)
        column = jnp.where(places >= j, column / jnp.sqrt(top), 0)
        return jnp.where(places == j, column[..., None], lower)

    return lax.fori_loop(0, a.shape[-1], step, jnp.zeros_like(a))


@rule("cholesky")
def cholesky(writer: Writer, results: Results, a: Value, **_: Any) -> list[Any]:
    return _written(writer, _cholesky, a)


def _turned(x: Any) -> Any:
    return jnp.swapaxes(x, -1, -2)


def _solve_lower(a: Any, b: Any, unit: bool) -> Any:
    places = jnp.arange(a.shape[-1])

    def step(i: Any, x: Any) -> Any:
        row = jnp.where(places < i, _row(a, i), 0)
        rest = _row(b, i) - jnp.einsum("...j,...jk->...k", row, x)
        if not unit:
            pivot = lax.dynamic_index_in_dim(_row(a, i), i, a.ndim - 2, keepdims=True)
            rest = rest / pivot
        return jnp.where((places == i)[:, None], rest[..., None, :], x)

    return lax.fori_loop(0, a.shape[-1], step, jnp.zeros_like(b))


@rule("triangular_solve")
def triangular_solve(
    writer: Writer,
    results: Results,
    a: Value,
    b: Value,
    *,
    left_side: bool,
    lower: bool,
    transpose_a: bool,
    unit_diagonal: bool,
    **_: Any,
) -> list[Any]:
    def solve(a: Any, b: Any) -> Any:
        is_lower = lower
        if not left_side:
            b = _turned(b)
        if transpose_a == left_side:
            a, is_lower = _turned(a), not lower
        if not is_lower:
            a, b = a[..., ::-1, ::-1], b[..., ::-1, :]
        x = _solve_lower(a, b, unit_diagonal)
        x = x if is_lower else x[..., ::-1, :]
        return x if left_side else _turned(x)

    return _written(writer, solve, a, b)


def _lu(a: Any) -> tuple[Any, Any, Any]:
    """With the largest of each column as its pivot."""
    height, width = a.shape[-2:]
    rows, columns = jnp.arange(height), jnp.arange(width)
    count = min(height, width)
    start = (
        a,
        jnp.zeros((*a.shape[:-2], count), jnp.int32),
        jnp.broadcast_to(rows.astype(jnp.int32), a.shape[:-1]),
    )

    def step(j: Any, state: Any) -> Any:
        a, pivots, order = state
        sizes = jnp.where(rows >= j, jnp.abs(_column(a, j)), -1)
        chosen = jnp.argmax(sizes, axis=-1).astype(rows.dtype)[..., None]
        swapped = jnp.where(rows == chosen, j, rows)
        swapped = jnp.where(rows == j, chosen, swapped)
        a = jnp.take_along_axis(a, swapped[..., None], axis=-2, mode="clip")
        order = jnp.take_along_axis(order, swapped, axis=-1, mode="clip")
        pivots = jnp.where(jnp.arange(count) == j, chosen.astype(jnp.int32), pivots)
        top, column = _row(a, j), _column(a, j)
        pivot = lax.dynamic_index_in_dim(top, j, top.ndim - 1, keepdims=True)
        factor = jnp.where(rows > j, column / jnp.where(pivot == 0, 1, pivot), 0)
        right = jnp.where(columns > j, top, 0)
        a = a - factor[..., :, None] * right[..., None, :]
        below = (rows > j)[:, None] & (columns == j)
        return jnp.where(below, factor[..., :, None], a), pivots, order

    return lax.fori_loop(0, count, step, start)


@rule("lu")
def lu(writer: Writer, results: Results, a: Value, **_: Any) -> list[Any]:
    if not all(map(is_number, a.shape[-2:])):
        raise Refused("of matrices of symbolic size")
    return _written(writer, _lu, a)


@rule("lu_pivots_to_permutation")
def lu_pivots_to_permutation(
    writer: Writer, results: Results, pivots: Value, *, permutation_size: Any
) -> list[Any]:
    if not is_number(permutation_size):
        raise Refused("of matrices of symbolic size")

    def permute(pivots: Any) -> Any:
        rows = jnp.arange(permutation_size, dtype=jnp.int32)

        def step(j: Any, order: Any) -> Any:
            chosen = lax.dynamic_index_in_dim(pivots, j, pivots.ndim - 1, keepdims=True)
            swapped = jnp.where(rows == chosen, j, rows)
            swapped = jnp.where(rows == j, chosen, swapped)
            return jnp.take_along_axis(order, swapped, axis=-1, mode="clip")

        start = jnp.broadcast_to(rows, (*pivots.shape[:-1], permutation_size))
        return lax.fori_loop(0, pivots.shape[-1], step, start)

    return _written(writer, permute, pivots)


def _qr(a: Any) -> tuple[Any, Any]:
    """By reflections, whose signs are those of LAPACK."""
    height, width = a.shape[-2:]
    rows = jnp.arange(height)
    q = jnp.broadcast_to(jnp.eye(height, dtype=a.dtype), (*a.shape[:-1], height))

    def step(j: Any, state: Any) -> Any:
        q, r = state
        column = jnp.where(rows >= j, _column(r, j), 0)
        alpha = lax.dynamic_index_in_dim(column, j, column.ndim - 1, keepdims=True)
        below = jnp.sum(jnp.where(rows > j, column, 0) ** 2, -1, keepdims=True)
        norm = jnp.sqrt(alpha**2 + below)
        beta = jnp.where(alpha >= 0, -norm, norm)
        v = column - jnp.where(rows == j, beta, 0)
        length = jnp.sum(v**2, -1, keepdims=True)
        skip = below == 0
        scaled = jnp.where(skip, 0, 2 / jnp.where(skip, 1, length)) * v
        r = r - v[..., :, None] * jnp.einsum("...i,...ij->...j", scaled, r)[..., None, :]
        q = q - jnp.einsum("...ij,...j->...i", q, v)[..., :, None] * scaled[..., None, :]
        return q, r

    return lax.fori_loop(0, min(height, width), step, (q, a))


@rule("qr")
def qr(
    writer: Writer,
    results: Results,
    a: Value,
    *,
    full_matrices: bool,
    pivoting: bool = False,
    **_: Any,
) -> list[Any]:
    if pivoting or not all(map(is_number, a.shape[-2:])):
        raise Refused("with pivots" if pivoting else "of matrices of symbolic size")

    def decompose(a: Any) -> Any:
        count = a.shape[-2] if full_matrices else min(a.shape[-2:])
        q, r = _qr(a)
        return q[..., :, :count], jnp.triu(r[..., :count, :])

    return _written(writer, decompose, a)


def _pairs(count: int) -> np.ndarray:
    """Rounds in which all numbers below a count meet in pairs: [rounds, pairs, 2]."""
    players = [*range(count), *([-1] if count % 2 else [])]
    rounds = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]))
        rounds.append([sorted(pair) for pair in pairs if -1 not in pair])
        players = [players[0], players[-1], *players[1:-1]]
    return np.array(rounds, np.int32).reshape(len(rounds), -1, 2)


def _rotation(pp: Any, qq: Any, pq: Any, one: Any, other: Any) -> Any:
    """The matrix that turns pairs so that nothing is left between the two of each."""
    none = pq == 0
    slope = (qq - pp) / jnp.where(none, 1, 2 * pq)
    sign = jnp.where(slope >= 0, 1, -1).astype(pp.dtype)
    tangent = jnp.where(none, 0, sign / (jnp.abs(slope) + jnp.sqrt(1 + slope**2)))
    cosine = 1 / jnp.sqrt(1 + tangent**2)
    sine = tangent * cosine
    kept = jnp.einsum("...k,ki,kj->...ij", cosine - 1, one, one)
    kept = kept + jnp.einsum("...k,ki,kj->...ij", cosine - 1, other, other)
    mixed = jnp.einsum("...k,ki,kj->...ij", sine, one, other)
    return jnp.eye(one.shape[-1], dtype=pp.dtype) + kept + mixed - _turned(mixed)


def _rounds(count: int) -> Any:
    return jnp.asarray(np.tile(_pairs(count), (_SWEEPS, 1, 1)))


def _chosen(pairs: Any, count: int, dtype: Any) -> tuple[Any, Any]:
    numbers = jnp.arange(count, dtype=pairs.dtype)
    hot = (pairs[..., None] == numbers).astype(dtype)
    return hot[:, 0], hot[:, 1]


def _eigh(a: Any) -> tuple[Any, Any]:
    """Jacobi's rotations, all pairs of a round at once."""
    count = a.shape[-1]

    def step(state: Any, pairs: Any) -> Any:
        a, vectors = state
        one, other = _chosen(pairs, count, a.dtype)
        pp, qq, pq = (
            jnp.einsum("ki,...ij,kj->...k", left, a, right)
            for left, right in ((one, one), (other, other), (one, other))
        )
        turn = _rotation(pp, qq, pq, one, other)
        return (_turned(turn) @ a @ turn, vectors @ turn), None

    eye = jnp.broadcast_to(jnp.eye(count, dtype=a.dtype), a.shape)
    if count > 1:
        (a, eye), _ = lax.scan(step, (a, eye), _rounds(count))
    values = jnp.einsum("...ii->...i", a)
    order = jnp.argsort(values, axis=-1)
    vectors = jnp.take_along_axis(eye, order[..., None, :], axis=-1, mode="clip")
    return vectors, jnp.take_along_axis(values, order, axis=-1, mode="clip")


@rule("eigh")
def eigh(
    writer: Writer, results: Results, a: Value, *, lower: bool, subset_by_index: Any, **_: Any
) -> list[Any]:
    if subset_by_index is not None or not all(map(is_number, a.shape[-2:])):
        raise Refused("of matrices of symbolic size, or in part")

    def decompose(a: Any) -> Any:
        half = jnp.tril(a) if lower else jnp.triu(a)
        edge = jnp.einsum("...ii->...i", a)[..., None] * jnp.eye(a.shape[-1], dtype=a.dtype)
        return or_nan(_eigh, half + _turned(half) - edge)

    return _written(writer, decompose, a)


def _svd(a: Any) -> tuple[Any, Any, Any]:
    """Rotations of the columns until they are orthogonal; their lengths are the values."""
    count = a.shape[-1]

    def step(state: Any, pairs: Any) -> Any:
        a, vectors = state
        one, other = _chosen(pairs, count, a.dtype)
        left, right = a @ one.T, a @ other.T
        pp, qq, pq = ((x * y).sum(-2) for x, y in ((left, left), (right, right), (left, right)))
        turn = _rotation(pp, qq, pq, one, other)
        return (a @ turn, vectors @ turn), None

    eye = jnp.broadcast_to(jnp.eye(count, dtype=a.dtype), (*a.shape[:-2], count, count))
    if count > 1:
        (a, eye), _ = lax.scan(step, (a, eye), _rounds(count))
    values = jnp.sqrt((a * a).sum(-2))
    order = jnp.argsort(-values, axis=-1)
    values = jnp.take_along_axis(values, order, axis=-1, mode="clip")
    a, eye = (
        jnp.take_along_axis(each, order[..., None, :], axis=-1, mode="clip") for each in (a, eye)
    )
    unit = a / jnp.where(values == 0, 1, values)[..., None, :]
    return values, unit, _turned(eye)


@rule("svd")
def svd(
    writer: Writer,
    results: Results,
    a: Value,
    *,
    full_matrices: bool,
    compute_uv: bool,
    subset_by_index: Any = None,
    **_: Any,
) -> list[Any]:
    if not all(map(is_number, a.shape[-2:])) or subset_by_index is not None:
        raise Refused("of matrices of symbolic size, or in part")
    height, width = a.shape[-2:]
    if compute_uv and full_matrices and height != width:
        raise Refused("with all vectors")

    def decompose(a: Any) -> Any:
        if height >= width:
            values, u, v = _svd(a)
        else:
            values, v, u = _svd(_turned(a))
            u, v = _turned(u), _turned(v)
        return (values, u, v) if compute_uv else (values,)

    return _written(writer, partial(or_nan, decompose), a)


@rule("tridiagonal_solve")
def tridiagonal_solve(
    writer: Writer, results: Results, low: Value, middle: Value, high: Value, b: Value, **_: Any
) -> list[Any]:
    """Thomas: forwards without the lower diagonal, and backwards without the upper."""

    def solve(low: Any, middle: Any, high: Any, b: Any) -> Any:
        rows = [jnp.moveaxis(each, -1, 0) for each in (low, middle, high)]
        given = jnp.moveaxis(b, -2, 0)

        def forwards(state: Any, row: Any) -> Any:
            ratio, x = state
            below, here, above, right = row
            pivot = here - below * ratio
            new = above / pivot, (right - below[..., None] * x) / pivot[..., None]
            return new, new

        def backwards(x: Any, row: Any) -> Any:
            ratio, right = row
            x = right - ratio[..., None] * x
            return x, x

        zero = jnp.zeros_like(rows[0][0]), jnp.zeros_like(given[0])
        _, both = lax.scan(forwards, zero, (*rows, given))
        _, found = lax.scan(backwards, jnp.zeros_like(given[0]), both, reverse=True)
        return jnp.moveaxis(found, 0, -2)

    return _written(writer, solve, low, middle, high, b)
