"""Setting and deleting one attribute of a module that is open for change."""

from __future__ import annotations

from typing import Any

from pax_export._errors import InvalidArgumentError
from pax_export.core._change import note
from pax_export.core._tree import STATIC, Node, attributes_of, kind_of


def store(node: Node, name: str, value: Any) -> None:
    """Sets an attribute of a settled module; its layout follows."""
    attributes = attributes_of(node)
    object.__setattr__(node, name, value)
    if name in attributes:  # else a property or another descriptor took it
        note(node, name, value)


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
