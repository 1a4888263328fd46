"""Casting the floating-point arrays of a tree; modules in it are left alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax.tree_util import tree_flatten, tree_unflatten

from pax_export.core import Node, is_array


def cast_floating(tree: Any, dtype: Any) -> Any:
    """Casts every floating-point array of a tree.

    Integers, booleans, random keys, Python numbers and everything inside
    modules stay as they are.

    Args:
        tree: any pytree.
        dtype: the dtype that floating-point arrays get.

    Returns:
        The tree with cast arrays; the very same tree if none had to be cast.
    """
    leaves, treedef = tree_flatten(tree, is_leaf=stops)
    cast = [_cast(leaf, dtype) for leaf in leaves]
    if all(map(_same, leaves, cast)):
        return tree
    return tree_unflatten(treedef, cast)


def stops(value: Any) -> bool:
    """True where the look at arguments and attributes stops.

    That is at modules, and at iterators, which jax does not look into either,
    and warns of.
    """
    return isinstance(value, (Node, Iterator))


def is_floating(value: Any) -> bool:
    """True for arrays of floating-point numbers."""
    return is_array(value) and jnp.issubdtype(value.dtype, jnp.floating)


def _cast(leaf: Any, dtype: Any) -> Any:
    if not is_floating(leaf) or leaf.dtype == dtype:
        return leaf
    return leaf.astype(dtype)


def _same(a: Any, b: Any) -> bool:
    return a is b
