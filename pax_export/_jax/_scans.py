"""Scans along a size that nobody knows yet: one element after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import numpy as jnp
from jax.extend.core import jaxpr_as_fun

from pax_export._jax._programs import scan_operands


def scan_rule(first: Callable) -> Callable:
    """A rule to lower scans: jax's `first`, or a loop where a length is symbolic.

    jax asks whether there is any step at all, and how many remain of those that it unrolls.
    """
    from jax.interpreters import mlir

    loop = mlir.lower_fun(_loop, multiple_results=True)

    def rule(context: Any, *operands: Any, length: Any, **parameters: Any) -> Any:
        chosen = first if isinstance(length, int) else loop
        return chosen(context, *operands, length=length, **parameters)

    return rule


def _loop(*operands: Any, **parameters: Any) -> list[Any]:
    length, reverse, jaxpr = (parameters[name] for name in ("length", "reverse", "jaxpr"))
    held, carry, rows = scan_operands(parameters, operands)
    body, count = jaxpr_as_fun(jaxpr), len(carry)
    spare = 0 if _is_one_at_least(length) else 1  # jax takes nothing of what may be empty
    kinds = [(each.shape, each.dtype) for each in jaxpr.out_avals[count:]]
    filled = [jax.lax.empty((length + spare, *shape), dtype) for shape, dtype in kinds]
    if spare:
        more = [jax.lax.empty((1, *each.shape[1:]), each.dtype) for each in rows]
        rows = [jnp.concatenate(both) for both in zip(rows, more)]
    last = jnp.asarray(length) - 1

    def step(state: Any) -> Any:
        number, carry, filled = state
        place = last - number if reverse else number
        row = [jax.lax.dynamic_index_in_dim(each, place, keepdims=False) for each in rows]
        found = body(*held, *carry, *row)
        update = jax.lax.dynamic_update_index_in_dim
        filled = [update(all, one, place, 0) for all, one in zip(filled, found[count:])]
        return number + 1, found[:count], filled

    start = jnp.zeros_like(last), carry, filled
    _, carry, filled = jax.lax.while_loop(lambda state: state[0] <= last, step, start)
    return [*carry, *(each[:length] if spare else each for each in filled)]


def _is_one_at_least(length: Any) -> bool:
    try:
        return bool(length >= 1)
    except Exception:  # of jax's own kind: nobody knows
        return False
