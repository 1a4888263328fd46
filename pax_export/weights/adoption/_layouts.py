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

from collections.abc import Iterable, Mapping
from dataclasses import replace

from pax_export.weights.adoption._array_transforms import (
    Piece,
    Shape,
    Step,
    shape_after,
    squeezed_equal,
)
from pax_export.weights.adoption._groups import Group, is_conv1d_of_transformers
from pax_export.weights.adoption._layers import Layer
from pax_export.weights.adoption._name_parsing import BIAS, MEAN, VAR, WEIGHT
from pax_export.weights.adoption._recurrent import recurrent

#: For each leaf, by its path, what fills it.
Recipe = dict[str, tuple[Piece, ...]]

#: Out, height, width, in.
_OHWI = ("mlx", "tflite")
_GENERAL = (WEIGHT, BIAS, MEAN, VAR)


def readings(
    layer: Layer, group: Group, origin: str, axes: Mapping[str, tuple[int, ...]]
) -> list[Recipe]:
    """All recipes by which a group can fill a layer; `axes` are permutations that the user gave."""
    if layer.stack is not None and layer.kind != "free":
        return _of_stack(layer, layer.stack.sizes, group, origin, axes)
    places = {leaf.path: leaf.place for leaf in layer.leaves.values() if leaf.place is not None}
    ways = _of_layer(layer, group, origin, axes)
    if not places:
        return ways
    return [
        {path: tuple([p.into(places[path]) for p in pieces]) for path, pieces in way.items()}
        for way in ways
    ]


def _of_stack(
    layer: Layer, sizes: Shape, group: Group, origin: str, axes: Mapping[str, tuple[int, ...]]
) -> list[Recipe]:
    """The ways of one layer, for arrays that hold all of them as the leaves do."""
    count = len(sizes)
    if any(p.shape[:count] != sizes or p.is_part for p in group.parts.values()):
        return []
    leaves = {role: replace(leaf, shape=leaf.shape[count:]) for role, leaf in layer.leaves.items()}
    parts = {role: replace(p, shape=p.shape[count:]) for role, p in group.parts.items()}
    told = {
        path: tuple([axis - count for axis in order[count:]])
        for path, order in axes.items()
        if order[:count] == tuple(range(count))
    }
    one = replace(layer, leaves=leaves, stack=None)
    return [
        {path: tuple([piece.stacked(sizes) for piece in pieces]) for path, pieces in way.items()}
        for way in readings(one, replace(group, parts=parts), origin, told)
    ]


def _of_layer(
    layer: Layer, group: Group, origin: str, axes: Mapping[str, tuple[int, ...]]
) -> list[Recipe]:
    if layer.kind in ("lstm", "gru", "rnn"):
        found = recurrent(layer, group, origin)
        return [found] if found else []
    parts = _by_role(layer, group)
    if parts is None:
        return []
    ways: list[Recipe] = [{}]
    for role, leaf in layer.leaves.items():
        piece, told = parts[role], axes.get(leaf.path)
        if told is None:
            options = _unique(_options(layer, role, leaf.shape, piece, group, origin))
        elif sorted(told) == list(range(len(piece.part_shape))):
            options = _fitting(piece, leaf.shape, f"axes {told}", ("transpose", told))
        else:
            options = []
        ways = [{**way, leaf.path: (option,)} for way in ways for option in options]
    return ways


def recipe_key(recipe: Recipe) -> tuple:
    """Equal for recipes that give the same numbers."""
    return tuple(
        (path, tuple(sorted([piece.key() for piece in pieces], key=str)))
        for path, pieces in sorted(recipe.items())
    )


def joined(recipes: Iterable[Recipe]) -> Recipe:
    """One recipe of several; what fills parts of one leaf comes together."""
    found: Recipe = {}
    for recipe in recipes:
        for path, pieces in recipe.items():
            found[path] = (*found[path], *pieces) if path in found else pieces
    return found


def _unique(pieces: Iterable[Piece]) -> list[Piece]:
    return list({piece.key(): piece for piece in pieces}.values())


def _by_role(layer: Layer, group: Group) -> dict[str, Piece] | None:
    """The parts by the roles of the layer; None if there are others or less."""
    if set(group.parts) == set(layer.leaves):
        return group.parts
    numbered = all(role.isdigit() for role in group.parts)
    if numbered and len(group.parts) == len(layer.leaves):  # Keras numbers the arrays of a layer
        order = [role for role in _GENERAL if role in layer.leaves]
        # Of a norm with a scale or an offset alone, a number does not say which of the two it is.
        sure = layer.kind not in ("norm", "batch_norm") or {WEIGHT, BIAS} <= set(order)
        if len(order) == len(layer.leaves) and sure and _counted(group):
            return {role: group.parts[str(place)] for place, role in enumerate(order)}
    if len(layer.leaves) == len(group.parts) == 1 and not group.sure:
        return {next(iter(layer.leaves)): group.parts[WEIGHT]}  # no role in the name of the array
    return None


