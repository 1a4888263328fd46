"""Copies numpy arrays of modules that `pure` opens; unchanged copies are replaced by the arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from pax_export._types import PyTree
from pax_export.core._containers import KEYED
from pax_export.core._tree import Node, attributes_of, current_kinds, is_node, update_moduledef

Copies = dict[int, tuple[np.ndarray, np.ndarray]]  # by the id of the copy: it, and the original


def with_own_arrays(tree: PyTree) -> tuple[Any, Copies]:
    """Copies the numpy arrays of modules; returns the new tree and the copies."""
    copies: Copies = {}

    def own(leaf: object) -> Any:
        if not isinstance(leaf, np.ndarray):
            return leaf
        new = leaf.copy(order="K")
        copies[id(new)] = (new, leaf)
        return new

    def of_module(value: object) -> Any:
        return jax.tree_util.tree_map(own, value) if is_node(value) else value

    return jax.tree_util.tree_map(of_module, tree, is_leaf=is_node), copies


def on_own_array(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps a function that may write to its argument: a numpy array is copied first.

    An unchanged copy in the result is replaced by the array.
    """

    def call(value: object) -> Any:
        if not isinstance(value, np.ndarray):
            return function(value)
        copy = value.copy(order="K")
        new = function(copy)
        return value if new is copy and _same_bytes(copy, value) else new

    return call


def give_back(modules: Iterable[Node], copies: Copies) -> None:
    """Restores the original arrays where the copies are unchanged."""
    same = {
        key: original for key, (copy, original) in copies.items() if _same_bytes(copy, original)
    }
    if not same:
        return
    for module in modules:
        attributes = attributes_of(module)
        changes = {name: _replace_arrays(value, same) for name, value in attributes.items()}
        changes = {n: value for n, value in changes.items() if value is not attributes[n]}
        if changes:
            attributes.update(changes)
            update_moduledef(module, current_kinds(module))


def _same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    """True if two arrays are the same to the last bit."""
    if a.dtype != b.dtype or a.shape != b.shape or a.dtype.hasobject:
        return False
    one, other = (each.ravel(order="K").view(np.uint8) for each in (a, b))  # contiguous: no copies
    return one.data == other.data


def _replace_arrays(value: PyTree, same: dict[int, np.ndarray]) -> Any:
    """The value with the arrays in it exchanged; lists and dicts stay the objects they are."""
    kind = type(value)
    if isinstance(value, np.ndarray):
        return same.get(id(value), value)
    if kind is list:
        value[:] = [_replace_arrays(x, same) for x in value]
    elif kind is dict or kind in KEYED:
        for key in value:
            value[key] = _replace_arrays(value[key], same)
    elif isinstance(value, tuple):
        parts = [_replace_arrays(x, same) for x in value]
        if any(new is not old for new, old in zip(parts, value)):
            return tuple.__new__(kind, parts)
    return value
