"""The same data as another module: with other static values, of another class, unpickled."""

from __future__ import annotations

from typing import Any

from pax_export.core._change import begin, refresh
from pax_export.core._tree import PURE, STATIC, Node, flatten, settle, unflatten


def with_static(node: Node, **changes: Any) -> Any:
    """A copy of a module with other values of static attributes that it has."""
    children, layout = flatten(node)
    return unflatten(layout.with_static(**changes), children)


def with_class(node: Node, cls: type) -> Any:
    """A copy of a module as an instance of another class."""
    children, layout = flatten(node)
    return unflatten(layout.with_class(cls), children)


def restore(cls: type, names: tuple[str, ...], attributes: dict[str, Any]) -> Any:
    """Makes a module from what a pickle holds.

    Args:
        cls: its class.
        names: the attributes that are subtrees.
        attributes: all attributes in order of assignment.
    """
    node = object.__new__(cls)
    begin(node, attributes)
    settle(node, {n: PURE if n in names else STATIC for n in attributes})
    refresh(node)
    return node