def _counted(group: Group) -> bool:
    return {str(place) for place in range(len(group.parts))} == set(group.parts)


def _options(
    layer: Layer, role: str, shape: Shape, piece: Piece, group: Group, origin: str
) -> Iterable[Piece]:
    kind = layer.kind
    if role == WEIGHT and kind in ("linear", "conv", "conv_transpose"):
        way = {"linear": _linear, "conv": _conv, "conv_transpose": _transposed}[kind]
        return way(shape, piece, group, origin, layer)
    if kind == "free" and role == WEIGHT:
        return _free(shape, piece, group, origin, layer)
    if kind == "linear" and role == BIAS:
        return _same_order(shape, piece)
    return _squeezing(shape, piece)


def _fitting(piece: Piece, shape: Shape, says: str, *steps: Step) -> list[Piece]:
    """The piece with these steps, and axes of one put in or left out, if that gives the shape."""
    after = shape_after(piece.part_shape, piece.steps + steps)
    if after == shape:
        return [piece.then(*steps, says=says)]
    if squeezed_equal(after, shape):
        return [piece.then(*steps, ("reshape", shape), says=says)]
    return []


def _squeezing(shape: Shape, piece: Piece) -> list[Piece]:
    after = shape_after(piece.part_shape, piece.steps)
    if len(after) == len(shape) and after != shape:
        return []  # (1, 8) is no way to write (8, 1)
    return _fitting(piece, shape, "")


def _same_order(shape: Shape, piece: Piece) -> list[Piece]:
    """A bias, whose heads may be apart."""
    after = shape_after(piece.part_shape, piece.steps)
    joined = len(after) == 2 and len(shape) == 1 and 1 not in after
    if joined and after[0] * after[1] == shape[0]:
        return [piece.then(("reshape", shape), says="heads joined")]
    return _squeezing(shape, piece)


def _out_in(origin: str, group: Group) -> list[bool]:
    """Whether a dense weight is out x in."""
    if origin in ("torch", *_OHWI):
        return [True]
    if origin == "torch, Conv1D":
        return [not is_conv1d_of_transformers(group)]
    if origin == "onnx":  # Gemm of torch has out x in, MatMul in x out
        if "matmul" in group.raw:
            return [False]
        return [True] if "gemm" in group.raw else [True, False]
    return [False]


def _linear(shape: Shape, piece: Piece, group: Group, origin: str, layer: Layer) -> Iterable[Piece]:
    now = shape_after(piece.part_shape, piece.steps)
    if len(now) == 2:
        for turned in _out_in(origin, group):
            if turned:
                yield from _exactly(piece, shape, "transposed", ("transpose", (1, 0)))
            else:
                yield from _exactly(piece, shape, "")
    elif len(now) == 3 and origin in ("keras", "flax", "flax, transposed"):
        yield from _joined_heads(shape, piece, now)
    if len(now) in (3, 4, 5):  # a convolution over one place
        yield from _one_place(shape, piece, now, origin)


def _exactly(piece: Piece, shape: Shape, says: str, *steps: Step) -> list[Piece]:
    found = _fitting(piece, shape, says, *steps)
    return [one for one in found if not one.steps or one.steps[-1][0] != "reshape" or piece.split]


def _joined_heads(shape: Shape, piece: Piece, now: Shape) -> Iterable[Piece]:
    first = now[0] == shape[0] and now[1] * now[2] == shape[1]
    last = now[0] * now[1] == shape[0] and now[2] == shape[1]
    if first or last:  # if both, there is one head, and they are the same
        yield piece.then(("reshape", shape), says="heads joined")


def _one_place(shape: Shape, piece: Piece, now: Shape, origin: str) -> Iterable[Piece]:
    order = _axes_of_conv(len(now), origin)
    after = tuple(now[axis] for axis in order)
    if all(size == 1 for size in after[:-2]) and after[-2:] == shape:
        yield piece.then(("transpose", order), ("reshape", shape), says="a 1x1 convolution")


