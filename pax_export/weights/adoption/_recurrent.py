"""The order of gates of recurrent layers in each framework.

Ours are ``i g f o`` of an LSTM and ``z r`` and ``h`` of a GRU. The GRUs of torch and flax apply the
reset gate after the projection, which is another function; ours is before, like Keras' with
``reset_after=False`` and ONNX' with ``linear_before_reset=0``.
"""

from __future__ import annotations

from dataclasses import replace

from pax_export.weights.adoption._array_transforms import Piece, Step
from pax_export.weights.adoption._groups import Group
from pax_export.weights.adoption._layers import Layer
from pax_export.weights.adoption._name_parsing import BIAS, RECURRENT, WEIGHT

_ORDERS = {
    "lstm": {"here": "igfo", "torch": "ifgo", "keras": "ifgo", "onnx": "iofg"},
    "rnn": {"here": "h", "torch": "h", "keras": "h", "onnx": "h"},
}


def recurrent(layer: Layer, group: Group, origin: str) -> dict[str, tuple[Piece, ...]] | None:
    """What fills the leaves of a recurrent layer, or None if the group cannot."""
    if another_function(group):
        return None
    if layer.kind == "gru":
        return _gru(layer, group)
    if WEIGHT not in layer.leaves:
        return None
    weight, bias = layer.leaves[WEIGHT].path, layer.leaves.get(BIAS)
    if bias is None:
        pieces = None if _less(layer, "f") else _torch(layer, group)
        return pieces and {weight: tuple(pieces[0])}
    for way in (_ours,) if origin == "pax" else (_torch, _keras, _onnx, _flax):
        pieces = way(layer, group)
        if pieces is not None:
            return {weight: tuple(pieces[0]), bias.path: tuple(pieces[1])}
    return None


#: What ONNX's operators do unless they are told otherwise, and what ours do.
_DEFAULTS = {
    "LSTM": {"activations": ("sigmoid", "tanh", "tanh"), "input_forget": ("0",)},
    "GRU": {"activations": ("sigmoid", "tanh"), "linear_before_reset": ("0",)},
    "RNN": {"activations": ("tanh",)},
}
_OURS = {"LSTM": "LSTM", "GRU": "GRU", "RNN": "VanillaRNN"}
#: What does not touch the function, or is seen by the shapes.
_HARMLESS = ("operator", "direction", "hidden_size", "layout", "activation_alpha",
             "activation_beta")  # fmt: skip


def another_function(group: Group) -> str:
    """Why a recurrent layer of a graph computes another function than ours; "" if it does not."""
    if group.settings is None:
        return (
            "; whether it is a GRU with linear_before_reset=0, as pax.GRU, only the .onnx says"
            if _is_gru_of_onnx(group) else ""
        )  # fmt: skip
    settings = dict(group.settings)
    operator = settings["operator"]
    for name, value in settings.items():
        if name in _HARMLESS:
            continue
        wanted = _DEFAULTS[operator].get(name)
        if wanted is None or tuple(one.lower() for one in value) != wanted:
            ours = f"pax.{_OURS[operator]}"
            return f"; with {name}={', '.join(value)} it is another function than {ours}"
    return ""


def _is_gru_of_onnx(group: Group) -> bool:
    shapes = {role: piece.shape for role, piece in group.parts.items()}
    if set(shapes) != {WEIGHT, RECURRENT, BIAS} or len(shapes[RECURRENT]) != 3:
        return False
    _, rows, h = shapes[RECURRENT]
    return rows == 3 * h and shapes[BIAS] == (1, 6 * h)


def _parts(layer: Layer, group: Group, **shapes: tuple[int, ...]) -> bool:
    return {role: piece.shape for role, piece in group.parts.items()} == shapes


def _sizes(layer: Layer) -> tuple[int, int, int]:
    return len(_ORDERS[layer.kind]["here"]), layer.options[0], layer.options[1]


def _less(layer: Layer, gate: str) -> list[Step]:
    """What our layer adds to the bias of the forget gate is taken from it."""
    extra = layer.options[2]
    return [("add", -extra)] if gate == "f" and layer.kind == "lstm" and extra else []


