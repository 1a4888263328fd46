"""Verbs of selections: freezing, and new initial values."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.tree_util import tree_flatten, tree_unflatten

from pax_export._foundations.errors import InvalidArgumentError, a_few
from pax_export._foundations.types import PRNGKey
from pax_export.core._declared import Initializer, declared_in
from pax_export.core._edit import Change, edit_at
from pax_export.core._parameters import (
    freeze_alone,
    freeze_arrays,
    frozen_of,
    unfreeze_alone,
    unfreeze_arrays,
)
from pax_export.core._random import split_rng_key
from pax_export.core._traversal import apply_bottom_up, cached_by_treedef
from pax_export.core._tree import Node
from pax_export.core.selections.filters import FilteredLeaf, Param, as_rule, leaves_of
from pax_export.core.selections.paths import (
    Place,
    Steps,
    at_or_below,
    dotted_path,
    outermost_paths,
    path_or_root,
    places_of,
)


@cached_by_treedef()
def freeze_at(tree: Node, paths: tuple[Steps, ...], states: bool) -> Any:
    """The tree with these places frozen; with `states`, their modules in eval mode for good."""
    modules, arrays = _frozen_targets(tree, paths)
    changes: dict[Steps, Change] = {
        steps: partial(freeze_arrays, paths=own) for steps, own in arrays
    }
    changes |= dict.fromkeys(modules, _inside_too(partial(freeze_alone, states=states)))
    return edit_at(tree, changes, same_kinds=True)


@cached_by_treedef()
def unfreeze_at(tree: Node, paths: tuple[Steps, ...]) -> Any:
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
    tree: Node, paths: tuple[Steps, ...]
) -> tuple[tuple[Steps, ...], list[tuple[Steps, frozenset[str]]]]:
    """The outermost modules at or below some places, and the own arrays of others that are."""
    if () in paths:
        return ((),), []
    chosen = frozenset(paths)
    meant = [entry for entry in places_of(tree) if at_or_below(entry.steps, chosen)]
    if not meant:
        raise InvalidArgumentError(
            "The selected parts have no modules or arrays to freeze.",
            got=", ".join(path_or_root(dotted_path(steps)) for steps in paths),
            write="a selection of modules or arrays",
        )
    modules = {entry.steps for entry in meant if entry.cls is not None}
    arrays = [entry for entry in meant if entry.cls is None and entry.owner not in modules]
    return outermost_paths(list(modules)), _by_owner(arrays)


def _by_owner(arrays: list[Place]) -> list[tuple[Steps, frozenset[str]]]:
    """The modules that own some arrays, each with their paths from it."""
    found: dict[Steps, set[str]] = {}
    for array in arrays:
        found.setdefault(array.owner, set()).add(dotted_path(array.steps[len(array.owner) :]))
    return [(owner, frozenset(own)) for owner, own in found.items()]


def _modes_around(tree: Node, modules: tuple[Steps, ...]) -> dict[Steps, bool | None]:
    """The mode of the module around each of these; the root has none around it."""
    if modules == ((),):
        return {(): None}
    entries = {entry.steps: entry for entry in places_of(tree)}
    return {steps: entries[entries[steps].owner].training for steps in modules}


def _unfreeze_alone(module: Node, training: bool | None) -> Any:
    """Unfreezes a module, but not its submodules."""
    kept_statistics = frozen_of(module).statistics
    new = unfreeze_alone(module)
    return new._with_training(training) if kept_statistics and training is not None else new


# --- new initial values ---------------------------------------------------------------


def reinitialize(
    net: Node, paths: tuple[Steps, ...], key: PRNGKey | None, initializer: Initializer | None
) -> Any:
    """The net with new values for the parameters at or below some places."""
    found = leaves_of(net)
    chosen = frozenset(paths)
    mask = as_rule(Param)(net, found)
    meant = [n for n, leaf in enumerate(found) if mask[n] and at_or_below(leaf.path, chosen)]
    if not meant:
        raise InvalidArgumentError(
            "The selected parts hold no trainable parameter.",
            where=a_few([path_or_root(dotted_path(steps)) for steps in paths], 5),
            write="a selection of modules with parameters; unfreeze() before, if they are frozen",
        )
    makers = {n: initializer or _initializer_of(found[n]) for n in meant}
    unknown = [found[n].name for n, maker in makers.items() if maker is None]
    if unknown:
        raise InvalidArgumentError(
            "The initializer of the array is unknown: its class does not declare one.",
            where=a_few(unknown, 5),
            write="init(key, lambda key, shape: ...) for these, or arrays = {name: "
            "pax.Declared(..., init=...)} in the class",
        )
    leaves, treedef = tree_flatten(net)
    for n, own_key in zip(meant, split_rng_key(key, len(meant), "init: key")):
        new = jnp.asarray(makers[n](own_key, leaves[n].shape))  # type: ignore[misc]
        if new.shape != leaves[n].shape:
            raise InvalidArgumentError(
                "The initializer made an array of another shape.",
                where=found[n].name,
                got=f"{new.shape} where the net has {leaves[n].shape}",
                write="lambda key, shape: ..., which makes an array of this shape",
            )
        leaves[n] = new.astype(leaves[n].dtype)
    return tree_unflatten(treedef, leaves)


def _initializer_of(leaf: FilteredLeaf) -> Initializer | None:
    owner = leaf.owners[-1]
    found = declared_in(owner).get(leaf.attribute)
    return found.declared.init(owner) if found and found.declared.init else None
