"""Finds the places of a net that a selection argument matches."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax

from pax_export._foundations.errors import InvalidArgumentError, InvalidArgumentTypeError, a_few
from pax_export._foundations.types import TreeDef
from pax_export.core._tree import Node, attributes_of
from pax_export.core.selections.filters import (
    MADE_FILTERS,
    PLAIN_FILTERS,
    Selector,
    as_rule,
    leaves_of,
    require_names,
)
from pax_export.core.selections.paths import (
    Chosen,
    Steps,
    better_path,
    dotted_path,
    path_or_root,
    path_pattern,
    places_in,
    places_of,
    value_at,
    values_of,
    written_out,
)


def find(tree: Node, what: Selector) -> tuple[Steps, ...]:
    """Finds the places that a selector matches, in tree order.

    Raises:
        InvalidArgumentError: nothing matches.
        InvalidArgumentTypeError: not a valid selector.
    """
    found = _find_paths(tree, what)
    if not found:
        raise InvalidArgumentError(
            "The selection matches no part of the net.",
            where=type(tree).__qualname__,
            got=_describe_selector(what),
            write=_suggest_selector(tree, what),
        )
    return found


def _find_paths(tree: Node, what: Selector) -> tuple[Steps, ...]:
    if what is ... or what is True:
        return ((),)
    if isinstance(what, str):
        return _by_path(tree, what)
    if isinstance(what, type) and issubclass(what, Node):
        return _by_class(jax.tree_util.tree_structure(tree), what)
    if isinstance(what, Chosen):
        for steps in what.paths:
            value_at(tree, steps)  # or an error: it was chosen in another net
        return what.paths
    if any(what is each for each in PLAIN_FILTERS) or isinstance(what, (*MADE_FILTERS, Node)):
        require_names(what, [tree], type(tree).__qualname__)  # type: ignore  # known by now
        leaves = leaves_of(tree)
        mask = as_rule(what)(tree, leaves)  # type: ignore
        return tuple([leaf.path for leaf, is_meant in zip(leaves, mask) if is_meant])
    if isinstance(what, (list, tuple, set, frozenset)):
        parts: list[Any] = list(what)  # type: ignore  # of selectors
        return in_order(tree, [steps for each in parts for steps in find(tree, each)])
    if not isinstance(what, type) and callable(what):
        return _by_predicate(tree, what)
    raise InvalidArgumentTypeError(
        "Expected paths, classes, functions or filters that select parts of a net.",
        got=_describe_selector(what),
        write='a path such as "encoder.layers.*.norm", a Module class, a function of a module, '
        "a function of path and value, a filter of pax_export.transforms, a selection, or "
        "several of these",
    )


def _by_path(tree: Node, text: str) -> tuple[Steps, ...]:
    found = _paths_fitting(jax.tree_util.tree_structure(tree), text)
    pattern = path_pattern(text)
    if not found and pattern.is_written_out:
        steps = written_out(tree, pattern.steps)
        return () if steps is None else (steps,)
    return found


@functools.lru_cache(maxsize=512)
def _paths_fitting(treedef: TreeDef, text: str) -> tuple[Steps, ...]:
    pattern = path_pattern(text)
    return tuple([entry.steps for entry in places_in(treedef, True) if pattern.fits(entry.path)])


@functools.lru_cache(maxsize=512)
def _by_class(treedef: TreeDef, cls: type) -> tuple[Steps, ...]:
    places = places_in(treedef)
    return tuple([p.steps for p in places if p.cls is not None and issubclass(p.cls, cls)])


def _by_predicate(tree: Node, predicate: Callable[..., Any]) -> tuple[Steps, ...]:
    found = values_of(tree)
    if wants_path(predicate):
        return tuple([steps for steps, value in found if predicate(dotted_path(steps), value)])
    return tuple([steps for steps, value in found if isinstance(value, Node) and predicate(value)])


def matcher(what: Selector, *, anywhere: bool) -> Callable[[str, Any], Any] | None:
    """Returns a function ``(path, module) -> bool`` for a selector; None if it is not one.

    Args:
        what: a path, a class, places of a selection, a function of a module or of path and module.
        anywhere: whether paths may begin anywhere, as in `PathPattern`.
    """
    if isinstance(what, str):
        pattern = path_pattern(what, anywhere)
        return lambda path, module: pattern.fits(path)
    if isinstance(what, Chosen):
        names = {dotted_path(steps) for steps in what.paths}
        return lambda path, module: path in names
    if isinstance(what, type):
        return lambda path, module: isinstance(module, what)
    if not callable(what) or isinstance(what, (*MADE_FILTERS, Node)):
        return None
    if wants_path(what):
        return what
    return lambda path, module: what(module)


def wants_path(function: Callable[..., Any]) -> bool:
    """True for a function of path and value, False for one of the value alone, or unknown."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    needed = [
        p
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return len(needed) == 2


def in_order(tree: Node, paths: Iterable[Steps]) -> tuple[Steps, ...]:
    """Places without repetition, in the order of the tree."""
    entries = places_in(jax.tree_util.tree_structure(tree), True)
    order = {entry.steps: number for number, entry in enumerate(entries)}

    def key(steps: Steps) -> tuple[int, int]:
        # Static attributes come after the module that has them.
        known = next(steps[:n] for n in range(len(steps), -1, -1) if steps[:n] in order)
        return order[known], len(steps)

    return tuple(sorted(dict.fromkeys(paths), key=key))


# --- suggestions ----------------------------------------------------------------------


def _describe_selector(what: Selector) -> str:
    if isinstance(what, type):
        return what.__qualname__
    return (repr(what) if isinstance(what, str) else f"{type(what).__name__}: {what!r}")[:120]


def _suggest_selector(tree: Node, what: Selector) -> str:
    paths = [entry.path for entry in places_of(tree)]
    if isinstance(what, str):
        better = better_path(what, [*paths, *_attributes_beside(tree, what)])
        return better or "a path of this net, which holds no modules and no arrays"
    return f"a selector of some of these: {a_few(list(map(path_or_root, paths)), 5)}"


def _attributes_beside(tree: Node, text: str) -> list[str]:
    """The paths of the attributes of the module that a path leads to but for its last step."""
    pattern = path_pattern(text)
    above = written_out(tree, pattern.steps[:-1]) if pattern.is_written_out else None
    owner = None if above is None else value_at(tree, above)
    if not isinstance(owner, Node):
        return []
    return [dotted_path((*above, n)) for n in attributes_of(owner) if not n.startswith("_")]  # type: ignore
