"""What has no counterpart: leaves and arrays, by the names that have one; and new layers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pax_export._foundations.errors import AdoptionError, a_few
from pax_export._foundations.types import PyTree
from pax_export.core import is_at
from pax_export.weights.adoption._array_transforms import Piece, undo_piece
from pax_export.weights.adoption._groups import Fits, Group
from pax_export.weights.adoption._layers import Layer, Leaf, find_layers
from pax_export.weights.adoption._layouts import Recipe, find_recipes
from pax_export.weights.adoption._name_parsing import (
    BIAS,
    KINDS,
    MEAN,
    ROLES,
    VAR,
    WEIGHT,
    Name,
    name_of_words,
    parse_array_name,
)
from pax_export.weights.adoption._options import named_by
from pax_export.weights.sources import Source

#: Words for a part or a copy that the model itself does not use.
_BESIDE = frozenset(
    "aux auxiliary extra teacher student ema swa shadow momentum velocity avg averaged backup "
    "old previous target draft optimizer optim opt grad gradient exp".split()
)


def without_strangers(layers: Sequence[Layer], groups: Sequence[Group], fits: Fits) -> Fits:
    """Removes from `fits` arrays of other names: ``aux_bn`` must not fill a missing ``bn``."""
    names = [group.name for group in groups if group.within is None]
    theirs = {tail for name in names for tail in _name_endings(name)}
    whole = {(name.words, name.numbers) for name in names}
    alike = [
        layer for layer in layers
        if (layer.name.words, layer.name.numbers) in theirs
        or not whole.isdisjoint(_name_endings(layer.name))
    ]  # fmt: skip
    if 2 * len(alike) < len(layers):
        return fits
    # A word of most names, as in a file of the teacher alone, distinguishes none.
    beside = {
        word for word in _BESIDE if 2 * sum(word in name.meaning for name in names) <= len(names)
    }

    def fits_by_name(layer: Layer, group: Group) -> bool:
        if group.within is None and beside & group.own_words - layer.meaning:
            return False
        return fits(layer, group) and not is_stranger(layer, group)

    return fits_by_name


def _name_endings(name: Name) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
    for start in range(len(name.words)):
        words = name.words[start:]
        yield words, name.numbers[len(name.numbers) - words.count("#") :]


def is_stranger(layer: Layer, group: Group) -> bool:
    """Returns whether the name of a group has meaningful words, and none of the layer's."""
    theirs, ours = group.own_words - ROLES, layer.meaning - ROLES
    if group.within is not None or theirs <= KINDS or not ours.isdisjoint(group.meaning):
        return False
    # "patches" and "patch", "pos" and "positions" are no other words.
    return not any(
        one.startswith(other) or other.startswith(one) for one in theirs for other in ours
    )


def without_counterpart(
    ours: Mapping[Any, list[Any]], theirs: Mapping[Any, list[Any]], chosen: Mapping[Any, list[Any]]
) -> tuple[list[Layer], list[Group]]:
    """The layers and groups, each by their words, that remain without those of equal names."""
    wanted = {own: [own] if own in theirs else others for own, others in chosen.items()}
    missing: list[Layer] = []
    left = dict(theirs)
    for own, layers in ours.items():
        only = wanted[own][0] if len(wanted[own]) == 1 else None
        if only is None or sum(only in others for others in wanted.values()) > 1:
            missing += layers
            continue
        groups = left.pop(only)
        count = own.count("#")
        mine, other = ({each.name.numbers[:count] for each in side} for side in (layers, groups))
        if mine <= other or other <= mine:
            missing += [layer for layer in layers if layer.name.numbers[:count] not in other]
            left[only] = [group for group in groups if group.name.numbers[:count] not in mine]
        elif len(mine) > len(other):
            missing += layers
        else:
            left[only] = groups
    return missing, [group for groups in left.values() for group in groups]


# --- layers without arrays in the source, such as a new head, in its framework's layout


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
    net: PyTree, leaves: Mapping[str, PyTree], recipe: Recipe, origin: str, source: Source,
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
    beside: str, replaced: Iterable[str],
) -> tuple[str, str | None]:  # fmt: skip
    target = _nearest_target(leaf.path, hints)
    if target is not None and target == leaf.path:
        return hints[target], next((name for name in replaced if name == hints[target]), None)
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
