"""Arrays for layers that a source lacks, such as a new head, in its framework's layout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from pax_export._foundations.errors import AdoptionError, a_few
from pax_export._foundations.types import Array, PyTree
from pax_export.core import is_at
from pax_export.weights.adoption._groups import Group
from pax_export.weights.adoption._layers import Layer, Leaf, find_layers
from pax_export.weights.adoption._layouts import find_recipes
from pax_export.weights.adoption._name_parsing import (
    BIAS,
    MEAN,
    VAR,
    WEIGHT,
    name_of_words,
    parse_array_name,
)
from pax_export.weights.adoption._options import named_by
from pax_export.weights.adoption._pieces import Piece, Recipe, undo_piece
from pax_export.weights.sources import Source

_TORCH = {WEIGHT: "weight", BIAS: "bias", MEAN: "running_mean", VAR: "running_var"}
_DENSE = {WEIGHT: "kernel", BIAS: "bias"}
_KERAS_NORM = {WEIGHT: "gamma", BIAS: "beta", MEAN: "moving_mean", VAR: "moving_variance"}
_FLAX_NORM = {WEIGHT: "scale", BIAS: "bias", MEAN: "mean", VAR: "var"}
_NORMS = ("norm", "batch_norm")
#: How frameworks call the arrays of a layer; those that are not here call them as torch does.
_NAMES = {
    "keras": {"embed": {WEIGHT: "embeddings"}, **dict.fromkeys(_NORMS, _KERAS_NORM)},
    "flax": {"embed": {WEIGHT: "embedding"}, **dict.fromkeys(_NORMS, _FLAX_NORM)},
}


def choose_arrays(
    net: PyTree, leaves: Mapping[str, Array], recipe: Recipe, origin: str, source: Source,
    left: Sequence[str], rename: Mapping[str, str],
) -> tuple[dict[str, np.ndarray], set[str]]:  # fmt: skip
    """Makes an array of each leaf that a recipe does not fill, without keys and counters.

    `left` are the arrays of the source that fill no leaf; `rename` maps names in the source, or new
    names, to paths of the module. Returns the new arrays by name, and the names of those that they
    replace.
    """
    layers = []
    for layer in find_layers(net).layers:
        new = {role: leaf for role, leaf in layer.leaves.items() if leaf.path not in recipe}
        layers += [replace(layer, leaves=new)] if new else []
    # A new head that has other classes is in place of the one of its name.
    named = {parse_array_name(name).layer for name in left}
    rename = {**{each.path: each.path for each in layers if each.path in named}, **rename}
    used = {piece.source for pieces in recipe.values() for piece in pieces}
    hints = {
        target: name for name, target in rename.items()
        if any(is_at(leaf.path, target) for each in layers for leaf in each.leaves.values())
    }  # fmt: skip
    replaced = {each for name in hints.values() for each in named_by(name, source.entries)}
    if replaced & used:
        name = min(replaced & used)
        leaf = next(path for path, several in recipe.items() if name in {p.source for p in several})
        raise AdoptionError(
            "An array of the source would be written by two leaves.",
            where=name,
            got=f"{leaf}, and what rename= says: {', '.join(hints)}",
            write="another name in rename=",
        )
    beside = {layer.path: _layer_beside(layer, recipe) for layer in layers}
    lost = [
        layer for layer in layers if not (beside[layer.path] or _is_named_by_user(layer, hints))
    ]
    remaining = [name for name in left if name not in replaced]
    if lost and remaining:
        raise _undecided_error(lost, remaining, source)
    in_use = set(source.entries) - replaced
    parting = "/" if any("/" in name for name in source.entries) else "."
    arrays: dict[str, np.ndarray] = {}
    for layer in layers:
        for role, leaf in layer.leaves.items():
            name, old = _array_name(layer, role, leaf, origin, hints, beside[layer.path], replaced)
            name = name if old or _is_named_by_user(layer, hints) else name.replace(".", parting)
            if name in in_use:
                raise AdoptionError(
                    "The name of a new array is already in the source.",
                    where=name,
                    got=f"the leaf {leaf.path}",
                    write=f'rename={{"another.name": "{leaf.path}"}}',
                )
            in_use.add(name)
            piece = _piece_for_leaf(layer, role, leaf, name, origin)
            value = np.asarray(leaves[leaf.path])
            dtype = value.dtype if old is None else source.entries[old].dtype
            arrays[name] = np.empty(piece.shape, dtype)
            undo_piece(value, piece, arrays[name])
    return arrays, replaced


def _is_named_by_user(layer: Layer, hints: Mapping[str, str]) -> bool:
    return all(_nearest_target(leaf.path, hints) is not None for leaf in layer.leaves.values())


def _nearest_target(path: str, hints: Mapping[str, str]) -> str | None:
    return max((each for each in hints if is_at(path, each)), key=len, default=None)


def _layer_beside(layer: Layer, recipe: Recipe) -> str:
    """Returns the source layer of a leaf's siblings: ``fc`` for ``fc.weight``."""
    for path, pieces in recipe.items():
        if path.rpartition(".")[0] == layer.path and len(pieces) == 1 and layer.kind != "free":
            found = parse_array_name(pieces[0].source)
            if found.role is not None and pieces[0].source.startswith(found.layer):
                return found.layer
    return ""


