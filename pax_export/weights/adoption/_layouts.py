"""Ways to fill a layer from a group, by the conventions of a framework.

Layouts::

    layer             torch, onnx       keras             flax              here
    dense             O I               I O               I O               I O
    convolution       O I/g k           k I/g O           k I/g O           k I/g O
    depthwise         C*m 1 k           k C m             k 1 C*m           k 1 C*m
    transposed        I O k, flipped    k O I, flipped    k I O             k O I
    heads             -                 I h d, h d O      I h d, h d O      I O

`k` are the spatial axes. "Flipped": torch, ONNX and Keras transpose by the gradient of a
convolution, as flax with ``transpose_kernel=True``; flax and we convolve the dilated input.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from pax_export.weights.adoption._groups import Group, is_conv1d_of_transformers
from pax_export.weights.adoption._layers import Layer
from pax_export.weights.adoption._name_parsing import BIAS, MEAN, VAR, WEIGHT
from pax_export.weights.adoption._pieces import (
    Piece,
    Recipe,
    Shape,
    Step,
    shape_after,
    squeeze_shape,
)
from pax_export.weights.adoption._recurrent import read_recurrent

_GENERAL = (WEIGHT, BIAS, MEAN, VAR)


def find_recipes(
    layer: Layer, group: Group, origin: str, axes: Mapping[str, tuple[int, ...]]
) -> list[Recipe]:
    """Returns all recipes by which a group can fill a layer; `axes` are the user's permutations."""
    if layer.stack is not None and layer.kind != "free":
        return _recipes_of_stack(layer, layer.stack.sizes, group, origin, axes)
    ways = _recipes_of_layer(layer, group, origin, axes)
    slots = {leaf.path: leaf.slot for leaf in layer.leaves.values() if leaf.slot is not None}
    if not slots:
        return ways
    return [
        {path: tuple([piece.into(slots[path]) for piece in pieces]) for path, pieces in way.items()}
        for way in ways
    ]


def _recipes_of_stack(
    layer: Layer, sizes: Shape, group: Group, origin: str, axes: Mapping[str, tuple[int, ...]]
) -> list[Recipe]:
    """Returns recipes for arrays that stack all layers as the leaves do."""
    count = len(sizes)
    for piece in group.parts.values():
        if piece.shape[:count] != sizes or piece.split or piece.take or piece.steps:
            return []
    leaves = {role: replace(leaf, shape=leaf.shape[count:]) for role, leaf in layer.leaves.items()}
    parts = {role: replace(p, shape=p.shape[count:]) for role, p in group.parts.items()}
    axes_of_user = {
        path: tuple([axis - count for axis in order[count:]])
        for path, order in axes.items()
        if order[:count] == tuple(range(count))
    }
    one = replace(layer, leaves=leaves, stack=None)
    return [
        {path: tuple([piece.stacked(sizes) for piece in pieces]) for path, pieces in way.items()}
        for way in find_recipes(one, replace(group, parts=parts), origin, axes_of_user)
    ]


def _recipes_of_layer(
    layer: Layer, group: Group, origin: str, axes: Mapping[str, tuple[int, ...]]
) -> list[Recipe]:
    if layer.cell is not None:
        found = read_recurrent(layer, layer.cell, group, origin)
        return [found] if found else []
    parts = _by_role(layer, group)
    if parts is None:
        return []
    ways: list[Recipe] = [{}]
    for role, leaf in layer.leaves.items():
        piece, order = parts[role], axes.get(leaf.path)
        if order is None:
            found = _read_leaf(layer, role, leaf.shape, piece, group, origin)
            options = list({option.key(): option for option in found}.values())
        elif sorted(order) == list(range(len(piece.part_shape))):
            options = _fit_piece(piece, leaf.shape, f"axes {order}", ("transpose", order))
        else:
            options = []
        ways = [{**way, leaf.path: (option,)} for way in ways for option in options]
    return ways


def _by_role(layer: Layer, group: Group) -> dict[str, Piece] | None:
    """Returns the parts by the roles of the layer; None if they do not match."""
    if set(group.parts) == set(layer.leaves):
        return group.parts
    numbered = all(role.isdigit() for role in group.parts)
    if numbered and len(group.parts) == len(layer.leaves):  # Keras numbers the arrays of a layer
        order = [role for role in _GENERAL if role in layer.leaves]
        # A number does not identify the scale or offset of a norm that has only one of them.
        sure = layer.kind not in ("norm", "batch_norm") or {WEIGHT, BIAS} <= set(order)
        counted = {str(index) for index in range(len(order))} == set(group.parts)
        if len(order) == len(layer.leaves) and sure and counted:
            return {role: group.parts[str(index)] for index, role in enumerate(order)}
    if len(layer.leaves) == len(group.parts) == 1 and not group.sure:
        return {next(iter(layer.leaves)): group.parts[WEIGHT]}  # no role in the name of the array
    return None


def _read_leaf(
    layer: Layer, role: str, shape: Shape, piece: Piece, group: Group, origin: str
) -> Iterator[Piece]:
    """Every way to read a leaf: by the axes of its kernel, or without moving any."""
    if layer.kind == "linear" and role in (WEIGHT, BIAS):
        yield from _join_heads(shape, piece, origin)
    if role != WEIGHT or layer.kind not in ("linear", "conv", "conv_transpose", "kernel"):
        yield from _squeeze_piece(shape, piece)
        # A weight of a third-party class may be one of our layers.
        is_layer = role == WEIGHT and layer.kind == "free" and not layer.alone
        if not is_layer or not (2 < len(shape) <= 5 or len(shape) == len(piece.after) == 2):
            return
    found = list(_read_kernel(layer, shape, piece, group, origin))
    yield from found
    yield from _read_depthwise(layer.groups, shape, piece, origin)
    turned = any(each.steps != piece.steps for each in found)
    if layer.kind == "kernel" and not (turned and group.sure and len(found) == 1):
        yield from _squeeze_piece(shape, piece)


