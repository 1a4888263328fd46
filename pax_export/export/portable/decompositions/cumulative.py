"""Cumulative products, extrema and logsumexp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from pax_export.export.portable.decompositions.registry import decomposes
from pax_export.export.portable.decompositions.windows import greatest, least

#: Up to this number, elements are combined by doubling; more, or an unknown number, in a loop.
_DOUBLED = 4096


def _accumulated(combine: Callable[[Any, Any], Any], neutral: Callable[[Any], Any]) -> Callable:
    def accumulate(x: Any, *, axis: int, reverse: bool) -> Any:
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


def by_loop(x: Any, axis: int, reverse: bool, combine: Callable, neutral: Any) -> Any:
    """Accumulates the elements one by one."""
    rows = jnp.moveaxis(x, axis, 0)

    def step(total: Any, row: Any) -> Any:
        total = combine(total, row)
        return total, total

    start = jnp.full(rows.shape[1:], neutral, x.dtype)
    return jnp.moveaxis(lax.scan(step, start, rows, reverse=reverse)[1], 0, axis)


def _log_sum(x: Any, y: Any) -> Any:
    # Infinities of the same sign have no difference.
    apart = jnp.where(x == y, 0, -jnp.abs(x - y))
    return lax.max(x, y) + jnp.log(jnp.exp(apart) + 1)


_product = _accumulated(lax.mul, lambda dtype: jnp.ones((), dtype))
decomposes("cumprod", single=True, any_dtype=True)(_product)
decomposes("cummax")(_accumulated(lax.max, least))
decomposes("cummin")(_accumulated(lax.min, greatest))
decomposes("cumlogsumexp", single=True)(_accumulated(_log_sum, least))
