"""Leaves and arrays that hold queries, keys and values in one, where the other side has three.

Stacks of layers are split here, too, where the file has single ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pax_export.weights.adoption._groups import Fits, Group, is_conv1d_of_transformers
from pax_export.weights.adoption._layers import Layer, Leaf, unfold_stack
from pax_export.weights.adoption._name_parsing import BIAS, WEIGHT, name_of_words, split_words
from pax_export.weights.adoption._pieces import Index, LeafPart, Piece, Shape, Step

PARTS = ("query", "key", "value")
_ALL = slice(None)
_KINDS = ("linear", "free")  # of layers that may hold all three

#: Sizes of queries, keys and values along an axis.
Three = tuple[int, int, int]
#: Words for queries, keys and values in one; the second is InternLM2's and MPT's.
_IN_ONE = frozenset(("qkv", "wqkv"))
#: Endings of such names in words, whether they imply the order in blocks, and what is left.
_FUSED: dict[tuple[str, ...], tuple[bool, tuple[str, ...]]] = {
    ("c", "attn"): (True, ("attn",)), ("in", "proj"): (True, ()),
    ("query", "key", "value"): (False, ()),
}  # fmt: skip


def _fused_ending(words: Sequence[str]) -> tuple[str, ...] | None:
    return next((each for each in _FUSED if tuple(words[-len(each) :]) == each), None)


def _without_fused(words: Sequence[str]) -> list[str]:
    """Returns the words without those that mark a fused array."""
    if ending := _fused_ending(words):
        return [*words[: -len(ending)], *_FUSED[ending][1]]
    return [word for word in words if word not in _IN_ONE]


def is_fused(words: Sequence[str]) -> bool:
    """Whether these words call something queries, keys and values in one."""
    return _fused_ending(words) is not None or not _IN_ONE.isdisjoint(words)


def _says_order(words: Sequence[str]) -> bool:
    """Returns whether such a name implies the order in blocks."""
    ending = _fused_ending(words)
    return ending is not None and _FUSED[ending][0]


class _FusedPart(NamedTuple):
    """The queries, keys or values of an array that holds all three along an axis."""

    shape: Shape
    view: Shape  # of the array, in which they are at `where`
    where: Index
    by_head: bool


@dataclass(frozen=True)
class FusedOrder:
    """The order of queries, keys and values in one array: "blocks" or "by head"."""

    says: str
    chosen: bool  # whether the user or the name chose it; else the result of the other is required

    def cut(
        self, shape: Shape, axis: int, sizes: Three, number: int, heads: int | None
    ) -> _FusedPart | None:
        """The queries (0), keys (1) or values (2); None where the order is unknown.

        By head, the queries that share a key and a value precede them, as in Falcon and Megatron.
        """
        by_head = _by_head(sizes, number, heads)
        unknown = heads is None or (by_head is None and len(set(sizes)) > 1)
        if sum(sizes) != shape[axis] or (unknown and not self.chosen):
            return None
        blocks = (sum(sizes),), 0, slice(sum(sizes[:number]), sum(sizes[: number + 1]))
        part = blocks if self.says == "blocks" or by_head == () else by_head
        if not part:
            return None
        room, at, span = part
        view = (*shape[:axis], *room, *shape[axis + 1 :])
        index = tuple([span if each == axis + at else _ALL for each in range(len(view))])
        return _FusedPart((*shape[:axis], sizes[number], *shape[axis + 1 :]), view, index, at > 0)


def _by_head(
    sizes: Three, number: int, heads: int | None
) -> tuple[tuple[int, ...], int, slice] | tuple[()] | None:
    """The view of a fused axis, the axis and the slice there; empty if the blocks are the same."""
    if not heads or sizes[0] % heads or sizes[1] != sizes[2]:
        return None
    size = sizes[0] // heads
    keys = sizes[1] // size if size else 0
    if not keys or sizes[1] % size or heads % keys:
        return None
    if keys == 1:
        return ()
    shared = heads // keys
    return (keys, shared + 2, size), 1, (slice(shared), slice(shared, -1), slice(-1, None))[number]


def fused_orders(
    layers: Sequence[Layer], groups: Sequence[Group], chosen: str | None
) -> tuple[FusedOrder, ...]:
    """The orders that something in one may have."""
    if chosen is not None:
        return (FusedOrder(chosen, chosen=True),)
    blocks, heads = FusedOrder("blocks", chosen=False), FusedOrder("by head", chosen=False)
    unsure = any(is_fused(group.raw) and not _says_order(group.raw) for group in groups)
    unsure = unsure or any(_may_be_fused(layer, blocks) for layer in layers)
    return (blocks, heads) if unsure else (blocks,)


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


# The file's side


def split_fused_group(
    group: Group, layers: Sequence[Layer], origin: str, order: FusedOrder
) -> list[Group]:
    """The queries, keys and values of a group of all three; none where their sizes are unknown."""
    sizes = _sizes_of_module(layers, group)
    counts = {layer.heads for layer in layers if layer.kind in _KINDS} - {None}
    heads = next(iter(counts)) if len(counts) == 1 else None
    order = FusedOrder("blocks", chosen=True) if _says_order(group.raw) else order
    found = []
    for number, word in enumerate(PARTS):
        parts: dict[str, Piece] = {}
        for role, piece in group.parts.items():
            axis = _fused_axis(piece, origin, group)
            if axis is None:
                return []
            third = piece.shape[axis] // 3
            three = sizes.get(piece.shape[axis]) or (third, third, third)
            cut = order.cut(piece.shape, axis, three, number, heads)
            if cut is None:
                return []
            parts[role] = replace(
                piece, split=cut.view, take=cut.where, steps=(("reshape", cut.shape),),
                says=f"its {word} part",
            )  # fmt: skip
        name = name_of_words([*_without_fused(group.raw), word])
        path = f"{group.path} ({word})"
        found.append(replace(group, path=path, parts=parts, name=name, sure=True))
    return found


def _fused_axis(piece: Piece, origin: str, group: Group) -> int | None:
    if piece.split is not None or not 1 <= len(piece.shape) <= 2:
        return None
    if len(piece.shape) == 1:
        return 0
    of_conv1d = origin == "torch, Conv1D" and not is_conv1d_of_transformers(group)
    return 0 if of_conv1d or origin in ("torch", "mlx", "tflite") else 1


def _sizes_of_module(layers: Sequence[Layer], group: Group) -> dict[int, Three]:
    """The same for an array that is three in one, by the module's queries, keys and values."""
    heard = [
        (layer.meaning, set(leaf.shape[-1:] if layer.kind == "linear" else leaf.shape))
        for layer in layers
        for leaf in layer.leaves.values()
    ]
    return _unambiguous_sums(heard, {size for p in group.parts.values() for size in p.shape})