def _fit_piece(piece: Piece, shape: Shape, says: str, *steps: Step) -> list[Piece]:
    """Returns the piece with these steps, adding or removing axes of size one, if it fits."""
    after = shape_after(piece.part_shape, piece.steps + steps)
    if after == shape:
        return [piece.then(*steps, says=says)]
    if squeeze_shape(after) == squeeze_shape(shape):
        return [piece.then(*steps, ("reshape", shape), says=says)]
    return []


def _squeeze_piece(shape: Shape, piece: Piece) -> list[Piece]:
    if len(piece.after) == len(shape) and piece.after != shape:
        return []  # (1, 8) is no way to write (8, 1)
    return _fit_piece(piece, shape, "")


#: The axes of kernels, where ``*`` stands for the spatial axes; those of transposed convolutions,
#: and whether these are flipped. Other origins use our layouts.
_KERNELS = {
    **dict.fromkeys(("torch", "torch, Conv1D", "onnx"), ("OI*", "IO*", True)),
    **dict.fromkeys(("mlx", "tflite"), ("O*I", "O*I", True)),
    **dict.fromkeys(("keras", "flax, transposed"), ("*IO", "*OI", True)),
    "flax": ("*IO", "*IO", False),
}
_SPATIAL = {3: "W", 4: "HW", 5: "DHW"}
_WITH_HEADS = ("keras", "flax", "flax, transposed")


def _layouts_of(layer: Layer, group: Group, origin: str, rank: int) -> tuple[tuple[str, ...], bool]:
    """The layouts that a kernel of this rank may have, and whether it is flipped."""
    kernel, transposed, flipped = _KERNELS.get(origin, (layer.axes, layer.axes, False))
    if layer.kind == "conv_transpose":
        return (transposed,) if rank > 2 else (), flipped
    if origin == "onnx" and rank == 2:  # Gemm of torch has out x in, MatMul in x out
        words = (("gemm", "OI*"), ("matmul", "*IO"))
        named = [layout for word, layout in words if word in group.raw]
        return tuple(named[-1:] or ("OI*", "*IO")), False
    if origin == "torch, Conv1D" and rank == 2 and is_conv1d_of_transformers(group):
        return ("*IO",), False
    return (kernel,), False


def _read_kernel(
    layer: Layer, shape: Shape, piece: Piece, group: Group, origin: str
) -> Iterator[Piece]:
    """Reads a kernel by the axes that its class declares, as the framework orders such axes.

    Spatial axes of size one may be in the file or in the leaf alone.
    """
    now, ours = piece.after, _expand(layer.axes, len(piece.after))
    if not 2 <= len(now) <= 5 or len(ours) != len(now):
        return
    layouts, flipped = _layouts_of(layer, group, origin, len(now))
    for theirs in layouts:
        in_their_order = sorted(range(len(now)), key=lambda axis: theirs.index(ours[axis]))
        order = tuple(np.argsort(in_their_order).tolist())
        after = tuple([now[axis] for axis in order])
        if after[-2:] != shape[-2:] or not _is_with_ones(after[:-2], shape[:-2]):
            continue
        steps: list[Step] = [("transpose", order)] if order != tuple(range(len(now))) else []
        says = [_explain_order(theirs, layer, len(now), len(shape), bool(steps))]
        if flipped:
            steps.append(("flip", tuple(range(len(now) - 2))))
            says.append("flipped")
        steps += [("reshape", shape)] if after != shape else []
        yield piece.then(*steps, says=", ".join(filter(None, says)))


def _expand(layout: str, rank: int) -> str:
    return layout if len(layout) == rank else layout.replace("*", "*" * (rank - 2))


def _explain_order(theirs: str, layer: Layer, rank: int, own_rank: int, turned: bool) -> str:
    if rank == 2 or layer.kind == "kernel":
        return "transposed" if turned else ""
    if own_rank == 2:
        return "a 1x1 convolution"
    found, wanted = (
        layout.replace("*", _SPATIAL[size])
        for layout, size in ((theirs, rank), (layer.axes, own_rank))
    )
    return "" if found == wanted else f"{found} to {wanted}"


def _is_with_ones(one: Shape, other: Shape) -> bool:
    """Whether the longer of two shapes is the other one with more axes of size one."""
    short, long = sorted((one, other), key=len)
    return any(
        all(long[axis] == 1 for axis in ones)
        and tuple(size for axis, size in enumerate(long) if axis not in ones) == short
        for ones in itertools.combinations(range(len(long)), len(long) - len(short))
    )


def _join_heads(shape: Shape, piece: Piece, origin: str) -> Iterator[Piece]:
    """Reads a projection of attention whose heads are an axis of its array."""
    now = piece.after
    if len(now) != len(shape) + 1 or math.prod(now) != math.prod(shape):
        return
    kernel = origin in _WITH_HEADS and (now[0] == shape[0] or now[-1] == shape[-1])
    if kernel if len(shape) == 2 else 1 not in now:
        yield piece.then(("reshape", shape), says="heads joined")


def _read_depthwise(groups: int, shape: Shape, piece: Piece, origin: str) -> Iterator[Piece]:
    now = piece.after
    if groups > 1 and len(now) == len(shape):
        depthwise = {"keras": (groups == now[-2], (*now[:-2], 1, now[-2] * now[-1])),
                     "tflite": (now[0] == 1, (*now[1:-1], 1, now[-1]))}  # fmt: skip
        if depthwise.get(origin) == (True, shape):
            yield piece.then(("reshape", shape), says="depthwise")
