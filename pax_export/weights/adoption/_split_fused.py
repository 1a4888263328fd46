"""Splits leaves that a file may store as several arrays: stacks of ``Scan``, and ``qkv``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from pax_export.weights.adoption._array_transforms import LeafPart, Shape
from pax_export.weights.adoption._groups import (
    Fits,
    Group,
    Three,
    is_fused,
    one_of_three,
    without_fused,
)
from pax_export.weights.adoption._layers import Layer, Leaf, insert_numbers, insert_numbers_in_name
from pax_export.weights.adoption._name_parsing import BIAS, WEIGHT, name_of_words, split_words

PARTS = ("query", "key", "value")
_ALL = slice(None)


@dataclass(frozen=True)
class FusedOrder:
    """The order of queries, keys and values in one array: "blocks" or "by head"."""

    says: str
    chosen: bool  # whether the user chose it


def may_be_fused(layer: Layer, order: FusedOrder) -> bool:
    """Returns whether a layer may fuse queries, keys and values, by its name or the options."""
    return layer.kind in ("linear", "free") and (order.chosen or is_fused(split_words(layer.path)))


def find_arrangements(
    layers: Sequence[Layer], groups: Sequence[Group], fits: Fits, order: FusedOrder
) -> Iterator[list[list[Layer]]]:
    """Yields lists of layers with fused ones split, where the file has the parts."""
    if not any(layer.stack or may_be_fused(layer, order) for layer in layers):
        yield [list(layers)]
        return
    split = _Splitter(groups, fits, order).split
    ways = max([len(layer.stack.roots) for layer in layers if layer.stack], default=1)
    seen: dict[tuple[str, ...], list[Layer]] = {}
    for whole_first in (True, False):
        before = len(seen)
        for way in range(ways):
            found = [part for layer in layers for part in split(layer, way, whole_first)]
            seen.setdefault(tuple([layer.path for layer in found]), found)
        if len(seen) > before:
            yield list(seen.values())[before:]


class _Splitter(NamedTuple):
    """Splits layers into the parts that a file has."""

    groups: Sequence[Group]
    fits: Fits
    order: FusedOrder

    def split(self, layer: Layer, way: int, whole_first: bool) -> list[Layer]:
        """Returns the first split whose parts are all in the file; `way` is one of numbers."""
        if (whole_first or layer.stack is None) and self._in_file([layer]):
            return [layer]
        fused = may_be_fused(layer, self.order)
        if fused and (layer.stack is None or layer.kind == "free"):
            if self._called(parts := self._split_fused([layer])):
                return parts
        if layer.stack is not None:
            single = unfold_stack(layer, way)
            if self._in_file(single):
                return single
            if fused and self._called(parts := self._split_fused(single)):
                return parts
        return [layer]

    def _in_file(self, parts: Sequence[Layer]) -> bool:
        kinds = {part.signature: part for part in parts}
        return bool(parts) and all(
            any(self.fits(part, group) for group in self.groups) for part in kinds.values()
        )

    def _called(self, parts: Sequence[Layer]) -> bool:
        """Whether the file has queries, keys and values that are called so."""
        return bool(parts) and all(
            any(word in group.meaning and self.fits(part, group) for group in self.groups)
            for word, part in zip(PARTS, parts)
        )

    def _split_fused(self, layers: Sequence[Layer]) -> list[Layer]:
        """Splits each layer into three; returns nothing if its shapes allow several ways."""
        found = [_split_fused_layer(layer, self.groups, self.order) for layer in layers]
        return list(itertools.chain.from_iterable(found)) if all(found) else []


def unfold_stack(layer: Layer, way: int = 0) -> list[Layer]:
    """The stacked layers; `way` indexes `Stack.roots`."""
    stack = layer.stack
    assert stack is not None
    roots = stack.roots[min(way, len(stack.roots) - 1)]
    says = f"{' x '.join(map(str, stack.sizes))} stacked by their numbers"
    found = []
    for numbers in np.ndindex(*stack.sizes):
        index = tuple([slice(number, number + 1) for number in numbers])
        leaves = {
            role: replace(
                leaf,
                shape=leaf.shape[len(index) :],
                slot=LeafPart(
                    leaf.shape, index + (_ALL,) * (len(leaf.shape) - len(index)), (), says
                ),
                part=insert_numbers(leaf.path, roots, numbers),
            )
            for role, leaf in layer.leaves.items()
        }
        path = insert_numbers(layer.path, roots, numbers)
        name = insert_numbers_in_name(layer.name, roots, numbers)
        found.append(replace(layer, path=path, name=name, leaves=leaves, stack=None))
    return found


# Queries, keys and values


def _split_fused_layer(layer: Layer, groups: Sequence[Group], order: FusedOrder) -> list[Layer]:
    """Splits a layer into three; returns nothing if its shapes allow several ways."""
    found = []
    sizes = _sizes_in_file(layer, groups)
    for number, word in enumerate(PARTS):
        leaves: dict[str, Leaf] = {}
        kinds = set()
        for role, leaf in layer.leaves.items():
            part = _part_of_leaf(layer, role, leaf, number, order, sizes)
            if part is None:
                return []
            kind, shape, part_of_leaf = part
            kinds.add(kind)
            leaves[role] = replace(leaf, shape=shape, slot=_slot_within(leaf, part_of_leaf),
                                   part=f"{leaf.says} ({word})")  # fmt: skip
        name = name_of_words([*without_fused(split_words(layer.path)), word])
        kind = "linear" if "linear" in kinds else layer.kind
        options = () if layer.kind == "free" else layer.options
        found.append(
            replace(layer, path=f"{layer.path}.{word}", kind=kind, leaves=leaves, name=name,
                    options=options, stack=None)
        )  # fmt: skip
    return found


def _slot_within(leaf: Leaf, part_of_leaf: LeafPart) -> LeafPart:
    """Returns a place in a leaf that may itself be a part, of one of several layers."""
    if leaf.slot is None:
        return part_of_leaf
    count = len(leaf.slot.room) - len(leaf.shape)
    return LeafPart(
        (*leaf.slot.room[:count], *part_of_leaf.room),
        (*leaf.slot.index[:count], *part_of_leaf.index),
        part_of_leaf.steps,
        f"{part_of_leaf.says}, {leaf.slot.says}",
    )


def _sizes_in_file(layer: Layer, groups: Sequence[Group]) -> dict[int, Three]:
    """Axis size -> sizes of queries, keys and values in the file, without ambiguous sums."""
    heard = [
        (group.meaning, _sizes_of(piece.after, role))
        for group in groups
        for role, piece in group.parts.items()
    ]
    return _unambiguous_sums(heard, {size for leaf in layer.leaves.values() for size in leaf.shape})


def sizes_of_module(layers: Sequence[Layer], group: Group) -> dict[int, Three]:
    """The same for an array that is three in one, by the module's queries, keys and values."""
    heard = [
        (layer.meaning, set(leaf.shape[-1:] if layer.kind == "linear" else leaf.shape))
        for layer in layers
        for leaf in layer.leaves.values()
    ]
    return _unambiguous_sums(heard, {size for p in group.parts.values() for size in p.shape})


