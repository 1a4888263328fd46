"""Layouts of recurrent layers: the arrays of each framework, and the order of the gates in them.

Our order is ``i g f o`` for an LSTM, ``z r`` and ``h`` for a GRU. GRUs of torch and flax, of Keras
by default and of ONNX with ``linear_before_reset=1`` apply the reset gate after the projection,
which is `GRU` with ``reset_after=True``: its last gate has two products, ``x`` of the input and
``s`` of the state, each with a bias.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from pax_export.weights.adoption._array_transforms import Piece, Shape, Step
from pax_export.weights.adoption._groups import Group
from pax_export.weights.adoption._layers import Layer
from pax_export.weights.adoption._name_parsing import BIAS, RECURRENT, WEIGHT

#: For each gate: the prefix of the roles of our leaves, and the gate's place in these.
_OURS = {
    "lstm": {gate: ("", place) for place, gate in enumerate("igfo")},
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
                prefix, place = _OURS[kind][gate]
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
                columns = slice(place * h, (place + 1) * h)
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