def _axes_of_conv(rank: int, origin: str) -> tuple[int, ...]:
    """The axes of a kernel of a framework, in our order: spatial, in, out."""
    if origin in ("torch", "torch, Conv1D", "onnx"):
        return (*range(2, rank), 1, 0)
    if origin in _OHWI:
        return (*range(1, rank), 0)
    return tuple(range(rank))


def _letters(rank: int) -> str:
    return {3: "W", 4: "HW", 5: "DHW"}.get(rank, "")


def _conv(shape: Shape, piece: Piece, group: Group, origin: str, layer: Layer) -> Iterable[Piece]:
    now = shape_after(piece.part_shape, piece.steps)
    rank = len(shape)
    if len(now) == rank:
        order = _axes_of_conv(rank, origin)
        k = _letters(rank)
        says = "" if order == tuple(range(rank)) else (
            f"O{k}I to {k}IO" if origin in _OHWI else f"OI{k} to {k}IO")  # fmt: skip
        if tuple(now[axis] for axis in order) == shape:
            steps = [("transpose", order)] if says else []
            yield piece.then(*steps, says=says)
        groups = layer.options[0] if layer.options else 1
        depthwise = origin == "keras" and groups > 1 and groups == now[-2]
        if depthwise and (*now[:-2], 1, now[-2] * now[-1]) == shape:
            yield piece.then(("reshape", shape), says="depthwise")
        if origin == "tflite" and groups > 1 and now[0] == 1 and (*now[1:-1], 1, now[-1]) == shape:
            yield piece.then(("reshape", shape), says="depthwise")
    elif len(now) == rank + 1 and rank > 2:
        yield from _with_one_axis_less(shape, piece, now, origin)
    elif len(now) == 2 and rank > 2 and all(size == 1 for size in shape[:-2]):
        for turned in _out_in(origin, group):
            steps = [("transpose", (1, 0))] if turned else []
            if shape_after(now, steps) == shape[-2:]:
                says = "transposed" if turned else ""
                yield piece.then(*steps, ("reshape", shape), says=says)


def _with_one_axis_less(shape: Shape, piece: Piece, now: Shape, origin: str) -> Iterable[Piece]:
    """A convolution of more axes, whose kernel has the width 1 along one of them."""
    order = _axes_of_conv(len(now), origin)
    after = tuple(now[axis] for axis in order)
    for axis in range(len(after) - 2):
        if after[axis] == 1 and (*after[:axis], *after[axis + 1 :]) == shape:
            k, less = _letters(len(now)), _letters(len(shape))
            turned = order != tuple(range(len(now)))
            steps = [("transpose", order)] if turned else []
            theirs = f"O{k}I" if origin in _OHWI else f"OI{k}" if turned else f"{k}IO"
            says = f"{theirs} to {less}IO"
            yield piece.then(*steps, ("reshape", shape), says=says)


def _transposed(
    shape: Shape, piece: Piece, group: Group, origin: str, layer: Layer
) -> Iterable[Piece]:
    now, rank = shape_after(piece.part_shape, piece.steps), len(shape)
    if len(now) != rank:
        return
    spatial, k = tuple(range(rank - 2)), _letters(rank)
    order = tuple(range(rank))
    if origin in ("torch", "torch, Conv1D", "onnx"):
        order, flips, says = (*range(2, rank), 1, 0), True, f"IO{k} to {k}OI, flipped"
    elif origin in _OHWI:
        order, flips, says = (*range(1, rank - 1), 0, rank - 1), True, f"O{k}I to {k}OI, flipped"
    elif origin == "flax":
        order, flips, says = (*spatial, rank - 1, rank - 2), False, f"{k}IO to {k}OI"
    else:
        flips = origin in ("keras", "flax, transposed")
        says = "flipped" if flips else ""
    if tuple(now[axis] for axis in order) == shape:
        steps: list[Step] = [] if order == tuple(range(rank)) else [("transpose", order)]
        yield piece.then(*steps, *([("flip", spatial)] if flips else []), says=says)


def _free(shape: Shape, piece: Piece, group: Group, origin: str, layer: Layer) -> Iterable[Piece]:
    """An array of a class that is not ours: as it is; a weight also as a layer of ours has it."""
    yield from _squeezing(shape, piece)
    if layer.options == ("alone",):
        return
    if len(shape) == 2 and len(shape_after(piece.part_shape, piece.steps)) == 2:
        for turned in _out_in(origin, group):
            if turned:
                yield from _exactly(piece, shape, "transposed", ("transpose", (1, 0)))
    elif len(shape) in (3, 4, 5):
        yield from _conv(shape, piece, group, origin, layer)