def _unambiguous_sums(
    heard: Sequence[tuple[frozenset[str], set[int]]], wanted: set[int]
) -> dict[int, Three]:
    """`heard` has the words of names, and sizes that arrays with these names have."""
    queries, keys, values = (
        set().union(*[sizes for words, sizes in heard if word in words]) for word in PARTS
    )
    found: dict[int, set[Three]] = {}
    for query, key in itertools.product(queries, keys & values):
        if query + 2 * key in wanted:
            found.setdefault(query + 2 * key, set()).add((query, key, key))
    return {size: next(iter(ways)) for size, ways in found.items() if len(ways) == 1}


def _sizes_of(shape: Shape, role: str) -> set[int]:
    """Returns the possible sizes of queries by the shape of their array; heads may be an axis."""
    if role == BIAS:
        return {math.prod(shape)}
    return set(shape) if len(shape) < 3 else {math.prod(shape[1:])}


def _part_of_leaf(
    layer: Layer, role: str, leaf: Leaf, number: int, order: FusedOrder, sizes: dict[int, Three]
) -> tuple[str, Shape, LeafPart] | None:
    """Returns the layer kind, shape and place of one of the three parts of a leaf."""
    shape, rank = leaf.shape, len(leaf.shape)
    bias = role == BIAS or rank == 1
    three = layer.kind == "free" and rank == (2 if role == BIAS else 3)
    if not three and (role not in (WEIGHT, BIAS) or rank != (1 if bias else 2)):
        return None
    axes = range(rank) if bias or layer.kind != "linear" else [1]
    axes = [axis for axis in axes if (shape[axis] == 3 if three else shape[axis] in sizes)]
    if len(axes) != 1:
        return None
    axis = axes[0]
    if three:
        index = (*[_ALL] * axis, slice(number, number + 1), *[_ALL] * (rank - axis - 1))
        rest = (*shape[:axis], *shape[axis + 1 :])
        return layer.kind, rest, LeafPart(shape, index, (), "one of three")
    found = _cut_along_axis(layer, shape, axis, number, order, sizes[shape[axis]])
    if found is None or bias:
        return found and (layer.kind, *found)
    part, part_of_leaf = found
    if axis == 1:
        return "linear", part, part_of_leaf
    return "linear", part[::-1], replace(part_of_leaf, steps=(("transpose", (1, 0)),))


def _cut_along_axis(
    layer: Layer, shape: Shape, axis: int, number: int, order: FusedOrder, sizes: Three
) -> tuple[Shape, LeafPart] | None:
    part = (*shape[:axis], sizes[number], *shape[axis + 1 :])
    heads = layer.heads
    other = one_of_three(sizes, number, "by head", heads)
    if order.says == "blocks" and not order.chosen:
        if heads is None or (other is None and len(set(sizes)) > 1):
            return None  # the result of the other order is unknown
    found = other if order.says == "by head" else one_of_three(sizes, number, "blocks", heads)
    if found is None:
        return None
    split, at, span = found
    shape_split = (*shape[:axis], *split, *shape[axis + 1 :])
    index = tuple(
        [span if part_of_leaf == axis + at else _ALL for part_of_leaf in range(len(shape_split))]
    )
    return part, LeafPart(shape_split, index, (), f"joined, {'by head' if at else 'blocks'}")
