"""Selectable places of a tree: modules and leaves with their paths."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.tree_util import tree_structure, tree_unflatten

from pax_export._errors import InvalidArgumentError
from pax_export._types import PyTree, TreeDef
from pax_export.core._traversal import Steps, one_level, plain_key
from pax_export.core._tree import Node, attributes_of, flatten, is_array


def dotted_path(steps: Iterable[Any]) -> str:
    """The dotted path; empty for the root."""
    return ".".join(map(str, steps))


def path_or_root(path: str) -> str:
    """The path as messages name it."""
    return path or "(the root)"


class Chosen:
    """Places of a tree, as filters, rules and exemptions accept them.

    Attributes:
        paths: the steps to each place, in tree order.
    """

    paths: tuple[Steps, ...]


@dataclass(frozen=True)
class Place:
    """The path of a module, leaf or container, independent of a tree."""

    steps: Steps
    path: str
    owner: Steps  # leads to the innermost module around it
    cls: type | None  # the class of a module; None for a leaf or container
    training: bool = True  # the mode of a module


def values_of(tree: PyTree, containers: bool = False) -> Iterator[tuple[Steps, Any]]:
    """Returns all modules and leaves with their steps, parents first; or containers, too."""
    left: list[tuple[Steps, Any]] = [((), tree)]
    while left:
        steps, value = left.pop()
        below = _children_of(value)
        if below is None or isinstance(value, Node) or (containers and below):
            yield steps, value
        left += [((*steps, step), child) for step, child in reversed(below or [])]


def _children_of(value: object) -> list[tuple[Any, Any]] | None:
    """The children of a module or container with the step to each; None for a leaf."""
    if isinstance(value, Node):
        children, moduledef = flatten(value)
        return list(zip(moduledef.names, children))
    if is_array(value):
        return None
    items, _ = one_level(value)
    if len(items) == 1 and not items[0][0]:
        return None
    return [(plain_key(path[0]), item) for path, item in items]


def places_of(tree: PyTree) -> tuple[Place, ...]:
    """Returns all modules and leaves of a tree, parents first; cached by treedef."""
    return places_in(tree_structure(tree))


@functools.lru_cache(maxsize=64)
def places_in(treedef: TreeDef, containers: bool = False) -> tuple[Place, ...]:
    """The places of all trees of a treedef."""
    skeleton = tree_unflatten(treedef, [object() for _ in range(treedef.num_leaves)])
    values = list(values_of(skeleton, containers))
    modules = {steps for steps, value in values if isinstance(value, Node)}
    return tuple([_make_place(steps, value, modules) for steps, value in values])


def _make_place(steps: Steps, value: object, modules: set[Steps]) -> Place:
    above = (steps[:n] for n in range(len(steps) - 1, -1, -1))
    owner = next((each for each in above if each in modules), ())
    if not isinstance(value, Node):
        return Place(steps, dotted_path(steps), owner, None)
    training = attributes_of(value).get("_training", True)
    return Place(steps, dotted_path(steps), owner, type(value), training)


def value_at(tree: PyTree, steps: Steps) -> Any:
    """Returns the value at these steps; raises an InvalidArgumentError if there is none."""
    value = tree
    for number, step in enumerate(steps):
        found = dict(_children_with_static(value)).get(step, _children_with_static)
        if found is _children_with_static:
            raise InvalidArgumentError(
                "The tree does not have this path.",
                where=dotted_path(steps[: number + 1]),
                got=f"{type(value).__name__} at {path_or_root(dotted_path(steps[:number]))}",
                write="a selection of this net, or of one with the same paths",
            )
        value = found
    return value


def _children_with_static(value: object) -> Iterable[tuple[Any, Any]]:
    """The children of a value on a path, including static attributes."""
    if isinstance(value, Node):
        return attributes_of(value).items()
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return enumerate(value)
    try:
        return _children_of(value) or ()
    except (TypeError, ValueError):  # a container that jax cannot flatten
        return ()


def written_out(tree: PyTree, names: Sequence[str]) -> Steps | None:
    """The steps of a path without wildcards, which may also lead to containers and static data."""
    steps: list[Any] = []
    value = tree
    for name in names:
        found = next((pair for pair in _children_with_static(value) if str(pair[0]) == name), None)
        if found is None:
            return None
        step, value = found
        steps.append(step)
    return tuple(steps)


def at_or_below(steps: Steps, chosen: set[Steps] | frozenset[Steps]) -> bool:
    """True if a place is one of the chosen ones or inside one."""
    return any(steps[:n] in chosen for n in range(len(steps) + 1))


def outermost_paths(paths: Sequence[Steps]) -> tuple[Steps, ...]:
    """The places that are not inside another one."""
    chosen = set(paths)
    return tuple([p for p in paths if not any(p[:n] in chosen for n in range(len(p)))])


def rest_of(tree: PyTree, paths: Sequence[Steps]) -> tuple[Steps, ...]:
    """Returns the largest places of a tree that are disjoint from these."""
    chosen = frozenset(paths)
    around = {path[:n] for path in paths for n in range(len(path))}
    found: set[Steps] = set()
    for place in places_of(tree):
        steps = place.steps
        if steps not in around and not at_or_below(steps, chosen) and not at_or_below(steps, found):
            found.add(steps)
    return tuple([place.steps for place in places_of(tree) if place.steps in found])
