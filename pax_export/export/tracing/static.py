"""Static Python values among the arguments, hidden from jax in the tree structure."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pax_export._foundations.types import PyTree
from pax_export.core import LeafValue


class Static:
    """A value instead of a leaf: a node of the tree that has no leaves."""

    def __init__(self, value: PyTree):
        self.value = value


jax.tree_util.register_pytree_node(
    Static, lambda static: ((), LeafValue(static.value)), lambda known, _: Static(known.value)
)


def wrap_static(tree: PyTree, is_static: Callable[[Any], bool]) -> Any:
    """Wraps the static leaves of a tree; returns the same object if there are none."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    if not any(map(is_static, leaves)):
        return tree
    held = [Static(leaf) if is_static(leaf) else leaf for leaf in leaves]
    return jax.tree_util.tree_unflatten(structure, held)


def unwrap_static(tree: PyTree) -> Any:
    """The tree with the hidden leaves in their places."""
    return jax.tree_util.tree_map(
        lambda leaf: leaf.value if isinstance(leaf, Static) else leaf,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, Static),
    )


def is_no_array(value: PyTree) -> bool:
    """Whether a leaf of params is neither an array nor a number, nor something that is like one."""
    if isinstance(value, bool):
        return True  # a flag, which Python decides with
    number = isinstance(value, (int, float, complex, np.generic))
    return not (number or (hasattr(value, "shape") and hasattr(value, "dtype")))


#: Values that Python branches on, and that are no arrays.
_SWITCHES = (bool, str, bytes, enum.Enum, type, np.dtype)


def is_switch(value: PyTree) -> bool:
    """Whether an argument is a Python value that is no input: a flag, a name, a function."""
    if isinstance(value, str):
        return "," not in value  # with one, it was to be a shape
    return isinstance(value, _SWITCHES) or (callable(value) and not hasattr(value, "shape"))


def is_fixed(value: PyTree) -> bool:
    """Whether a keyword argument is a Python value that is no input; a number is one, too."""
    number = isinstance(value, (int, float, complex)) and not isinstance(value, np.generic)
    return number or is_switch(value)


_LARGEST = 2**53


def describe_value(value: PyTree) -> dict[str, Any]:
    """Returns a Python value for a report: itself if it is plain data, otherwise its name."""
    plain = type(value) in (bool, str) or (
        type(value) in (int, float) and abs(value) < _LARGEST  # NaN and infinity are no JSON
    )
    if plain:
        return {"value": value}
    name = getattr(value, "__qualname__", None)
    return {"text": f"{getattr(value, '__module__', '')}.{name}" if name else str(value)}
