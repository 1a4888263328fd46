"""Reinitializes parameters of a net."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.tree_util import tree_flatten, tree_unflatten

from pax_export._errors import InvalidArgumentError, a_few
from pax_export._types import PyTree
from pax_export.core._declared import Initializer, declared_in
from pax_export.core._rng import split_rng_key
from pax_export.core.selections._filters import FilteredLeaf, Param, as_rule, leaves_of
from pax_export.core.selections._selectable import Steps, at_or_below, dotted_path, path_or_root


def reinitialize(
    net: PyTree, paths: tuple[Steps, ...], key: Any, initializer: Initializer | None
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
