"""Symmetric eigenvalues and singular values, by Jacobi rotations.

All pairs of a round are rotated at once. Rows and columns are ordered so that the first half is
paired with the second one, as in Brent and Luk; after a round all but the first move by one
position, so that after n - 1 rounds, a sweep, they are in order again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from pax_export._foundations.types import Array
from pax_export.export.portable.decompositions import NotDecomposedError, decomposes
from pax_export.export.portable.decompositions.linear_algebra import require_static, transposed

#: The number of sweeps until convergence, in float32 or float64.
_SWEEPS = 12


@decomposes("eigh", any_dtype=True)
def eigh(
    a: Array, *, lower: bool = True, subset_by_index: tuple[int, int] | None = None, **_: Any
) -> tuple[Any, Any]:
    """The vectors, and the values in ascending order."""
    require_static(a)
    if subset_by_index not in (None, (0, a.shape[-1])):
        raise NotDecomposedError("of some eigenvalues only")
    half = jnp.tril(a) if lower else jnp.triu(a)
    rest = jnp.tril(a, -1) if lower else jnp.triu(a, 1)
    whole = half + _adjoint(rest)
    if jnp.iscomplexobj(a):  # imaginary parts of the diagonal are not read
        whole = jnp.where(jnp.eye(a.shape[-1], dtype=bool), whole.real, whole)
    return _nan_unless_finite(_eigh, whole)


@decomposes("svd", any_dtype=True)
def svd(
    a: Array,
    *,
    full_matrices: bool,
    compute_uv: bool,
    subset_by_index: tuple[int, int] | None = None,
    **_: Any,
) -> tuple[Any, ...]:
    """The values in descending order; with vectors, those on the left and on the right too."""
    require_static(a)
    height, width = a.shape[-2:]
    if subset_by_index not in (None, (0, min(height, width))):
        raise NotDecomposedError("of some singular values only")

    def decompose(a: Array) -> tuple[Any, ...]:
        found = _svd(a if height >= width else _adjoint(a), full_matrices, compute_uv)
        if not compute_uv:
            return (found[0],)
        values, u, v = found
        return (values, u, _adjoint(v)) if height >= width else (values, v, _adjoint(u))

    return _nan_unless_finite(decompose, a)


def _adjoint(a: Array) -> Any:
    return transposed(jnp.conj(a) if jnp.iscomplexobj(a) else a)


def _nan_unless_finite(
    decompose: Callable[[Any], tuple[Any, ...]], matrix: Array
) -> tuple[Any, ...]:
    """Decomposes; all NaN for a matrix with NaN or infinity, as LAPACK's results are.

    Rotations would leave numbers among the NaN that look like any others.
    """
    finite = jnp.isfinite(matrix).all((-2, -1))[..., None]
    safe = jnp.where(finite[..., None], matrix, 0)
    factor = _factor(safe)
    found = decompose(safe * factor[..., None])
    return tuple(
        jnp.where(finite, each / factor, jnp.nan)  # values
        if each.ndim < matrix.ndim
        else jnp.where(finite[..., None], each, jnp.nan)
        for each in found
    )


def _factor(matrix: Array) -> Any:
    """Returns a power of two that keeps squares of the matrix finite and nonzero."""
    largest = jnp.abs(matrix).max((-2, -1), initial=0.0)[..., None]
    top = jnp.finfo(largest.dtype).maxexp
    far, near = 2.0 ** (top * 5 // 8), 2.0 ** (top * 5 // 16)
    small = (largest < 1 / near) & (largest > 0)
    return jnp.where(largest > near, 1 / far, jnp.where(small, far, 1.0)).astype(largest.dtype)


# --- rotations ----------------------------------------------------------------------


def _halves(x: Array, axis: int) -> tuple[Any, Any]:
    middle = x.shape[axis] // 2
    return lax.slice_in_dim(x, 0, middle, axis=axis), lax.slice_in_dim(x, middle, None, axis=axis)


def _rotate_pairs(one: Array, other: Array, axis: int) -> Any:
    """Joins two halves, with all but the first element rotated by one position."""

    def part(x: Array, start: int | None, stop: int | None) -> Any:
        return lax.slice_in_dim(x, start or 0, stop, axis=axis)

    if one.shape[axis] == 1:
        return jnp.concatenate([one, other], axis)
    first, last = part(one, 0, 1), part(one, one.shape[axis] - 1, None)
    middle, start = part(one, 1, one.shape[axis] - 1), part(other, 0, 1)
    return jnp.concatenate([first, start, middle, part(other, 1, None), last], axis)


def _turn(pp: Array, qq: Array, pq: Array) -> tuple[Any, Any]:
    """Returns cosines and sines of the rotations that zero the off-diagonal entries of pairs.

    The entries [..., pairs] are the two diagonal ones and the off-diagonal one.
    """
    size = jnp.abs(pq)
    none = size == 0
    # Bounded, so that its square is finite.
    slope = jnp.clip((qq - pp) / jnp.where(none, 1, 2 * size), -1e15, 1e15)
    sign = jnp.where(slope >= 0, 1, -1).astype(pp.dtype)
    tangent = jnp.where(none, 0, sign / (jnp.abs(slope) + jnp.sqrt(1 + slope**2)))
    cosine = 1 / jnp.sqrt(1 + tangent**2)
    return cosine, tangent * cosine * (pq / jnp.where(none, 1, size))


def _columns_turned(x: Array, cosine: Array, sine: Array) -> Any:
    """The product of a matrix and the rotations."""
    one, other = _halves(x, x.ndim - 1)
    cosine, sine = cosine[..., None, :], sine[..., None, :]
    return _rotate_pairs(
        one * cosine - other * jnp.conj(sine), one * sine + other * cosine, x.ndim - 1
    )


def _rotated(
    state: tuple[Array, ...], turn: Callable[[Any], tuple[Any, Any]], change: Callable[..., Any]
) -> Any:
    """Runs all rounds on a state whose last element, the vectors, has `count` columns."""
    count = state[-1].shape[-1]
    if count < 2:
        return state

    def step(state: tuple[Array, ...], _: object) -> Any:
        cosine, sine = turn(state)
        return change(state, cosine, sine), None

    return lax.scan(step, state, None, length=_SWEEPS * (count - 1))[0]


def _evened(a: Array, axes: int) -> Any:
    """Appends a zero column (and row) to an odd number of columns."""
    if a.shape[-1] % 2 == 0 or a.shape[-1] == 1:
        return a
    edges = [(0, 0, 0)] * (a.ndim - axes) + [(0, 1, 0)] * axes
    return lax.pad(a, jnp.zeros((), a.dtype), edges)


def _vectors(a: Array) -> Any:
    """Returns identity matrices for the columns of a matrix."""
    count = a.shape[-1]
    return jnp.broadcast_to(jnp.eye(count, dtype=a.dtype), (*a.shape[:-2], count, count))


def _unit_columns(a: Array) -> Any:
    return a / jnp.sqrt(_squares(a))[..., None, :]


def _squares(a: Any) -> Any:
    """The squared lengths of columns."""
    return (a.real * a.real + a.imag * a.imag if jnp.iscomplexobj(a) else a * a).sum(-2)


def _eigh(a: Array) -> tuple[Any, Any]:
    count = a.shape[-1]
    whole = _evened(a, 2)

    def diagonal(x: Array) -> Any:
        return (x * jnp.eye(x.shape[-1], dtype=x.dtype)).sum(-1)

    def turn(state: tuple[Array, ...]) -> tuple[Any, Any]:
        upper, lower = _halves(state[0], a.ndim - 2)
        (pp, pq), (_, qq) = _halves(upper, a.ndim - 1), _halves(lower, a.ndim - 1)
        return _turn(diagonal(pp).real, diagonal(qq).real, diagonal(pq))

    def change(state: tuple[Array, ...], cosine: Array, sine: Array) -> Any:
        matrix, vectors = state
        matrix = _adjoint(_columns_turned(matrix, cosine, sine))
        matrix = _adjoint(_columns_turned(matrix, cosine, sine))
        return matrix, _columns_turned(vectors, cosine, sine)

    _, vectors = _rotated((whole, _vectors(whole)), turn, change)
    vectors = _unit_columns(vectors[..., :count, :count])
    # From the matrix itself: the rotated one has rounded at every rotation.
    values = (jnp.conj(vectors) * (a @ vectors)).real.sum(-2)
    order = jnp.argsort(values, axis=-1)
    return _columns(vectors, order), jnp.take_along_axis(values, order, axis=-1, mode="clip")


def _svd(a: Array, full: bool, with_vectors: bool) -> tuple[Any, ...]:
    """Rotates columns until they are orthogonal; their lengths are the values."""
    count = a.shape[-1]
    wide = _evened(a, 1)

    def turn(state: tuple[Array, ...]) -> tuple[Any, Any]:
        one, other = _halves(state[0], a.ndim - 1)
        return _turn(_squares(one), _squares(other), (jnp.conj(one) * other).sum(-2))

    def change(state: tuple[Array, ...], cosine: Array, sine: Array) -> Any:
        return tuple(_columns_turned(each, cosine, sine) for each in state)

    _, vectors = _rotated((wide, _vectors(wide)), turn, change)
    vectors = _unit_columns(vectors[..., :count, :count])
    turned = a @ vectors  # not the rotated matrix, which has rounded at every rotation
    values = jnp.sqrt(_squares(turned))
    order = jnp.argsort(-values, axis=-1)
    values = jnp.take_along_axis(values, order, axis=-1, mode="clip")
    if not with_vectors:
        return (values,)
    turned, vectors = _columns(turned, order), _columns(vectors, order)
    # A zero vector has no direction; it is completed from the others.
    left, upper = jnp.linalg.qr(turned, mode="complete" if full else "reduced")
    edge = jnp.diagonal(upper, axis1=-2, axis2=-1)
    size = jnp.abs(edge)
    sign = jnp.where(size == 0, 1, edge / jnp.where(size == 0, 1, size))
    if full:
        rest = jnp.ones((*sign.shape[:-1], a.shape[-2] - count), sign.dtype)
        sign = jnp.concatenate([sign, rest], -1)
    return values, left * sign[..., None, :], vectors


def _columns(matrix: Array, order: Array) -> Any:
    return jnp.take_along_axis(matrix, order[..., None, :], axis=-1, mode="clip")
