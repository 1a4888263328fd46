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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pax_export.weights.adoption._array_transforms import (
    Piece,
    Shape,
    Step,
    shape_after,
    squeeze_shape,
)
from pax_export.weights.adoption._groups import Group, is_conv1d_of_transformers
from pax_export.weights.adoption._layers import SPATIAL, Layer
from pax_export.weights.adoption._name_parsing import BIAS, MEAN, RECURRENT, VAR, WEIGHT

#: Leaf path -> the pieces that fill it.
Recipe = dict[str, tuple[Piece, ...]]

_GENERAL = (WEIGHT, BIAS, MEAN, VAR)


def find_recipes(
    layer: Layer, group: Group, origin: str, axes: Mapping[str, tuple[int, ...]]
) -> list[Recipe]:
    """Returns all recipes by which a group can fill a layer; `axes` are given permutations."""
    if layer.stack is not None and layer.kind != "free":
        return _recipes_of_stack(layer, layer.stack.sizes, group, origin, axes)
    places = {leaf.path: leaf.slot for leaf in layer.leaves.values() if leaf.slot is not None}
    ways = _recipes_of_layer(layer, group, origin, axes)
    if not places:
        return ways
    return [
        {path: tuple([p.into(places[path]) for p in pieces]) for path, pieces in way.items()}
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
    if layer.kind in ("lstm", "gru", "rnn"):
        found = read_recurrent(layer, group, origin)
        return [found] if found else []
    parts = _by_role(layer, group)
    if parts is None:
        return []
    ways: list[Recipe] = [{}]
    for role, leaf in layer.leaves.items():
        piece, order = parts[role], axes.get(leaf.path)
        if order is None:
            found = _pieces_for_leaf(layer, role, leaf.shape, piece, group, origin)
            options = list({option.key(): option for option in found}.values())
        elif sorted(order) == list(range(len(piece.part_shape))):
            options = _fit_piece(piece, leaf.shape, f"axes {order}", ("transpose", order))
        else:
            options = []
        ways = [{**way, leaf.path: (option,)} for way in ways for option in options]
    return ways


def recipe_key(recipe: Recipe) -> tuple:
    """A key that is equal for recipes with equal results."""
    return tuple(
        (path, tuple(sorted([piece.key() for piece in pieces], key=str)))
        for path, pieces in sorted(recipe.items())
    )


def join_recipes(recipes: Iterable[Recipe]) -> Recipe:
    """Merges recipes into one; pieces of one leaf are concatenated."""
    found: Recipe = {}
    for recipe in recipes:
        for path, pieces in recipe.items():
            found[path] = (*found[path], *pieces) if path in found else pieces
    return found


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


def _pieces_for_leaf(
    layer: Layer, role: str, shape: Shape, piece: Piece, group: Group, origin: str
) -> Iterable[Piece]:
    if role == WEIGHT and layer.kind in _WEIGHTS:
        return _WEIGHTS[layer.kind](shape, piece, group, origin, layer)
    after = piece.after
    heads = layer.kind == "linear" and role == BIAS and len(after) == 2 and 1 not in after
    if heads and len(shape) == 1 and after[0] * after[1] == shape[0]:
        return [piece.then(("reshape", shape), says="heads joined")]
    return _squeeze_piece(shape, piece)


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
_OURS_OF_KERNELS = ("*IO", "*OI", False)
_SPATIAL = {3: "W", 4: "HW", 5: "DHW"}


def _letters(layout: str, rank: int) -> str:
    return layout.replace("*", _SPATIAL.get(rank, ""))


def _order_of_axes(theirs: str, ours: str, rank: int) -> tuple[int, ...]:
    """Returns the permutation from one layout to another.

    Example:
        >>> _order_of_axes("OI*", "*IO", 4)
        (2, 3, 1, 0)
    """
    return tuple(map(_letters(theirs, rank).index, _letters(ours, rank)))


def _layouts_of(origin: str, group: Group, rank: int) -> list[str]:
    """The layouts that a kernel may have; of a dense one in a graph with unclear names both."""
    if origin == "onnx" and rank == 2:  # Gemm of torch has out x in, MatMul in x out
        words = (("gemm", "OI*"), ("matmul", "*IO"))
        return [layout for word, layout in words if word in group.raw][-1:] or ["OI*", "*IO"]
    if origin == "torch, Conv1D" and rank == 2 and is_conv1d_of_transformers(group):
        return ["*IO"]
    return [_KERNELS.get(origin, _OURS_OF_KERNELS)[0]]


def _read_layouts(shape: Shape, piece: Piece, group: Group, origin: str) -> Iterator[Piece]:
    """Reads a kernel; spatial axes of size one may be in the file or in the leaf alone."""
    rank, now = len(shape), piece.after
    for theirs in _layouts_of(origin, group, len(now)):
        order = _order_of_axes(theirs, "*IO", len(now))
        after = tuple(now[axis] for axis in order)
        if after[-2:] != shape[-2:] or not _is_with_ones(after[:-2], shape[:-2]):
            continue
        steps: list[Step] = [("transpose", order)] if order != tuple(sorted(order)) else []
        letters = _letters(theirs, len(now)), _letters("*IO", rank)
        if len(now) == 2:
            says = "transposed" if steps else ""
        elif rank == 2:
            says = "a 1x1 convolution"
        else:
            says = "" if letters[0] == letters[1] else " to ".join(letters)
        steps += [("reshape", shape)] if after != shape else []
        yield piece.then(*steps, says=says)


def _is_with_ones(one: Shape, other: Shape) -> bool:
    """Whether the longer of two shapes is the other one with more axes of size one."""
    short, long = sorted((one, other), key=len)
    return any(
        all(long[axis] == 1 for axis in ones)
        and tuple(size for axis, size in enumerate(long) if axis not in ones) == short
        for ones in itertools.combinations(range(len(long)), len(long) - len(short))
    )


def _read_linear(
    shape: Shape, piece: Piece, group: Group, origin: str, layer: Layer
) -> Iterable[Piece]:
    now = piece.after
    if len(now) == 3 and origin in ("keras", "flax", "flax, transposed"):
        first = now[0] == shape[0] and now[1] * now[2] == shape[1]
        last = now[0] * now[1] == shape[0] and now[2] == shape[1]
        if first or last:  # if both, there is one head, and they are the same
            yield piece.then(("reshape", shape), says="heads joined")
    if len(now) in (2, *_SPATIAL):
        yield from _read_layouts(shape, piece, group, origin)


def _read_conv(
    shape: Shape, piece: Piece, group: Group, origin: str, layer: Layer
) -> Iterable[Piece]:
    now, rank = piece.after, len(shape)
    if len(now) in (2, rank, rank + 1):
        yield from _read_layouts(shape, piece, group, origin)
    groups = layer.options[0] if layer.options else 1
    if groups > 1 and len(now) == rank:
        depthwise = {"keras": (groups == now[-2], (*now[:-2], 1, now[-2] * now[-1])),
                     "tflite": (now[0] == 1, (*now[1:-1], 1, now[-1]))}  # fmt: skip
        if depthwise.get(origin) == (True, shape):
            yield piece.then(("reshape", shape), says="depthwise")


def _read_transposed(
    shape: Shape, piece: Piece, group: Group, origin: str, layer: Layer
) -> Iterable[Piece]:
    now, rank = piece.after, len(shape)
    _, theirs, flipped = _KERNELS.get(origin, _OURS_OF_KERNELS)
    order = _order_of_axes(theirs, "*OI", rank)
    if len(now) == rank and tuple(now[axis] for axis in order) == shape:
        steps: list[Step] = []
        says = []
        if theirs != "*OI":
            steps.append(("transpose", order))
            says.append(f"{_letters(theirs, rank)} to {_letters('*OI', rank)}")
        if flipped:
            steps.append(("flip", tuple(range(rank - 2))))
            says.append("flipped")
        yield piece.then(*steps, says=", ".join(says))


def _read_free(
    shape: Shape, piece: Piece, group: Group, origin: str, layer: Layer
) -> Iterable[Piece]:
    """Reads an array of a third-party class unchanged; a weight also in our layers' layouts."""
    yield from _squeeze_piece(shape, piece)
    if layer.options == ("alone",):
        return
    if len(shape) in _SPATIAL or len(shape) == len(piece.after) == 2:
        yield from _read_conv(shape, piece, group, origin, layer)


def _read_kernel(
    shape: Shape, piece: Piece, group: Group, origin: str, layer: Layer
) -> Iterable[Piece]:
    """Reads a kernel of a user's class, whose axes a framework may have in another order."""
    axes, outputs = layer.options
    letters = ["O" if axis in outputs else "*" if axis in SPATIAL else "I" for axis in axes]
    now, layouts = piece.after, []
    if origin in _KERNELS and len(now) == len(axes):
        layouts = _layouts_of(origin, group, len(axes))
    for layout in layouts:
        order = sorted(range(len(axes)), key=lambda axis: layout.index(letters[axis]))
        back = tuple(np.argsort(order).tolist())
        turned = order != sorted(order)
        if turned and tuple(now[axis] for axis in back) == shape:
            yield piece.then(("transpose", back), says="transposed")
            if group.sure and len(layouts) == 1:
                return
    yield from _squeeze_piece(shape, piece)


#: How the weight of a kind of layer is read.
_WEIGHTS = {
    "linear": _read_linear, "conv": _read_conv, "conv_transpose": _read_transposed,
    "free": _read_free, "kernel": _read_kernel,
}  # fmt: skip


# --- recurrent layers: the arrays of each framework, and the order of their gates -----
# Our order is ``i g f o`` for an LSTM, ``z r`` and ``h`` for a GRU. GRUs of torch and flax, of
# Keras by default and of ONNX with ``linear_before_reset=1`` apply the reset gate after the
# projection, which is `GRU` with ``reset_after=True``: its last gate has two products, ``x`` of
# the input and ``s`` of the state, each with a bias.


#: For each gate: the prefix of the roles of our leaves, and the gate's place in these.
_OURS = {
    "lstm": {gate: ("", number) for number, gate in enumerate("igfo")},
    "rnn": {"h": ("", 0)},
    "gru": {"z": ("zr_", 0), "r": ("zr_", 1), "h": ("h_", 0)},
    "gru, reset after": {"z": ("zr_", 0), "r": ("zr_", 1), "h": ("x_", 0)},
}
_AFTER = "gru, reset after"


class _Array(NamedTuple):
    """One array of a layout; ``*`` in its role stands for a gate."""

    role: str
    # i inputs, h hidden, g all gates, G the gates of both biases, 1 an axis of size one, 2 of both
    # biases
    axes: str
    fills: str  # WEIGHT, the rows of the inputs; RECURRENT, those of the state; or BIAS
    adds: bool = False  # added to the array of the same part


_KERAS_ARRAYS = (
    _Array(WEIGHT, "ig", WEIGHT), _Array(RECURRENT, "hg", RECURRENT), _Array(BIAS, "g", BIAS),
)  # fmt: skip
#: The order of the gates for each kind of layer, and the arrays.
_LAYOUTS: tuple[tuple[dict[str, str], tuple[_Array, ...]], ...] = (
    ({"lstm": "ifgo", "rnn": "h", _AFTER: "rzh"}, (  # torch
        _Array("weight_ih", "gi", WEIGHT), _Array("weight_hh", "gh", RECURRENT),
        _Array("bias_ih", "g", BIAS), _Array("bias_hh", "g", BIAS, adds=True))),
    ({"lstm": "ifgo"}, (  # Equinox
        _Array("weight_ih", "gi", WEIGHT), _Array("weight_hh", "gh", RECURRENT),
        _Array("bias_ih", "g", BIAS))),
    ({"lstm": "ifgo", "rnn": "h", "gru": "zrh"}, _KERAS_ARRAYS),
    ({_AFTER: "zrh"}, (*_KERAS_ARRAYS[:2], _Array(BIAS, "2g", BIAS))),
    ({"lstm": "iofg", "rnn": "h", "gru": "zrh", _AFTER: "zrh"}, (  # ONNX
        _Array(WEIGHT, "1gi", WEIGHT), _Array(RECURRENT, "1gh", RECURRENT),
        _Array(BIAS, "1G", BIAS))),
    ({"lstm": "ifgo"}, (  # flax
        _Array("i*.kernel", "ih", WEIGHT), _Array("h*.kernel", "hh", RECURRENT),
        _Array("h*.bias", "h", BIAS))),
)  # fmt: skip


def read_recurrent(layer: Layer, group: Group, origin: str) -> dict[str, tuple[Piece, ...]] | None:
    """Returns the recipes for a recurrent layer, or None if the group does not fit."""
    kind = _AFTER if "x_weight" in layer.leaves else layer.kind
    if explain_other_function(group, reset_after=kind == _AFTER):
        return None
    if origin == "pax":
        ours = {role: leaf.shape for role, leaf in layer.leaves.items()}
        if group.raw[-1:] != ("fc",) or _shapes_of(group.parts) != ours:
            return None
        return {leaf.path: (group.parts[role],) for role, leaf in layer.leaves.items()}
    leaves = set(layer.leaves)
    prefixes = {prefix for prefix, _ in _OURS[kind].values()} | (
        {"s_"} if kind == _AFTER else set()
    )
    with_bias = leaves != {prefix + WEIGHT for prefix in prefixes}
    if with_bias and leaves != {prefix + role for prefix in prefixes for role in (WEIGHT, BIAS)}:
        return None
    if not with_bias and layer.options[2]:
        return None  # the constant of the forget gate cannot be taken from a bias
    for orders, arrays in _LAYOUTS:
        if kind in orders:
            arrays = [each for each in arrays if with_bias or each.fills != BIAS]
            found = _fill_gates(layer, kind, group, orders[kind], arrays)
            if found is not None:
                return {layer.leaves[role].path: tuple(each) for role, each in found.items()}
    return None


def _fill_gates(
    layer: Layer, kind: str, group: Group, gates: str, arrays: list[_Array]
) -> dict[str, list[Piece]] | None:
    """A piece for each gate of each array; None if the group has other arrays."""
    inputs, h, extra = layer.options
    sizes = {"1": 1, "2": 2, "i": inputs, "h": h, "g": len(gates) * h, "G": 2 * len(gates) * h}
    parts, rows = group.parts, {WEIGHT: slice(0, inputs), RECURRENT: slice(inputs, inputs + h)}
    if set(parts) == {"0", "1", "2"}:  # Keras numbers the variables of a layer
        roles: tuple[str, ...] = (WEIGHT, RECURRENT, BIAS)
        parts = {role: parts[str(number)] for number, role in enumerate(roles)}
    wanted = {
        each.role.replace("*", gate): tuple(sizes[axis] for axis in each.axes)
        for each in arrays for gate in gates
    }  # fmt: skip
    if _shapes_of(parts) != wanted:
        return None
    found: dict[str, list[Piece]] = {role: [] for role in layer.leaves}
    for role, axes, fills, adds in arrays:
        for half in range(1 + axes.count("G") + axes.count("2")):
            adds = adds or half == 1  # ours has the sum of both biases
            for number, gate in enumerate(gates):
                prefix, index = _OURS[kind][gate]
                of_state = fills == RECURRENT or adds
                if prefix == "x_" and of_state:
                    prefix = "s_"
                piece = parts[role.replace("*", gate)]
                if "*" not in role:
                    begin = (half * len(gates) * axes.count("G") + number) * h
                    parts_of = {"g": slice(begin, begin + h), "2": slice(half, half + 1)}
                    parts_of["G"] = parts_of["g"]
                    piece = replace(piece, take=tuple(parts_of.get(axis, slice(None))
                                                      for axis in axes))  # fmt: skip
                columns = slice(index * h, (index + 1) * h)
                steps: list[Step] = []
                if fills == BIAS:
                    put: tuple[slice, ...] = (columns,)
                    steps.append(("reshape", (h,)))
                    if gate == "f" and extra and not adds:
                        steps.append(("add", -extra))  # added by our layer
                else:
                    size = rows[fills].stop - rows[fills].start
                    put = (
                        rows[fills] if prefix[:-1] not in ("x", "s") else slice(0, size),
                        columns,
                    )
                    if axes[-1] != "g" and "*" not in role:
                        steps += [("reshape", (h, size)), ("transpose", (1, 0))]
                if gate == "z":  # the other gate keeps the old state: 1 - sigmoid(x) is sigmoid(-x)
                    steps.append(("negate", None))
                says = "gates joined" if "*" in role else "gates reordered"
                target = prefix + (BIAS if fills == BIAS else WEIGHT)
                adding = adds and prefix != "s_"
                found[target].append(replace(piece, put=put, adds=adding).then(*steps, says=says))
    return found


def _shapes_of(parts: dict[str, Piece]) -> dict[str, Shape]:
    return {role: piece.shape for role, piece in parts.items()}


#: Default settings of ONNX's operators, which ours implement.
_DEFAULTS = {
    "LSTM": {"activations": ("sigmoid", "tanh", "tanh"), "input_forget": ("0",)},
    "GRU": {"activations": ("sigmoid", "tanh")},
    "RNN": {"activations": ("tanh",)},
}
_OUR_CLASSES = {"LSTM": "LSTM", "GRU": "GRU", "RNN": "VanillaRNN"}
#: Settings that do not change the function, or are visible in the shapes.
_HARMLESS = ("operator", "direction", "hidden_size", "layout", "activation_alpha",
             "activation_beta")  # fmt: skip


def explain_other_function(group: Group, reset_after: bool = False) -> str:
    """Why a recurrent layer of a graph computes another function than ours; "" if it does not."""
    after = str(int(reset_after))
    if group.settings is None:
        shapes = _shapes_of(group.parts)
        hidden = shapes.get(RECURRENT, (0,))[-1]
        gru = {BIAS: (1, 6 * hidden), RECURRENT: (1, 3 * hidden, hidden)}
        if set(shapes) != {WEIGHT, *gru} or any(shapes[role] != gru[role] for role in gru):
            return ""
        return (
            "; whether it is a GRU with linear_before_reset, as pax.GRU(reset_after=True), only "
            "the .onnx says"
        )
    settings = dict(group.settings)
    operator = settings["operator"]
    before = settings.pop("linear_before_reset", ("0",))
    if operator == "GRU" and before != (after,):
        ours = f"pax.GRU with reset_after={not reset_after}"
        return f"; with linear_before_reset={', '.join(before)} it fills a {ours}"
    for name, value in settings.items():
        default = _DEFAULTS[operator].get(name)
        if name not in _HARMLESS and tuple(one.lower() for one in value) != default:
            ours = f"pax.{_OUR_CLASSES[operator]}"
            return f"; with {name}={', '.join(value)} it is another function than {ours}"
    return ""
