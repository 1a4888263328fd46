"""Splits leaves that a file may store as several arrays: stacks of ``Scan``, and ``qkv``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pax_export.weights.adoption._array_transforms import LeafPart, Shape, Step
from pax_export.weights.adoption._groups import (
    Group,
    Three,
    is_fused_name,
    one_of_three,
    without_fused,
)
from pax_export.weights.adoption._layers import Layer, Leaf
from pax_export.weights.adoption._name_parsing import BIAS, WEIGHT, name_of_words, split_words
from pax_export.weights.adoption._stacks import insert_numbers, insert_numbers_in_name

PARTS = ("query", "key", "value")
_ALL = slice(None)


@dataclass(frozen=True)
class FusedOrder:
    """The order of queries, keys and values in one array: "blocks" or "by head"."""

    says: str
    told: bool  # whether the user chose it


def may_be_fused(layer: Layer, order: FusedOrder) -> bool:
    """Returns whether a layer may fuse queries, keys and values, by its name or the options."""
    return layer.kind in ("linear", "free") and (
        order.told or is_fused_name(split_words(layer.path))
    )


def find_arrangements(
    layers: Sequence[Layer],
    groups: Sequence[Group],
    fits: Callable[[Layer, Group], bool],
    order: FusedOrder,
) -> Iterator[list[list[Layer]]]:
    """Yields lists of layers with fused ones split, where the file has the parts."""
    if not any(layer.stack or may_be_fused(layer, order) for layer in layers):
        yield [list(layers)]
        return
    seen: set[tuple[str, ...]] = set()
    for whole_first in (True, False):
        alike = []
        for way in itertools.count():
            several = [_split_layer(each, groups, fits, order, way, whole_first) for each in layers]
            found = list(itertools.chain.from_iterable(several))
            key = tuple([layer.path for layer in found])
            if key not in seen:
                seen.add(key)
                alike.append(found)
            if all(way + 1 >= _count_numberings(*pair) for pair in zip(layers, several)):
                break
        if alike:
            yield alike


def _count_numberings(layer: Layer, parts: Sequence[Layer]) -> int:
    """Counts the possible numberings of a layer's parts."""
    is_whole = isinstance(parts, tuple)
    return 1 if is_whole or layer.stack is None else len(layer.stack.roots)


def _split_layer(
    layer: Layer,
    groups: Sequence[Group],
    fits: Callable[[Layer, Group], bool],
    order: FusedOrder,
    way: int,
    whole_first: bool,
) -> Sequence[Layer]:
    """Returns the first split whose parts are all in the file; a tuple if both forms are."""

    def in_file(parts: Sequence[Layer]) -> bool:
        kinds = {part.signature: part for part in parts}
        return bool(parts) and all(any(fits(part, g) for g in groups) for part in kinds.values())

    def called(parts: Sequence[Layer]) -> bool:
        """Whether the file has queries, keys and values that are called so."""
        first = zip(PARTS, parts[:3])
        return bool(parts) and all(
            any(word in group.said and fits(part, group) for group in groups)
            for word, part in first
        )

    if (whole_first or layer.stack is None) and in_file([layer]):
        return (layer,)
    fused = may_be_fused(layer, order)
    if fused and (layer.stack is None or layer.kind == "free"):
        if called(parts := _split_fused_layer(layer, groups, order)):
            return parts
    if layer.stack is not None:
        single = unfold_stack(layer, way)
        if in_file(single):
            return single
        if fused and called(parts := _split_fused_layers(single, groups, order)):
            return parts
    return [layer]


