"""Rules for decompositions that give NaN for a matrix that has none, as jax does on CPUs.

There LAPACK says of a matrix that is infinite, or not positive definite, that it failed, and jax
makes NaN of all that it gave.  The general rules have nobody to ask: the eigenvalues of an
infinite matrix look like any others, and a factor of a singular one may too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax import numpy as jnp
from jax.interpreters import mlir


def eigenvalues_or_nan(entry: Any) -> Any:
    """A rule for `eigh` that gives NaN for a matrix with infinity or NaN in the half it reads."""

    def rule(context: Any, matrix: Any, **parameters: Any) -> Any:
        half = jnp.tril if parameters["lower"] else jnp.triu

        def is_right(matrix: Any) -> Any:
            return jnp.isfinite(half(matrix)).all((-2, -1))

        def finite(matrix: Any) -> list[Any]:
            # What has no eigenvalues need not be iterated on.
            return [_where(is_right(matrix), matrix, 0)]

        (safe,) = _lowered(finite, context, [matrix], context.avals_in)
        results = entry.rule(context, safe, **parameters)
        return _checked(context, matrix, results, lambda matrix, *_: is_right(matrix))

    return dataclasses.replace(entry, rule=rule)


def factor_or_nan(entry: Any) -> Any:
    """A rule for `cholesky` that gives NaN for a matrix that is not positive definite."""

    def is_right(_: Any, factor: Any) -> Any:
        return (jnp.diagonal(factor, 0, -2, -1).real > 0).all(-1)

    def rule(context: Any, matrix: Any, **parameters: Any) -> Any:
        results = entry.rule(context, matrix, **parameters)
        return _checked(context, matrix, results, is_right)

    return dataclasses.replace(entry, rule=rule)


def _checked(context: Any, matrix: Any, results: Any, is_right: Callable) -> Any:
    """The results of a rule, NaN for each matrix that is not said to be right."""

    def choose(matrix: Any, *results: Any) -> list[Any]:
        right = is_right(matrix, *results)
        return [_where(right, each, jnp.nan) for each in results]

    known = [*context.avals_in, *context.avals_out]
    return _lowered(choose, context, [matrix, *results], known)


def _lowered(function: Callable, context: Any, values: Sequence[Any], known: Sequence[Any]) -> Any:
    return mlir.lower_fun(function)(
        context.replace(avals_in=known, avals_out=None, tokens_out=None), *values
    )


def _where(right: Any, value: Any, other: Any) -> Any:
    return jnp.where(right.reshape(right.shape + (1,) * (value.ndim - right.ndim)), value, other)
