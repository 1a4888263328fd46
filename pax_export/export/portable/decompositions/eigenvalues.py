"""Eigenvalues of symmetric matrices and singular values, by Jacobi's rotations.

All pairs of a round are turned at once: a sweep of n - 1 rounds is n - 1 products of matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pax_export.export.portable.decompositions.linear_algebra import require_static, transposed
from pax_export.export.portable.decompositions.registry import NotDecomposedError, decomposes

#: After so many sweeps nothing is left to rotate, in float32 or float64.
_SWEEPS = 12


@decomposes("eigh")
def eigh(a: Any, *, lower: bool = True, subset_by_index: Any = None, **_: Any) -> tuple[Any, Any]:
    """The vectors, and the values in ascending order."""
    require_static(a)
    if subset_by_index is not None:
        raise NotDecomposedError("of some eigenvalues only")
    half = jnp.tril(a) if lower else jnp.triu(a)
    edge = jnp.einsum("...ii->...i", a)[..., None] * jnp.eye(a.shape[-1], dtype=a.dtype)
    return _nan_unless_finite(_eigh, half + transposed(half) - edge)


@decomposes("svd")
def svd(
    a: Any, *, full_matrices: bool, compute_uv: bool, subset_by_index: Any = None, **_: Any
) -> tuple[Any, ...]:
    """The values in descending order; with vectors, those on the left and on the right too."""
    require_static(a)
    if subset_by_index is not None:
        raise NotDecomposedError("of some singular values only")
    height, width = a.shape[-2:]
    if compute_uv and full_matrices and height != width:
        raise NotDecomposedError("with all vectors of a matrix that is not square")

    def decompose(a: Any) -> tuple[Any, ...]:
        if height >= width:
            values, u, v = _svd(a)
        else:
            values, v, u = _svd(transposed(a))
            u, v = transposed(u), transposed(v)
        return (values, u, v) if compute_uv else (values,)

    return _nan_unless_finite(decompose, a)


def _nan_unless_finite(decompose: Callable[[Any], tuple[Any, ...]], matrix: Any) -> tuple[Any, ...]:
    """Decomposes; all NaN for a matrix with NaN or infinity, as LAPACK's results are.

    Rotations would leave numbers among the NaN that look like any others.
    """
    finite = jnp.isfinite(matrix).all((-2, -1))[..., None]
    found = decompose(jnp.where(finite[..., None], matrix, 0))
    ranks = (finite if each.ndim < matrix.ndim else finite[..., None] for each in found)
    return tuple(jnp.where(at, each, jnp.nan) for at, each in zip(ranks, found))


def _rounds(count: int) -> Any:
    """Rounds in which all numbers below a count meet in pairs: [sweeps * rounds, pairs, 2]."""
    players = [*range(count), *([-1] if count % 2 else [])]
    rounds = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]))
        rounds.append([sorted(pair) for pair in pairs if -1 not in pair])
        players = [players[0], players[-1], *players[1:-1]]
    once = np.array(rounds, np.int32).reshape(len(rounds), -1, 2)
    return jnp.asarray(np.tile(once, (_SWEEPS, 1, 1)))


class _Pairs:
    """The pairs of a round as ones at their places, as rows [pairs, n] and columns [n, pairs].

    Both ways round, since TensorFlow's converter moves transpositions out of loops.
    """

    def __init__(self, pairs: Any, count: int, dtype: Any):
        numbers = jnp.arange(count, dtype=pairs.dtype)
        first, second = pairs[:, 0], pairs[:, 1]
        self.rows = [(each[:, None] == numbers).astype(dtype) for each in (first, second)]
        self.columns = [(numbers[:, None] == each).astype(dtype) for each in (first, second)]
        self.unit = jnp.eye(count, dtype=dtype)

    def turn(self, pp: Any, qq: Any, pq: Any) -> tuple[Any, Any]:
        """The rotation after which nothing is left between the two of each pair, and its inverse.

        The entries [..., pairs] are those of the first, of the second, and between them.
        """
        none = pq == 0
        # Bounded, so that its square is finite.
        slope = jnp.clip((qq - pp) / jnp.where(none, 1, 2 * pq), -1e15, 1e15)
        sign = jnp.where(slope >= 0, 1, -1).astype(pp.dtype)
        tangent = jnp.where(none, 0, sign / (jnp.abs(slope) + jnp.sqrt(1 + slope**2)))
        cosine = 1 / jnp.sqrt(1 + tangent**2)
        sine = (tangent * cosine)[..., None, :]
        edge = self.unit * (1 + (cosine - 1)[..., None, :] @ (self.rows[0] + self.rows[1]))
        mixed = (self.columns[0] * sine) @ self.rows[1] - (self.columns[1] * sine) @ self.rows[0]
        return edge + mixed, edge - mixed


def _rotated(entries: Callable, turned: Callable, matrix: Any) -> tuple[Any, Any]:
    """Runs all rounds; gives the turned matrix, and all rotations as one."""
    count = matrix.shape[-1]
    unit = jnp.eye(count, dtype=matrix.dtype)
    whole = jnp.broadcast_to(unit, (*matrix.shape[:-2], count, count))
    if count < 2:
        return matrix, whole

    def step(state: Any, numbers: Any) -> Any:
        matrix, vectors = state
        pairs = _Pairs(numbers, count, matrix.dtype)
        turn, back = pairs.turn(*entries(matrix, pairs))
        return (turned(matrix, turn, back), vectors @ turn), None

    return lax.scan(step, (matrix, whole), _rounds(count))[0]


def _eigh(a: Any) -> tuple[Any, Any]:
    def entries(a: Any, pairs: _Pairs) -> tuple[Any, Any, Any]:
        edge = (a * pairs.unit).sum(-1)[..., None, :]
        pp, qq = ((edge @ columns)[..., 0, :] for columns in pairs.columns)
        return pp, qq, ((pairs.rows[0] @ a) * pairs.rows[1]).sum(-1)

    _, vectors = _rotated(entries, lambda a, turn, back: back @ a @ turn, a)
    vectors = vectors / jnp.sqrt((vectors * vectors).sum(-2, keepdims=True))
    # From the matrix itself: that of so many turns has rounded as often.
    values = ((a @ vectors) * vectors).sum(-2)
    order = jnp.argsort(values, axis=-1)
    return _columns(vectors, order), jnp.take_along_axis(values, order, axis=-1, mode="clip")


def _svd(a: Any) -> tuple[Any, Any, Any]:
    """Rotates columns until they are orthogonal; their lengths are the values."""

    def entries(a: Any, pairs: _Pairs) -> tuple[Any, Any, Any]:
        left, right = (a @ columns for columns in pairs.columns)
        return (left * left).sum(-2), (right * right).sum(-2), (left * right).sum(-2)

    _, vectors = _rotated(entries, lambda a, turn, _: a @ turn, a)
    vectors = vectors / jnp.sqrt((vectors * vectors).sum(-2, keepdims=True))
    a = a @ vectors  # and not that of so many turns, which has rounded as often
    values = jnp.sqrt((a * a).sum(-2))
    order = jnp.argsort(-values, axis=-1)
    values = jnp.take_along_axis(values, order, axis=-1, mode="clip")
    a, vectors = _columns(a, order), _columns(vectors, order)
    return values, a / jnp.where(values == 0, 1, values)[..., None, :], transposed(vectors)


def _columns(matrix: Any, order: Any) -> Any:
    return jnp.take_along_axis(matrix, order[..., None, :], axis=-1, mode="clip")
