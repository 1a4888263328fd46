"""Setting and deleting one attribute of a module that is open for change."""

from __future__ import annotations

from typing import Any

from pax_export._errors import InvalidArgumentError
from pax_export.core._tree import (
    PURE,
    STATIC,
    Node,
    attributes_of,
    current_kinds,
    kind_of,
    settle,
    swap_child,
)


def store(node: Node, name: str, value: Any) -> None:
    """Sets an attribute of a settled module and brings its layout up to date."""
    attributes = attributes_of(node)
    kinds = current_kinds(node)
    object.__setattr__(node, name, value)
    if name not in attributes:
        return  # a property or another descriptor took it
    kind = kind_of(value)
    if kind is PURE and kinds.get(name) is PURE and not node._pax_layout:
        swap_child(node, name, value)
        return
    kinds[name] = kind
    settle(node, kinds)


def remove(node: Node, name: str) -> None:
    """Deletes a static attribute.

    Raises:
        InvalidArgumentError: the attribute is a subtree.
    """
    if kind_of(attributes_of(node).get(name)) is not STATIC:
        raise InvalidArgumentError(
            "Cannot delete an attribute that holds arrays or modules.",
            where=f"{type(node).__qualname__}.{name}",
            write=f"self.{name} = None",
        )
    object.__delattr__(node, name)
