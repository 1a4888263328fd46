"""Comparisons and extrema of unsigned integers and booleans on signed ones; sorting, by `rank`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pax_export._foundations.types import Array, Equation, Size
from pax_export.export.portable.decompositions.indexing import ordered, unordered
from pax_export.export.portable.decompositions.registry import decomposes
from pax_export.export.portable.kept import call

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
    found = partial(approximate, k=k, reduction_dimension=reduction_dimension, **parameters)
    count = jax.eval_shape(found, x)[0].shape[reduction_dimension]
    return top_k(x, k=count, axis=reduction_dimension, largest=is_max_k)
