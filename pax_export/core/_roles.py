"""Roles of arrays: trainable, frozen or state."""

from __future__ import annotations

from typing import Any

from pax_export._types import PyTree
from pax_export.core._edit import with_class
from pax_export.core._subclassing import aspect_of, derive_class
from pax_export.core._traversal import apply_bottom_up, named_leaves

#: A module has the first of these roles that any of its arrays has.
ROLES = TRAINABLE, FROZEN, STATE = "trainable", "frozen", "state"


def named_roles(module: PyTree) -> list[tuple[str, Any, str]]:
    """The path, the leaf and the role of every leaf, in tree order."""
    trained = {path for path, _ in named_leaves(module.parameters())}
    parameters = {path for path, _ in named_leaves(_without_freezing(module).parameters())}

    def role(path: str) -> str:
        if path in trained:
            return TRAINABLE
        return FROZEN if path in parameters else STATE

    return [(path, leaf, role(path)) for path, leaf in named_leaves(module)]


def _without_freezing(module: PyTree) -> Any:
    """Returns the module with nothing frozen."""

    def thaw(each: PyTree) -> Any:
        if aspect_of(type(each), "frozen") is None:
            return each
        return with_class(each, derive_class(type(each), "frozen", None))

    return apply_bottom_up(module, thaw)
