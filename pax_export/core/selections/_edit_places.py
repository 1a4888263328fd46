"""A new tree in which something else stands at some places."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from pax_export.core._check import check_modules
from pax_export.core._edit import own_containers
from pax_export.core._traversal import one_level, rebuilt
from pax_export.core._tree import (
    Node,
    attributes_of,
    current_kinds,
    kind_of,
    update_moduledef,
)
from pax_export.core.selections._selectable import Steps, plain

Change = Callable[[Any], Any]


def changed_at(tree: Any, changes: Mapping[Steps, Change], *, same_kinds: bool = False) -> Any:
    """A new tree in which each of these places holds ``change(what it held)``.

    What lies below is changed first: a change of a module sees the changed submodules.

    Args:
        tree: a module; it stays as it is, and shares no container with the new one.
        changes: what becomes of the places, which must be there.
        same_kinds: whether modules stay modules and arrays arrays, so that nothing need be
            looked at again; such changes work on trees with stand-ins for leaves, too.

    Raises:
        SharedNodeError: a module or array would stand at two places.
    """
    new = _changed_inside(tree, changes, same_kinds)
    if not same_kinds:
        check_modules(new)
    return new


def _changed_inside(tree: Any, changes: Mapping[Steps, Change], same_kinds: bool) -> Any:
    new = rebuilt(tree)
    owners: dict[Steps, dict[str, dict[Steps, Change]]] = {}
    for steps, change in changes.items():
        if steps:
            depth = _owner(new, steps)
            places = owners.setdefault(steps[:depth], {}).setdefault(steps[depth], {})
            places[steps[depth + 1 :]] = change
    for steps in sorted(owners, key=len, reverse=True):
        _change_attributes(_walk(new, steps), owners[steps], same_kinds)
    return changes[()](new) if () in changes else new


def _walk(tree: Any, steps: Steps) -> Any:
    for step in steps:
        tree = _step(tree, step)
    return tree


def _step(value: Any, step: Any) -> Any:
    if isinstance(value, Node):
        return attributes_of(value)[step]
    if isinstance(value, (dict, list)) or type(value) is tuple:
        return value[step]
    return next(item for path, item in one_level(value)[0] if plain(path[0]) == step)


def _owner(tree: Any, steps: Steps) -> int:
    """How many of the steps lead to the innermost module around a place."""
    depth = 0
    for number, step in enumerate(steps):
        if isinstance(tree, Node):
            depth = number
        tree = _step(tree, step)
    return depth


def _change_attributes(
    owner: Node, changes: dict[str, dict[Steps, Change]], same_kinds: bool
) -> None:
    """Changes what lies in the attributes of a new module."""
    attributes, kinds = attributes_of(owner), dict(current_kinds(owner))
    new = {name: _inside(attributes[name], places) for name, places in changes.items()}
    if not same_kinds:
        new = {name: own_containers(value) for name, value in new.items()}
        kinds |= {name: kind_of(value) for name, value in new.items()}
    attributes.update(new)
    update_moduledef(owner, kinds)


def _inside(value: Any, changes: dict[Steps, Change]) -> Any:
    """A container with changes in it, at the steps that lead from it; those below first."""
    deeper: dict[Any, dict[Steps, Change]] = {}
    for steps, change in changes.items():
        if steps:
            deeper.setdefault(steps[0], {})[steps[1:]] = change
    if deeper:
        value = _with_items(value, deeper)
    return changes[()](value) if () in changes else value


def _with_items(value: Any, changes: dict[Any, dict[Steps, Change]]) -> Any:
    if isinstance(value, (dict, list)):
        for step, below in changes.items():  # the container is the new tree's own
            value[step] = _inside(value[step], below)
        return value
    items, treedef = one_level(value)
    new = [
        _inside(item, changes[plain(path[0])]) if plain(path[0]) in changes else item
        for path, item in items
    ]
    return jax.tree_util.tree_unflatten(treedef, new)
