"""`repr` of optimizers: their rules and the size of their state."""

from __future__ import annotations

from typing import Any

from jax.tree_util import tree_leaves

from pax_export._types import PyTree
from pax_export.core import Module, elements


def contents(optimizer: Module, rules: list[str]) -> dict[str, Any]:
    """The names of the rules and the counts of an optimizer; all arrays are state."""
    named = f"[{', '.join(rules)}]" if rules else None
    return {"rules": named, "state": sum(map(elements, tree_leaves(optimizer)))}


def opax_contents(self: Module) -> dict[str, Any]:
    """Of an optimizer of opax: a chain holds others, of classes that functions made."""
    chained = vars(self).get("transforms", ())
    return contents(self, [type(each).__name__ for each in chained])


def optax_contents(self: Module) -> dict[str, Any]:
    """Of an optimizer of optax: a chain keeps a tuple of states, each named for its rule."""
    names = [type(each).__name__ for each in _unchained(vars(self).get("state"))]
    keep = [name for name in names if name.endswith("State") and name != "EmptyState"]
    return contents(self, [name.removesuffix("State") for name in keep])


def _unchained(state: PyTree) -> list[Any]:
    """The states of all rules: a chain may hold chains."""
    if type(state) is not tuple:
        return [state]
    return [rule for each in state for rule in _unchained(each)]
