"""Decompositions of matrices, one column after the other, in functions of jax."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pax_export.export.formats.special import or_nan
from pax_export.export.formats.tflite.rule import NotInTfliteError, Operation, rule
from pax_export.export.formats.tflite.tensors import is_static


def _sized(op: Operation, symbolic: bool = False) -> None:
    if not symbolic and not all(map(is_static, op.operands[0].shape[-2:])):
        raise NotInTfliteError("the matrices must have sizes that are numbers.")
    if op.operands[0].dtype.name not in ("float32", "float16", "bfloat16"):
        raise NotInTfliteError(f"it decomposes no matrices of {op.operands[0].dtype.name}.")


def _structs(op: Operation) -> list[Any]:
    return [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in op.operands]


@rule("cholesky")
def cholesky(op: Operation, x: Any) -> Any:
    _sized(op, symbolic=True)
    return op.call(_cholesky, _structs(op), [x])


def _cholesky(matrix: Any) -> Any:
    size = matrix.shape[-1]
    numbers = jnp.arange(size)

    def column(j: Any, made: Any) -> Any:
        row = lax.dynamic_index_in_dim(made, j, -2, keepdims=False)
        rest = lax.dynamic_index_in_dim(matrix, j, -1, keepdims=False)
        rest = rest - (made * row[..., None, :]).sum(-1)
        pivot = jnp.sqrt(lax.dynamic_index_in_dim(rest, j, -1))
        new = jnp.where(numbers >= j, rest / pivot, jnp.zeros_like(rest))
        return jnp.where(numbers == j, new[..., :, None], made)

    # As LAPACK does it, from the lower half.
    return lax.fori_loop(0, size, column, jnp.zeros_like(matrix))


@rule("triangular_solve")
def triangular_solve(op: Operation, a: Any, b: Any) -> Any:
    _sized(op, symbolic=True)
    params = op.params

    def solve(a: Any, b: Any) -> Any:
        lower = params["lower"]
        if params["transpose_a"]:
            a, lower = jnp.swapaxes(a, -1, -2), not lower
        if not params["left_side"]:  # x a = b is a' x' = b'
            a, b, lower = jnp.swapaxes(a, -1, -2), jnp.swapaxes(b, -1, -2), not lower
        found = _solved(a, b, lower, params["unit_diagonal"])
        return found if params["left_side"] else jnp.swapaxes(found, -1, -2)

    return op.call(solve, _structs(op), [a, b])


def _solved(a: Any, b: Any, lower: bool, unit: bool) -> Any:
    size = a.shape[-1]
    numbers = jnp.arange(size)

    def row(step: Any, found: Any) -> Any:
        j = step if lower else size - 1 - step
        weights = lax.dynamic_index_in_dim(a, j, -2, keepdims=False)
        known = numbers < j if lower else numbers > j
        weights_known = jnp.where(known, weights, jnp.zeros_like(weights))
        rest = lax.dynamic_index_in_dim(b, j, -2, keepdims=False)
        rest = rest - (weights_known[..., :, None] * found).sum(-2)
        if not unit:
            rest = rest / lax.dynamic_index_in_dim(weights, j, -1)
        return jnp.where(numbers[:, None] == j, rest[..., None, :], found)

    return lax.fori_loop(0, size, row, jnp.zeros_like(b))


@rule("lu")
def lu(op: Operation, x: Any) -> Any:
    _sized(op, symbolic=True)
    return op.call(_lu, _structs(op), [x])


def _lu(matrix: Any) -> Any:
    rows, columns = matrix.shape[-2:]
    batch = matrix.shape[:-2]
    steps = rows if rows == columns else min(rows, columns)
    numbers, across = jnp.arange(rows), jnp.arange(columns)

    def step(j: Any, state: Any) -> Any:
        a, pivots, order = state
        column = lax.dynamic_index_in_dim(a, j, -1, keepdims=False)
        size = jnp.where(numbers >= j, jnp.abs(column), -1.0)
        pivot = jnp.argmax(size, -1).astype(jnp.int32)[..., None]
        pivots = jnp.where(jnp.arange(steps) == j, pivot, pivots)
        a = _exchanged(a, j, pivot, numbers)
        order = _exchanged(order[..., None], j, pivot, numbers)[..., 0]
        row = lax.dynamic_index_in_dim(a, j, -2, keepdims=False)
        column = lax.dynamic_index_in_dim(a, j, -1, keepdims=False)
        top = lax.dynamic_index_in_dim(row, j, -1)
        factors = jnp.where(numbers > j, column / jnp.where(top == 0, 1.0, top), 0.0)
        rest = jnp.where(across > j, row, jnp.zeros_like(row))
        a = a - factors[..., :, None] * rest[..., None, :]
        under = (numbers > j)[:, None] & (across == j)
        return jnp.where(under, factors[..., :, None], a), pivots, order

    pivots = jnp.zeros((*batch, steps), jnp.int32)
    order = jnp.broadcast_to(numbers.astype(jnp.int32), (*batch, rows))
    return lax.fori_loop(0, steps, step, (matrix, pivots, order))


def _exchanged(a: Any, j: Any, pivot: Any, numbers: Any) -> Any:
    """A matrix with row j and row `pivot` in each other's place."""
    is_pivot = (numbers == pivot)[..., None]
    here = lax.dynamic_index_in_dim(a, j, -2)
    there = jnp.where(is_pivot, a, jnp.zeros_like(a)).sum(-2, keepdims=True).astype(a.dtype)
    a = jnp.where(is_pivot, here, a)
    return jnp.where((numbers == j)[:, None], there, a)