def _by_gates(
    layer: Layer, theirs: str, piece: Piece, axis: int, rows: slice | None, adds: bool = False
) -> list[Piece]:
    """A piece for each gate of an array that has all of them along an axis."""
    ours, h = _ORDERS[layer.kind]["here"], layer.options[1]
    shape = piece.split or piece.shape
    found = []
    for gate in ours:
        begin = theirs.index(gate) * h
        base = piece.take or tuple(slice(None) for _ in shape)
        offset = (base[axis].start or 0) if piece.take else 0
        place = slice(offset + begin, offset + begin + h)
        take = tuple(place if at == axis else one for at, one in enumerate(base))
        part = Piece(piece.source, piece.shape, piece.split, take, says="gates reordered")
        columns = slice(ours.index(gate) * h, (ours.index(gate) + 1) * h)
        if rows is None:
            steps: list[Step] = [("reshape", (h,))]
            steps += [] if adds else _less(layer, gate)
            found.append(Piece(part.source, part.shape, part.split, take, tuple(steps),
                               (columns,), adds, part.says))  # fmt: skip
        else:
            size = rows.stop - rows.start
            flat = (h, size) if axis < len(shape) - 1 else (size, h)
            steps = [("reshape", flat)]
            if axis < len(shape) - 1:
                steps.append(("transpose", (1, 0)))
            found.append(Piece(part.source, part.shape, part.split, take, tuple(steps),
                               (rows, columns), adds, part.says))  # fmt: skip
    return found


def _torch(layer: Layer, group: Group) -> tuple[list[Piece], list[Piece]] | None:
    gates, inputs, h = _sizes(layer)
    wanted = {"weight_ih": (gates * h, inputs), "weight_hh": (gates * h, h),
              "bias_ih": (gates * h,), "bias_hh": (gates * h,)}  # fmt: skip
    if BIAS not in layer.leaves:
        wanted = {role: shape for role, shape in wanted.items() if role.startswith("weight")}
    if not _parts(layer, group, **wanted):
        return None
    order, parts = _ORDERS[layer.kind]["torch"], group.parts
    weight = _by_gates(layer, order, parts["weight_ih"], 0, slice(0, inputs))
    weight += _by_gates(layer, order, parts["weight_hh"], 0, slice(inputs, inputs + h))
    if BIAS not in layer.leaves:
        return weight, []
    bias = _by_gates(layer, order, parts["bias_ih"], 0, None)
    return weight, bias + _by_gates(layer, order, parts["bias_hh"], 0, None, adds=True)


def _keras(layer: Layer, group: Group) -> tuple[list[Piece], list[Piece]] | None:
    gates, inputs, h = _sizes(layer)
    parts = group.parts
    if set(parts) == {"0", "1", "2"}:
        parts = {WEIGHT: parts["0"], RECURRENT: parts["1"], BIAS: parts["2"]}
    shapes = {role: piece.shape for role, piece in parts.items()}
    if shapes != {WEIGHT: (inputs, gates * h), RECURRENT: (h, gates * h), BIAS: (gates * h,)}:
        return None
    order = _ORDERS[layer.kind]["keras"]
    return (
        _by_gates(layer, order, parts[WEIGHT], 1, slice(0, inputs))
        + _by_gates(layer, order, parts[RECURRENT], 1, slice(inputs, inputs + h)),
        _by_gates(layer, order, parts[BIAS], 0, None),
    )


def _onnx(layer: Layer, group: Group) -> tuple[list[Piece], list[Piece]] | None:
    gates, inputs, h = _sizes(layer)
    parts = group.parts
    shapes = {role: piece.shape for role, piece in parts.items()}
    if shapes != {
        WEIGHT: (1, gates * h, inputs), RECURRENT: (1, gates * h, h), BIAS: (1, 2 * gates * h),
    }:  # fmt: skip
        return None
    order, n = _ORDERS[layer.kind]["onnx"], gates * h
    whole = parts[BIAS]
    first = Piece(whole.source, whole.shape, (1, 2 * n), (slice(None), slice(0, n)))
    second = Piece(whole.source, whole.shape, (1, 2 * n), (slice(None), slice(n, 2 * n)))
    return (
        _by_gates(layer, order, parts[WEIGHT], 1, slice(0, inputs))
        + _by_gates(layer, order, parts[RECURRENT], 1, slice(inputs, inputs + h)),
        _by_gates(layer, order, first, 1, None)
        + _by_gates(layer, order, second, 1, None, adds=True),
    )


def _flax(layer: Layer, group: Group) -> tuple[list[Piece], list[Piece]] | None:
    if layer.kind != "lstm":
        return None
    _, inputs, h = _sizes(layer)
    wanted = {f"i{gate}.kernel": (inputs, h) for gate in "ifgo"}
    wanted |= {f"h{gate}.kernel": (h, h) for gate in "ifgo"}
    wanted |= {f"h{gate}.bias": (h,) for gate in "ifgo"}
    if not _parts(layer, group, **wanted):
        return None
    weight, bias = [], []
    for place, gate in enumerate(_ORDERS["lstm"]["here"]):
        columns = slice(place * h, (place + 1) * h)
        for letter, rows in (("i", slice(0, inputs)), ("h", slice(inputs, inputs + h))):
            name = group.parts[f"{letter}{gate}.kernel"]
            weight.append(Piece(name.source, name.shape, put=(rows, columns), says="gates joined"))
        name = group.parts[f"h{gate}.bias"]
        bias.append(Piece(name.source, name.shape, steps=tuple(_less(layer, gate)),
                          put=(columns,), says="gates joined"))  # fmt: skip
    return weight, bias


