"""Leaves and arrays without counterpart, by the names that have one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pax_export.weights.adoption._groups import Fits, Group
from pax_export.weights.adoption._layers import Layer
from pax_export.weights.adoption._name_parsing import KINDS, ROLES, Name

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
        word for word in _BESIDE if 2 * sum(word in name.said for name in names) <= len(names)
    }

    def fits_by_name(layer: Layer, group: Group) -> bool:
        if group.within is None and beside & group.own_words - layer.said:
            return False
        return fits(layer, group) and not is_stranger(layer, group)

    return fits_by_name


def _name_endings(name: Name) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
    for start in range(len(name.words)):
        words = name.words[start:]
        yield words, name.numbers[len(name.numbers) - words.count("#") :]


def is_stranger(layer: Layer, group: Group) -> bool:
    """Returns whether the name of a group has meaningful words, and none of the layer's."""
    said, ours = group.own_words - ROLES, layer.said - ROLES
    if group.within is not None or said <= KINDS or not ours.isdisjoint(group.said):
        return False
    # "patches" and "patch", "pos" and "positions" are no other words.
    return not any(one.startswith(other) or other.startswith(one) for one in said for other in ours)


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