def _array_name(
    layer: Layer, role: str, leaf: Leaf, origin: str, hints: Mapping[str, str],
    beside: str, replaced: set[str],
) -> tuple[str, str | None]:  # fmt: skip
    target = _nearest_target(leaf.path, hints)
    if target == leaf.path:
        name = hints[leaf.path]
        return name, name if name in replaced else None
    at = layer.path
    if target is not None:
        at = hints[target] + layer.path[len(target) :] if is_at(layer.path, target) else ""
    elif beside:
        at = beside
    old = [name for name in replaced if _is_of(name, at, role)] if target is not None else []
    if len(old) == 1:
        return old[0], old[0]
    below = leaf.path[len(layer.path) :].lstrip(".")
    word = (
        below if origin == "pax" or layer.kind == "free" else _role_word(origin, layer.kind, role)
    )
    return (f"{at}.{word}" if at else word) if word else at, None


def _is_of(name: str, at: str, role: str) -> bool:
    found, layer = parse_array_name(name), parse_array_name(f"{at}.weight")
    return found.role == role and found.layer.replace("/", ".") == layer.layer.replace("/", ".")


def _role_word(origin: str, kind: str, role: str) -> str:
    framework = origin.partition(",")[0]
    names = _NAMES[framework].get(kind, _DENSE) if framework in _NAMES else _TORCH
    return names.get(role, role)


def _piece_for_leaf(layer: Layer, role: str, leaf: Leaf, name: str, origin: str) -> Piece:
    """The array that `adopt` would read as this leaf, and how."""
    whole = Piece(name, leaf.shape)
    if origin == "pax" or layer.kind == "free":
        return whole
    alone = replace(layer, leaves={role: leaf})
    words = parse_array_name(name).words
    front = 0 if layer.stack is None else len(layer.stack.sizes)
    behind = leaf.shape[front:]
    norm = layer.kind in _NORMS  # elsewhere, elements along one axis
    orders = [(math.prod(behind),)] if norm else itertools.permutations(behind)
    for shape in dict.fromkeys(orders):
        piece = Piece(name, (*leaf.shape[:front], *shape))
        group = Group(layer.path, {role: piece}, name_of_words(words), words, 0)
        for way in find_recipes(alone, group, origin, {}):
            (found,) = way[leaf.path]
            if norm or all(step[0] in ("transpose", "flip") for step in found.steps):
                return found
    raise AdoptionError(
        f"A new layer cannot be written in the layout of {origin}.",
        where=leaf.path,
        got=f"{layer.kind}, {leaf.says}{list(leaf.shape)}",
        write="pax.save_weights(net, path), which writes every leaf under its path",
    )


def _undecided_error(layers: Sequence[Layer], left: Sequence[str], source: Source) -> AdoptionError:
    leaves = [leaf for layer in layers for leaf in layer.leaves.values()]
    own = layers[0].path
    beside = own or leaves[0].path
    theirs = parse_array_name(left[0]).layer
    at = theirs if left[0].startswith(theirs) else left[0]
    there = [f"{name}{list(source.entries[name].shape)}" for name in left]
    error = AdoptionError(
        "Leaves of the module have no array in the source, and arrays of the source no leaf, so "
        "the pairing of the layers is ambiguous.",
        where=source.where,
        got=f"{a_few([f'{leaf.path}{list(leaf.shape)}' for leaf in leaves], 6)} without an array; "
        f"{a_few(there, 6)} without a leaf",
        write=f'rename={{"{at}": "{own}"}} to write {own or "the module"} in place '
        f'of {at}; rename={{"{beside}": "{beside}"}} to write it beside, {at} stays as it is',
    )
    error.missing = tuple(leaf.path for leaf in leaves)
    error.left = tuple(left)
    return error