# The module's side


def _may_be_fused(layer: Layer, order: FusedOrder) -> bool:
    """Returns whether a layer may fuse queries, keys and values, by its name or the options."""
    return layer.kind in _KINDS and (order.chosen or is_fused(split_words(layer.path)))


def find_arrangements(
    layers: Sequence[Layer], groups: Sequence[Group], fits: Fits, order: FusedOrder
) -> Iterator[list[list[Layer]]]:
    """Yields lists of layers with fused ones split, where the file has the parts."""
    if not any(layer.stack or _may_be_fused(layer, order) for layer in layers):
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
        fused = _may_be_fused(layer, self.order)
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
        name = name_of_words([*_without_fused(split_words(layer.path)), word])
        kind = "linear" if "linear" in kinds else layer.kind
        found.append(
            replace(layer, path=f"{layer.path}.{word}", kind=kind, leaves=leaves, name=name,
                    alone=False, stack=None)
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
    cut = order.cut(shape, axis, sizes[shape[axis]], number, layer.heads)
    if cut is None:
        return None
    says = f"joined, {'by head' if cut.by_head else 'blocks'}"
    if bias:
        return layer.kind, cut.shape, LeafPart(cut.view, cut.where, (), says)
    if axis == 1:
        return "linear", cut.shape, LeafPart(cut.view, cut.where, (), says)
    turned: Step = ("transpose", (1, 0))
    return "linear", cut.shape[::-1], LeafPart(cut.view, cut.where, (turned,), says)
