"""Dense layers next to a flatten: converts torch's channels-first order.

Shapes do not tell such layers, so both orders are possible, unless the user decides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pax_export._foundations.errors import InvalidArgumentError
from pax_export.weights.adoption._groups import Group
from pax_export.weights.adoption._layers import Layer, is_norm
from pax_export.weights.adoption._name_parsing import WEIGHT
from pax_export.weights.adoption._pieces import Piece, Recipe, Shape, Step

AS_IT_IS, FIRST = "as it is", "channels_first"
#: The user's option for all layers, or the number of flattened channels by path.
Flatten = str | Mapping[str, int] | None

_CHANNELS_FIRST = ("torch", "torch, Conv1D", "onnx")
_CELLS = ("lstm", "gru", "rnn")
#: The report's text for such an array.
SAYS = "channels last"
_SPLITS = 4  # of a gated layer, or of queries, keys and values


@dataclass
class _Sizes:
    """Input and output sizes of a layer, and its path on both sides."""

    layer: Layer
    kind: str
    inputs: int
    outputs: int
    index: int
    there: int


def with_flattened(
    options: Mapping[tuple[Layer, Group], list[Recipe]],
    layers: Sequence[Layer],
    origin: str,
    chosen: Flatten,
) -> dict[tuple[Layer, Group], list[Recipe]]:
    """Adds the recipes that permute the inputs of a dense layer behind a flatten."""
    found = dict(options)
    if chosen == AS_IT_IS or origin not in _CHANNELS_FIRST:
        return found
    order = {layer: index for index, layer in enumerate(layers)}
    pairs = sorted(options, key=lambda pair: order[pair[0]])
    found_sizes = [_sizes_of(*pair, order[pair[0]]) for pair in pairs]
    sizes = [each for each in found_sizes if each is not None]
    own = {each.layer: each for each in reversed(sizes)}
    counts = {} if isinstance(chosen, str) or chosen is None else chosen
    for pair in options:
        layer, mine, asked = pair[0], own.get(pair[0]), counts.get(pair[0].path)
        channels = {
            side: _possible_channels(mine, sizes, side) if mine else [] for side in (False, True)
        }
        if asked is not None:
            sides = [side for side in channels if channels[side]] or [False]
            channels = {side: [asked] for side in sides}
            for outputs in sides:
                size = mine and (mine.outputs if outputs else mine.inputs)
                if not size or size % asked:
                    raise InvalidArgumentError(
                        "flatten=: the number of channels does not divide the layer's size.",
                        where=f"flatten=, {layer.path}",
                        got=f"{asked} channels, {size or 'no'} "
                        + ("outputs" if outputs else "inputs"),
                        write="the channels of the image that is flattened: they times its places "
                        "are the inputs",
                    )
        for outputs, numbers in channels.items():
            others = [
                {path: tuple([_reorder_piece(piece, layer, outputs, count) for piece in pieces])
                 for path, pieces in recipe.items()}
                for recipe in found[pair] for count in numbers
            ]  # fmt: skip
            only = asked is not None or chosen == FIRST
            found[pair] = others if others and only else [*found[pair], *others]
    return found


def flattened_channels(recipe: Recipe) -> int | None:
    """Returns the number of channels that a recipe flattened first, or None."""
    found = [re.search(rf"(\d+) {SAYS}", p.says) for pieces in recipe.values() for p in pieces]
    return next((int(each[1]) for each in found if each), None)


def _sizes_of(layer: Layer, group: Group, index: int) -> _Sizes | None:
    kind, there = layer.kind, group.index
    if layer.cell is not None:
        return _Sizes(layer, kind, layer.cell.inputs, layer.cell.hidden, index, there)
    leaf = layer.leaves.get(WEIGHT)
    if leaf is None or not leaf.shape:
        return None
    # A leaf of another class may belong to a layer, and is treated as one here.
    count = len(layer.stack.sizes) if layer.stack and kind != "free" else 0
    shape = list(leaf.shape[count:])
    if kind == "free" and WEIGHT in group.parts and not layer.alone and len(shape) > 1:
        shape = list(group.parts[WEIGHT].shape)
        kind, shape = "linear" if len(shape) == 2 else "conv", shape[2:] + shape[1::-1]
    if kind == "batch_norm" and len(shape) > 3:  # of images: its size is one of channels
        return _Sizes(layer, "conv", shape[-1], shape[-1], index, there)
    if is_norm(layer) or kind == "batch_norm":
        return _Sizes(layer, "norm", shape[-1], shape[-1], index, there)
    if kind == "conv":
        return _Sizes(layer, kind, shape[-2] * layer.groups, shape[-1], index, there)
    if kind == "conv_transpose":
        return _Sizes(layer, "conv", shape[-1], shape[-2], index, there)
    return _Sizes(layer, kind, shape[-2], shape[-1], index, there) if len(shape) > 1 else None


def _possible_channels(mine: _Sizes, sizes: Sequence[_Sizes], outputs: bool) -> list[int]:
    layer, index, size = mine.layer, mine.index, mine.outputs if outputs else mine.inputs
    if mine.kind not in (("linear",) if outputs else ("linear", "norm", *_CELLS)):
        return []
    if layer.stack is not None and layer.kind != "free":
        return []
    convs = [each for each in sizes if each.kind == "conv"]
    if any(size in (each.inputs, each.outputs) for each in convs):
        return []  # it is a number of channels
    dense = [each for each in sizes if each.kind not in ("conv", "norm")]
    if outputs:
        images = {each.inputs for each in convs}  # an image may have a part of this size
        after = {each.inputs for each in dense if each.index > index}
        if any(part == size or _is_split(size, part) for part in after - images):
            return []
        found = [each.inputs for each in convs if each.index > index]
    else:
        if any(each.index < index and _may_return(each, size) for each in dense):
            return []
        before = [each for each in convs if each.index < index or each.there < mine.there]
        found = [each.outputs for each in reversed(before)]
    return list(dict.fromkeys(count for count in found if count > 1 and size % count == 0))


def _is_split(size: int, part: int) -> bool:
    return size % part == 0 and size // part <= _SPLITS


def _may_return(each: _Sizes, size: int) -> bool:
    """Returns whether a layer may return an array of this size or one that contains it."""
    return _is_split(each.outputs, size) or (each.kind in _CELLS and size == 2 * each.outputs)


def _reorder_piece(piece: Piece, layer: Layer, outputs: bool, channels: int) -> Piece:
    """The piece with the places of an image before its channels, along one axis."""
    shape = piece.part_shape
    axis = _flattened_axis(piece, shape, layer, outputs)
    if axis is None or shape[axis] % channels:
        return piece
    size = (channels, shape[axis] // channels)
    rank = len(shape)
    turned = (*range(axis), axis + 1, axis, *range(axis + 2, rank + 1))
    steps: tuple[Step, ...] = (
        ("reshape", (*shape[:axis], *size, *shape[axis + 1 :])),
        ("transpose", turned),
        ("reshape", shape),
    )
    says = f"{piece.says}, {channels} {SAYS}".removeprefix(", ")
    return replace(piece, steps=(*steps, *piece.steps), says=says)


def _flattened_axis(piece: Piece, shape: Shape, layer: Layer, outputs: bool) -> int | None:
    if layer.kind in _CELLS:  # of the product with the input
        first = piece.put is not None and len(piece.put) == 2 and piece.put[0].start == 0
        return len(shape) - 1 if first else None
    if len(shape) == 1:  # a bias, or an array of a norm
        return 0 if outputs or is_norm(layer) or layer.kind == "batch_norm" else None
    turned: Any = ("transpose", (1, 0)) in piece.steps or layer.kind == "free"
    return (0 if outputs else 1) if turned else (1 if outputs else 0)