def _ours(layer: Layer, group: Group) -> tuple[list[Piece], list[Piece]] | None:
    weight, bias = layer.leaves[WEIGHT].shape, layer.leaves[BIAS].shape
    if group.raw[-1:] != ("fc",) or not _parts(layer, group, weight=weight, bias=bias):
        return None
    return [group.parts[WEIGHT]], [group.parts[BIAS]]


def _gru(layer: Layer, group: Group) -> dict[str, tuple[Piece, ...]] | None:
    leaves = layer.leaves
    if set(leaves) != {"zr_weight", "zr_bias", "h_weight", "h_bias"}:
        return None
    pieces = _gru_of_keras(layer, group) or _gru_of_onnx(layer, group)
    if pieces is None:
        return None
    return {leaves[role].path: tuple(several) for role, several in pieces.items()}


def _gru_of_keras(layer: Layer, group: Group) -> dict[str, list[Piece]] | None:
    inputs, h, _ = layer.options
    parts = group.parts
    if set(parts) == {"0", "1", "2"}:
        parts = {WEIGHT: parts["0"], RECURRENT: parts["1"], BIAS: parts["2"]}
    shapes = {role: piece.shape for role, piece in parts.items()}
    if shapes != {WEIGHT: (inputs, 3 * h), RECURRENT: (h, 3 * h), BIAS: (3 * h,)}:
        return None
    found: dict[str, list[Piece]] = {role: [] for role in layer.leaves}
    for place, gate in enumerate("zrh"):  # the order of Keras, and of ONNX
        target, columns, turned = _gate_of_gru(gate, place, h)
        take = slice(place * h, (place + 1) * h)
        for role, rows in ((WEIGHT, slice(0, inputs)), (RECURRENT, slice(inputs, inputs + h))):
            piece = replace(parts[role], take=(slice(None), take), put=(rows, columns))
            found[f"{target}_weight"].append(piece.then(*turned, says="gates reordered"))
        bias = replace(parts[BIAS], take=(take,), put=(columns,))
        found[f"{target}_bias"].append(bias.then(*turned, says="gates reordered"))
    return found


def _gate_of_gru(gate: str, place: int, h: int) -> tuple[str, slice, tuple[Step, ...]]:
    """In which of our two layers a gate is, in which columns, and what is done with it."""
    target, at = ("h", 0) if gate == "h" else ("zr", place)
    # 1 - sigmoid(x) is sigmoid(-x): their z keeps the old state, and ours takes the new.
    turned: tuple[Step, ...] = (("negate",),) if gate == "z" else ()
    return target, slice(at * h, (at + 1) * h), turned


def _gru_of_onnx(layer: Layer, group: Group) -> dict[str, list[Piece]] | None:
    inputs, h, _ = layer.options
    if not _parts(layer, group, weight=(1, 3 * h, inputs), recurrent=(1, 3 * h, h),
                  bias=(1, 6 * h)):  # fmt: skip
        return None
    found: dict[str, list[Piece]] = {role: [] for role in layer.leaves}
    for place, gate in enumerate("zrh"):
        target, columns, turned = _gate_of_gru(gate, place, h)
        take = slice(place * h, (place + 1) * h)
        for role, rows in ((WEIGHT, slice(0, inputs)), (RECURRENT, slice(inputs, inputs + h))):
            piece = replace(group.parts[role], take=(slice(None), take), put=(rows, columns))
            size = rows.stop - rows.start
            steps: tuple[Step, ...] = (("reshape", (h, size)), ("transpose", (1, 0)), *turned)
            found[f"{target}_weight"].append(piece.then(*steps, says="gates reordered"))
        for half in (0, 3 * h):  # of the input and of the state: ours has their sum
            take = slice(half + place * h, half + (place + 1) * h)
            piece = replace(group.parts[BIAS], take=(slice(None), take), put=(columns,),
                            adds=half > 0)  # fmt: skip
            steps = (("reshape", (h,)), *turned)
            found[f"{target}_bias"].append(piece.then(*steps, says="gates reordered"))
    return found
