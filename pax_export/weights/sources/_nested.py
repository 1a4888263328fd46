"""Nested containers of arrays, with dotted names and limits of depth and size."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping
from typing import Any

from pax_export._types import ArrayLike, PyTree
from pax_export.core import join_path

_DEEPEST = 200
_MOST = 1_000_000


def flatten_containers(tree: PyTree, is_leaf: PyTree) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the leaves by dotted name, and the strings and numbers by dotted name.

    Example:
        >>> flatten_containers({"a": [1.5j, "text"], "b": {}}, lambda x: isinstance(x, complex))
        ({'a.0': 1.5j}, {'a.1': 'text'})
    """
    leaves: dict[str, Any] = {}
    others: dict[str, Any] = {}
    left = _MOST
    waiting: list[tuple[str, Any, int]] = [("", tree, 0)]
    while waiting:
        name, value, depth = waiting.pop()
        left -= 1
        if depth > _DEEPEST or left < 0:
            raise ValueError(f"containers in containers without end, at {name[:200]!r}")
        if is_leaf(value):
            if name in leaves:
                raise ValueError(f"two arrays with the name {name!r}")
            leaves[name] = value
        elif (children := _children_of(value)) is not None:
            below = [(join_path(name, str(key)), child, depth + 1) for key, child in children]
            if len(below) + len(waiting) > _MOST:
                raise ValueError(f"containers in containers without end, at {name[:200]!r}")
            waiting.extend(reversed(below))
        elif isinstance(value, (str, bytes, numbers.Number)):
            others[name] = value
    return leaves, others


def _children_of(value: ArrayLike) -> Iterable[tuple[Any, Any]] | None:
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    return None
