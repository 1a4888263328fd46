"""The arrays of LSTM, GRU and RNN layers in each framework, and the order of their gates.

Our order is ``i g f o`` for an LSTM, ``z r`` and ``h`` for a GRU. GRUs of torch and flax, of Keras
by default and of ONNX with ``linear_before_reset=1`` apply the reset gate after the projection,
which is `GRU` with ``reset_after=True``: its last gate has two products, ``x`` of the input and
``s`` of the state, each with a bias.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from pax_export.weights.adoption._groups import Group
from pax_export.weights.adoption._layers import CellSizes, Layer
from pax_export.weights.adoption._name_parsing import BIAS, RECURRENT, WEIGHT
from pax_export.weights.adoption._pieces import Index, Piece, Recipe, Shape, Step

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

    def part_of_gate(self, number: int, half: int, gates: int, hidden: int) -> Index:
        """The part of one gate, in the first or the second bias."""
        begin = (number + (half * gates if "G" in self.axes else 0)) * hidden
        gate = slice(begin, begin + hidden)
        parts = {"g": gate, "G": gate, "2": slice(half, half + 1)}
        return tuple([parts.get(axis, slice(None)) for axis in self.axes])


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
        _Array(BIAS, "g", BIAS))),
    ({"lstm": "ifgo", "rnn": "h", "gru": "zrh"}, _KERAS_ARRAYS),
    ({_AFTER: "zrh"}, (*_KERAS_ARRAYS[:2], _Array(BIAS, "2g", BIAS))),
    ({"lstm": "iofg", "rnn": "h", "gru": "zrh", _AFTER: "zrh"}, (  # ONNX
        _Array(WEIGHT, "1gi", WEIGHT), _Array(RECURRENT, "1gh", RECURRENT),
        _Array(BIAS, "1G", BIAS))),
    ({"lstm": "ifgo"}, (  # flax
        _Array("i*.kernel", "ih", WEIGHT), _Array("h*.kernel", "hh", RECURRENT),
        _Array("h*.bias", "h", BIAS))),
)  # fmt: skip


def read_recurrent(layer: Layer, cell: CellSizes, group: Group, origin: str) -> Recipe | None:
    """Returns the recipe for a recurrent layer, or None if the group does not fit."""
    kind = _AFTER if "x_weight" in layer.leaves else layer.kind
    if explain_other_function(group, reset_after=kind == _AFTER):
        return None
    if origin == "pax":
        ours = {role: leaf.shape for role, leaf in layer.leaves.items()}
        if group.raw[-1:] != ("fc",) or _shapes_of(group.parts) != ours:
            return None
        return {leaf.path: (group.parts[role],) for role, leaf in layer.leaves.items()}
    prefixes = {prefix for prefix, _ in _OURS[kind].values()}
    prefixes |= {"s_"} if kind == _AFTER else set()
    weights, biases = ({prefix + role for prefix in prefixes} for role in (WEIGHT, BIAS))
    with_bias = set(layer.leaves) == weights | biases
    if not with_bias and (set(layer.leaves) != weights or cell.forget_bias):
        return None  # the constant of the forget gate cannot be taken from a bias
    for orders, arrays in _LAYOUTS:
        if kind in orders:
            arrays = [each for each in arrays if with_bias or each.fills != BIAS]
            found = _fill_gates(kind, cell, group.parts, orders[kind], arrays)
            if found is not None:
                return {layer.leaves[role].path: tuple(each) for role, each in found.items()}
    return None


def _fill_gates(
    kind: str, cell: CellSizes, parts: dict[str, Piece], gates: str, arrays: list[_Array]
) -> dict[str, list[Piece]] | None:
    """A piece for each gate of each array, by role; None if these are other arrays."""
    if set(parts) == {"0", "1", "2"}:  # Keras numbers the variables of a layer
        parts = {role: parts[str(at)] for at, role in enumerate((WEIGHT, RECURRENT, BIAS))}
    every = len(gates) * cell.hidden
    sizes = {"1": 1, "2": 2, "i": cell.inputs, "h": cell.hidden, "g": every, "G": 2 * every}
    wanted = {
        each.role.replace("*", gate): tuple(sizes[axis] for axis in each.axes)
        for each in arrays for gate in gates
    }  # fmt: skip
    if _shapes_of(parts) != wanted:
        return None
    found: dict[str, list[Piece]] = {}
    for array in arrays:
        for half in range(1 if {"G", "2"}.isdisjoint(array.axes) else 2):
            for number, gate in enumerate(gates):
                piece, says = parts[array.role.replace("*", gate)], "gates joined"
                if "*" not in array.role:
                    take = array.part_of_gate(number, half, len(gates), cell.hidden)
                    piece, says = replace(piece, take=take), "gates reordered"
                second = array.adds or half == 1  # our leaf has the sum of both biases
                role, piece = _into_leaf(piece, kind, cell, gate, array, second, says)
                found.setdefault(role, []).append(piece)
    return found


def _into_leaf(
    piece: Piece, kind: str, cell: CellSizes, gate: str, array: _Array, second: bool, says: str
) -> tuple[str, Piece]:
    """The role of the leaf that a gate is in, and the piece that fills its part."""
    prefix, index = _OURS[kind][gate]
    if prefix == "x_" and (array.fills == RECURRENT or second):
        prefix = "s_"
    columns = slice(index * cell.hidden, (index + 1) * cell.hidden)
    steps: list[Step] = []
    if array.fills == BIAS:
        put: Index = (columns,)
        steps.append(("reshape", (cell.hidden,)))
        if gate == "f" and cell.forget_bias and not second:
            steps.append(("add", -cell.forget_bias))  # added by our layer
    else:
        size = cell.inputs if array.fills == WEIGHT else cell.hidden
        begin = cell.inputs if array.fills == RECURRENT and prefix != "s_" else 0
        put = (slice(begin, begin + size), columns)
        if array.axes[-1] != "g" and "*" not in array.role:
            steps += [("reshape", (cell.hidden, size)), ("transpose", (1, 0))]
    if gate == "z":  # the other gate keeps the old state: 1 - sigmoid(x) is sigmoid(-x)
        steps.append(("negate", None))
    role = prefix + (BIAS if array.fills == BIAS else WEIGHT)
    return role, replace(piece, put=put, adds=second and prefix != "s_").then(*steps, says=says)


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
