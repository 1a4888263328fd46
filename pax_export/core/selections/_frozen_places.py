"""Freezes modules and single arrays."""

from __future__ import annotations

from functools import partial
from typing import Any

from pax_export._errors import InvalidArgumentError
from pax_export._types import PyTree
from pax_export.core._edit import Change, edit_at
from pax_export.core._parameters import (
    freeze_alone,
    freeze_arrays,
    frozen_of,
    unfreeze_alone,
    unfreeze_arrays,
)
from pax_export.core._traversal import apply_bottom_up, cached_by_treedef
from pax_export.core.selections._selectable import (
    Place,
    Steps,
    at_or_below,
    dotted_path,
    outermost_paths,
    path_or_root,
    places_of,
)


@cached_by_treedef()
def freeze_at(tree: PyTree, paths: tuple[Steps, ...], states: bool) -> Any:
    """The tree with these places frozen; with `states`, their modules in eval mode for good."""
    modules, arrays = _frozen_targets(tree, paths)
    changes: dict[Steps, Change] = {
        steps: partial(freeze_arrays, paths=own) for steps, own in arrays
    }
    changes |= dict.fromkeys(modules, _inside_too(partial(freeze_alone, states=states)))
    return edit_at(tree, changes, same_kinds=True)


@cached_by_treedef()
def unfreeze_at(tree: PyTree, paths: tuple[Steps, ...]) -> Any:
    """Unfreezes these places, in the mode of the modules around them."""
    modules, arrays = _frozen_targets(tree, paths)
    changes: dict[Steps, Change] = {
        steps: partial(unfreeze_arrays, paths=these) for steps, these in arrays
    }
    modes = _modes_around(tree, modules)
    changes |= {s: _inside_too(partial(_unfreeze_alone, training=modes[s])) for s in modules}
    return edit_at(tree, changes, same_kinds=True)


def _inside_too(change: Change) -> Change:
    return lambda module: apply_bottom_up(module, change)


def _frozen_targets(
    tree: PyTree, paths: tuple[Steps, ...]
) -> tuple[tuple[Steps, ...], list[tuple[Steps, frozenset[str]]]]:
    """The outermost modules at or below some places, and the own arrays of others that are."""
    if () in paths:
        return ((),), []
    chosen = frozenset(paths)
    meant = [place for place in places_of(tree) if at_or_below(place.steps, chosen)]
    if not meant:
        raise InvalidArgumentError(
            "The selected parts have no modules or arrays to freeze.",
            got=", ".join(path_or_root(dotted_path(steps)) for steps in paths),
            write="a selection of modules or arrays",
        )
    modules = {place.steps for place in meant if place.cls is not None}
    arrays = [place for place in meant if place.cls is None and place.owner not in modules]
    return outermost_paths(list(modules)), _by_owner(arrays)


def _by_owner(arrays: list[Place]) -> list[tuple[Steps, frozenset[str]]]:
    """The modules that own some arrays, each with their paths from it."""
    found: dict[Steps, set[str]] = {}
    for array in arrays:
        found.setdefault(array.owner, set()).add(dotted_path(array.steps[len(array.owner) :]))
    return [(owner, frozenset(own)) for owner, own in found.items()]


def _modes_around(tree: PyTree, modules: tuple[Steps, ...]) -> dict[Steps, bool | None]:
    """The mode of the module around each of these; the root has none around it."""
    if modules == ((),):
        return {(): None}
    places = {place.steps: place for place in places_of(tree)}
    return {steps: places[places[steps].owner].training for steps in modules}


def _unfreeze_alone(module: PyTree, training: bool | None) -> Any:
    """Unfreezes a module, but not its submodules."""
    kept_statistics = frozen_of(module).statistics
    new = unfreeze_alone(module)
    return new._with_training(training) if kept_statistics and training is not None else new