@rule("lu_pivots_to_permutation")
def permutation(op: Operation, pivots: Any) -> Any:
    size = op.params["permutation_size"]

    def permute(pivots: Any) -> Any:
        numbers = jnp.arange(size, dtype=jnp.int32)
        start = jnp.broadcast_to(numbers, (*pivots.shape[:-1], size))

        def step(j: Any, order: Any) -> Any:
            pivot = lax.dynamic_index_in_dim(pivots, j, -1)
            return _exchanged(order[..., None], j, pivot, numbers)[..., 0]

        return lax.fori_loop(0, pivots.shape[-1], step, start)

    return op.call(permute, _structs(op), [pivots])


@rule("geqrf")
def geqrf(op: Operation, x: Any) -> Any:
    _sized(op)
    return op.call(_geqrf, _structs(op), [x])


def _geqrf(matrix: Any) -> Any:
    rows, columns = matrix.shape[-2:]
    steps = min(rows, columns)
    numbers, across = jnp.arange(rows), jnp.arange(columns)

    def step(j: Any, state: Any) -> Any:
        a, taus = state
        column = lax.dynamic_index_in_dim(a, j, -1, keepdims=False)
        alpha = lax.dynamic_index_in_dim(column, j, -1)
        below = jnp.where(numbers > j, column, jnp.zeros_like(column))
        norm = jnp.sqrt((below * below).sum(-1, keepdims=True))
        done = norm == 0
        beta = -jnp.where(alpha < 0, -1.0, 1.0) * jnp.sqrt(alpha * alpha + norm * norm)
        tau = jnp.where(done, 0.0, (beta - alpha) / jnp.where(done, 1.0, beta))
        vector = below / jnp.where(done, 1.0, alpha - beta)
        whole = jnp.where(numbers == j, 1.0, vector)
        seen = jnp.where(across > j, (whole[..., :, None] * a).sum(-2), 0.0)
        a = a - tau[..., None] * whole[..., :, None] * seen[..., None, :]
        new = jnp.where(numbers == j, jnp.where(done, alpha, beta), vector)
        new = jnp.where(numbers < j, column, new)
        a = jnp.where(across == j, new[..., :, None], a)
        return a, jnp.where(jnp.arange(steps) == j, tau, taus)

    taus = jnp.zeros((*matrix.shape[:-2], steps), matrix.dtype)
    return lax.fori_loop(0, steps, step, (matrix, taus))


@rule("householder_product")
def householder_product(op: Operation, x: Any, taus: Any) -> Any:
    _sized(op)
    return op.call(_householder_product, _structs(op), [x, taus])


def _householder_product(a: Any, taus: Any) -> Any:
    rows, columns = a.shape[-2:]
    steps = taus.shape[-1]
    numbers = jnp.arange(rows)
    whole = jnp.broadcast_to(jnp.eye(rows, columns, dtype=a.dtype), a.shape)

    def step(count: Any, made: Any) -> Any:
        j = steps - 1 - count
        column = lax.dynamic_index_in_dim(a, j, -1, keepdims=False)
        vector = jnp.where(numbers > j, column, jnp.where(numbers == j, 1.0, 0.0))
        tau = lax.dynamic_index_in_dim(taus, j, -1)
        seen = (vector[..., :, None] * made).sum(-2)
        return made - tau[..., None] * vector[..., :, None] * seen[..., None, :]

    return lax.fori_loop(0, steps, step, whole)


@rule("qr")
def qr(op: Operation, x: Any) -> Any:
    _sized(op)
    if op.params.get("pivoting"):
        raise NotInTfliteError("it has none with pivots.")
    complete = op.params.get("full_matrices", False)

    def decompose(matrix: Any) -> Any:
        rows, columns = matrix.shape[-2:]
        reflectors, taus = _geqrf(matrix)
        steps = rows if complete else min(rows, columns)
        upper = jnp.triu(reflectors)[..., :steps, :]
        wide = reflectors[..., :steps]
        if steps > columns:
            wide = jnp.pad(wide, [(0, 0)] * (wide.ndim - 1) + [(0, steps - columns)])
        return _householder_product(wide, taus), upper

    return op.call(decompose, _structs(op), [x])