def unfold_stack(layer: Layer, way: int = 0) -> list[Layer]:
    """The stacked layers; `way` indexes `Stack.roots`."""
    stack = layer.stack
    if stack is None:
        return [layer]
    roots = stack.roots[min(way, len(stack.roots) - 1)]
    says = f"{' x '.join(map(str, stack.sizes))} stacked by their numbers"
    found = []
    for numbers in np.ndindex(*stack.sizes):
        index = tuple([slice(number, number + 1) for number in numbers])
        leaves = {
            role: replace(
                leaf,
                shape=leaf.shape[len(index) :],
                place=LeafPart(
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
            kind, shape, place = part
            kinds.add(kind)
            leaves[role] = replace(leaf, shape=shape, place=_place_within(leaf, place),
                                   part=f"{leaf.says} ({word})")  # fmt: skip
        name = name_of_words([*without_fused(tuple(split_words(layer.path))), word])
        kind = "linear" if "linear" in kinds else layer.kind
        options = () if layer.kind == "free" else layer.options
        found.append(
            replace(layer, path=f"{layer.path}.{word}", kind=kind, leaves=leaves, name=name,
                    options=options, stack=None)
        )  # fmt: skip
    return found


def _split_fused_layers(
    layers: Sequence[Layer], groups: Sequence[Group], order: FusedOrder
) -> list[Layer]:
    found = [_split_fused_layer(layer, groups, order) for layer in layers]
    return list(itertools.chain.from_iterable(found)) if all(found) else []


def _place_within(leaf: Leaf, place: LeafPart) -> LeafPart:
    """Returns a place in a leaf that may itself be a part, of one of several layers."""
    if leaf.place is None:
        return place
    count = len(leaf.place.room) - len(leaf.shape)
    return LeafPart(
        (*leaf.place.room[:count], *place.room),
        (*leaf.place.index[:count], *place.index),
        place.steps,
        f"{place.says}, {leaf.place.says}",
    )


def _sizes_in_file(layer: Layer, groups: Sequence[Group]) -> dict[int, Three]:
    """Axis size -> sizes of queries, keys and values in the file, without ambiguous sums."""
    heard: dict[str, set[int]] = {word: set() for word in PARTS}
    for group in groups:
        for word in heard.keys() & group.said:
            for role, piece in group.parts.items():
                heard[word] |= _sizes_of(piece.after, role)
    return _unambiguous_sums(heard, {size for leaf in layer.leaves.values() for size in leaf.shape})


def sizes_of_module(layers: Sequence[Layer], group: Group) -> dict[int, Three]:
    """The same for an array that is three in one, by the module's queries, keys and values."""
    heard: dict[str, set[int]] = {word: set() for word in PARTS}
    for layer in layers:
        for word in heard.keys() & layer.said:
            for leaf in layer.leaves.values():
                heard[word] |= set(leaf.shape[-1:] if layer.kind == "linear" else leaf.shape)
    return _unambiguous_sums(
        heard, {size for piece in group.parts.values() for size in piece.shape}
    )


def _unambiguous_sums(heard: dict[str, set[int]], wanted: set[int]) -> dict[int, Three]:
    found: dict[int, set[Three]] = {}
    for query, key in itertools.product(heard["query"], heard["key"] & heard["value"]):
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
    if layer.kind == "free" and rank == (2 if bias and role == BIAS else 3):
        return _along_an_axis_of_three(layer, shape, number)
    if role not in (WEIGHT, BIAS) or rank != (1 if bias else 2):
        return None
    axes = [0] if bias else [1] if layer.kind == "linear" else [0, 1]
    axes = [axis for axis in axes if shape[axis] in sizes]
    if len(axes) != 1:
        return None
    axis = axes[0]
    found = _cut_along_axis(layer, shape, axis, number, order, sizes[shape[axis]])
    if found is None or bias:
        return found and (layer.kind, *found)
    part, place = found
    if axis == 1:
        return "linear", part, place
    turned: tuple[Step, ...] = (("transpose", (1, 0)),)
    return "linear", part[::-1], replace(place, steps=turned)


def _along_an_axis_of_three(
    layer: Layer, shape: Shape, number: int
) -> tuple[str, Shape, LeafPart] | None:
    axes = [axis for axis, size in enumerate(shape) if size == 3]
    if len(axes) != 1:
        return None
    index = tuple([slice(number, number + 1) if axis == axes[0] else _ALL
                   for axis in range(len(shape))])  # fmt: skip
    rest = tuple([size for axis, size in enumerate(shape) if axis != axes[0]])
    return layer.kind, rest, LeafPart(shape, index, (), "one of three")


def _cut_along_axis(
    layer: Layer, shape: Shape, axis: int, number: int, order: FusedOrder, sizes: Three
) -> tuple[Shape, LeafPart] | None:
    """Returns the shape of a part along an axis, and its place."""
    part = (*shape[:axis], sizes[number], *shape[axis + 1 :])
    heads = layer.heads
    other = one_of_three(sizes, number, "by head", heads)
    if order.says == "blocks" and not order.told:
        if heads is None or (other is None and len(set(sizes)) > 1):
            return None  # the result of the other order is unknown
    found = other if order.says == "by head" else one_of_three(sizes, number, "blocks", heads)
    if found is None:
        return None
    split, at, taken = found
    room = (*shape[:axis], *split, *shape[axis + 1 :])
    index = tuple([taken if place == axis + at else _ALL for place in range(len(room))])
    return part, LeafPart(room, index, (), f"joined, {'by head' if at else 'blocks'}")
