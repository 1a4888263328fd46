"""`jax.lax.associative_scan` along a size that nobody knows yet: one element after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import numpy as jnp
from jax.tree_util import tree_leaves, tree_map


def associative_scan(first: Callable) -> Callable:
    """What jax has as `first`, which halves and has to know how often; or else a loop."""
    from jax import export as jax_export

    @functools.wraps(first)
    def scan(fn: Callable, elems: Any, reverse: bool = False, axis: int = 0) -> Any:
        leaves = tree_leaves(elems)
        if not (leaves and jax_export.is_symbolic_dim(jnp.shape(leaves[0])[axis])):
            return first(fn, elems, reverse=reverse, axis=axis)
        return _one_by_one(fn, tree_map(jnp.asarray, elems), reverse, axis)

    return scan


def _one_by_one(fn: Callable, elems: Any, reverse: bool, axis: int) -> Any:
    """The function is given elements as jax gives them: with the axis, of size 1 here."""

    def step(before: Any, row: Any) -> tuple[Any, Any]:
        number, element = row
        element = tree_map(lambda one: jnp.expand_dims(one, axis), element)
        after = jax.lax.cond(number > 0, lambda: fn(before, element), lambda: element)
        return after, tree_map(lambda one: jnp.squeeze(one, axis), after)

    rows = tree_map(lambda each: jnp.moveaxis(each, axis, 0), elems)
    numbers, begin = jnp.arange(tree_leaves(rows)[0].shape[0]), -1 if reverse else 0
    start = tree_map(lambda each: jnp.expand_dims(each[begin], axis), rows)
    inputs = (jnp.flip(numbers) if reverse else numbers), rows
    _, found = jax.lax.scan(step, start, inputs, reverse=reverse)
    return tree_map(lambda each: jnp.moveaxis(each, 0, axis), found)