@rule("eigh")
def eigh(op: Operation, x: Any) -> Any:
    _sized(op)
    vectors_first = len(op.results[0].shape) == len(op.operands[0].shape)
    lower = op.params.get("lower", True)

    def decompose(matrix: Any) -> Any:
        half = jnp.tril(matrix) if lower else jnp.swapaxes(jnp.triu(matrix), -1, -2)
        whole = half + jnp.swapaxes(jnp.tril(half, -1), -1, -2)
        values, vectors = or_nan(_eigh, whole)
        return (vectors, values) if vectors_first else (values, vectors)

    return op.call(decompose, _structs(op), [x])


#: After so many rounds nothing is left beside the diagonal, but rounding.
_ROUNDS = 8
#: Of a matrix and two of its axes, by ones at their places: what lies between, on the one, on
#: the other.
_Entries = Callable[[Any, Any, Any], tuple[Any, Any, Any]]


def _turned(matrix: Any, entries: _Entries, turn: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """Jacobi's method: a rotation for each pair of axes, again and again; and all of them as one.

    `turn` says what a rotation makes of the matrix.
    """
    size = matrix.shape[-1]
    unit = jnp.eye(size, dtype=matrix.dtype)
    pairs = jnp.array(
        [(p, q) for p in range(size) for q in range(p + 1, size)] or [(0, 0)], jnp.int32
    )
    numbers = jnp.arange(size)

    def rotate(step: Any, state: Any) -> Any:
        a, vectors = state
        pair = lax.dynamic_index_in_dim(pairs, lax.rem(step, pairs.shape[0]), 0, keepdims=False)
        p, q = (numbers == pair[0]).astype(a.dtype), (numbers == pair[1]).astype(a.dtype)
        off, left, right = entries(a, p, q)
        none = off == 0
        # Bounded, so that its square is finite.
        theta = jnp.clip((right - left) / (2 * jnp.where(none, 1.0, off)), -1e15, 1e15)
        root = jnp.abs(theta) + jnp.sqrt(theta * theta + 1)
        tangent = jnp.where(none, 0.0, jnp.where(theta < 0, -1.0, 1.0) / root)
        cosine = 1 / jnp.sqrt(tangent * tangent + 1)
        sine = tangent * cosine
        made = (cosine - 1)[..., None, None] * (p[:, None] * p + q[:, None] * q)
        made = made + sine[..., None, None] * (p[:, None] * q - q[:, None] * p)
        rotation = (unit + made).astype(a.dtype)
        return turn(a, rotation), vectors @ rotation

    count = _ROUNDS * pairs.shape[0] if size > 1 else 0
    start = (matrix, jnp.broadcast_to(unit, (*matrix.shape[:-2], size, size)))
    return lax.fori_loop(0, count, rotate, start)


def _eigh(matrix: Any) -> Any:
    def entries(a: Any, p: Any, q: Any) -> tuple[Any, Any, Any]:
        def entry(one: Any, other: Any) -> Any:
            return (a * one[:, None] * other).sum((-1, -2))

        return entry(p, q), entry(p, p), entry(q, q)

    a, vectors = _turned(matrix, entries, lambda a, turn: jnp.swapaxes(turn, -1, -2) @ a @ turn)
    values = jnp.diagonal(a, axis1=-2, axis2=-1)
    order = jnp.argsort(values, -1)
    sorted_vectors = jnp.take_along_axis(vectors, order[..., None, :], -1)
    return jnp.take_along_axis(values, order, -1), sorted_vectors


@rule("svd")
def svd(op: Operation, x: Any) -> Any:
    _sized(op)
    rows, columns = op.operands[0].shape[-2:]
    with_vectors = op.params.get("compute_uv", len(op.results) > 1)
    if op.params.get("full_matrices") and with_vectors and rows != columns:
        raise NotInTfliteError("only those without full matrices.")

    def decompose(matrix: Any) -> Any:
        turned = jnp.swapaxes(matrix, -1, -2) if rows < columns else matrix
        left, values, right = _svd(turned)
        if not with_vectors:
            return (values,)
        if rows < columns:
            left, right = right, left
        return values, left, jnp.swapaxes(right, -1, -2)

    return op.call(partial(or_nan, decompose), _structs(op), [x])


def _svd(matrix: Any) -> Any:
    """Rotations of pairs of columns until all are at right angles: exact for small values too."""

    def entries(a: Any, p: Any, q: Any) -> tuple[Any, Any, Any]:
        one, other = (a * p).sum(-1), (a * q).sum(-1)
        return (one * other).sum(-1), (one * one).sum(-1), (other * other).sum(-1)

    a, vectors = _turned(matrix, entries, lambda a, turn: a @ turn)
    values = jnp.sqrt((a * a).sum(-2))
    order = jnp.argsort(-values, -1)
    values = jnp.take_along_axis(values, order, -1)
    a = jnp.take_along_axis(a, order[..., None, :], -1)
    vectors = jnp.take_along_axis(vectors, order[..., None, :], -1)
    left = a / jnp.where(values == 0, 1.0, values)[..., None, :]
    return left, values, vectors
