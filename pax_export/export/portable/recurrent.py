"""Recognizes loops over LSTM, GRU and simple recurrent steps.

Any source is accepted: only the arithmetic of the step is compared, see `cells.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pax_export._foundations.jax import scan_operands
from pax_export._foundations.jaxpr import bind_equation
from pax_export._foundations.types import Equation
from pax_export.export.portable import kept
from pax_export.export.portable.cells import Affine, Known, StepValue, step_results
from pax_export.export.portable.program import PortableProgram, is_static, needed, uses


@dataclass(frozen=True)
class RecurrentLayer:
    """A recognized recurrent layer.

    Attributes:
        name: the name of the kept function.
        state: the index of the carry with the previous output.
        gates: the sums of the gates, in the order of the kept function.
        cell: the index of the carry with the cell state of an LSTM.
        attributes: others of the composite.
        reset: the previous output times the reset gate, if it is multiplied first.
    """

    name: str
    state: int
    gates: tuple[Affine, ...]
    cell: int | None = None
    attributes: tuple[tuple[str, Any], ...] = ()
    reset: StepValue | None = None


def whole_layers(program: PortableProgram) -> PortableProgram:
    """The program with recurrent layers as calls of kept functions."""
    counts = uses(program.jaxpr)
    if not any(each.primitive.name == "scan" for each in needed(program.jaxpr)):
        return program

    def operate(equation: Equation, operands: list[Any]) -> Sequence[Any]:
        results = None
        if equation.primitive.name == "scan":
            results = _layer(equation, operands, counts)
        return bind_equation(equation, operands) if results is None else results

    return program.rebuilt(operate)


def _layer(equation: Equation, operands: list[Any], counts: Mapping[Any, int]) -> list[Any] | None:
    params = equation.params
    constants, start, rows = scan_operands(params, operands)
    floats = {jnp.result_type(each).name for each in (*start, *rows)}  # some are Python's numbers
    is_some = is_static((params["length"],)) and params["length"] > 0
    if floats != {"float32"} or not rows or not is_some:
        return None
    if any(jnp.ndim(each) not in (1, 2) for each in start) or any(x.ndim < 2 for x in rows):
        return None
    results = step_results(params["jaxpr"], constants, len(start))
    after, ys = results[: len(start)], results[len(start) :]
    layer = _match(after)
    if layer is None:
        return None
    arguments = _operands_of(layer, start, rows)
    if arguments is None:
        return None
    for variable, y in zip(equation.outvars[len(start) :], ys):
        if counts.get(variable) and y is not after[layer.state]:
            return None
    arrays = kept.call(layer.name, *arguments, reverse=params["reverse"], **dict(layer.attributes))
    single = start[layer.state].ndim == 1
    outputs, *last = [each.squeeze(-2) for each in arrays] if single else arrays
    finals = {at: last[0] for at, value in enumerate(after) if value is after[layer.state]}
    if layer.cell is not None:
        finals[layer.cell] = last[1]
    carried = [finals.get(index, value) for index, value in enumerate(start)]
    return [*carried, *(outputs for _ in ys)]


def _match(after: Sequence[Any]) -> RecurrentLayer | None:
    """Returns the layer whose step computes these carries."""
    found = (each(at, after) for at in range(len(after)) for each in (_lstm, _gru, _simple))
    return next((each for each in found if each is not None and _is_whole(each, after)), None)


def _is_whole(layer: RecurrentLayer, after: Sequence[Any]) -> bool:
    """Whether the other carries are the same, or stay as they were."""
    for index, value in enumerate(after):
        if index in (layer.state, layer.cell) or value is after[layer.state]:
            continue
        if not _is_carry(value, index):
            return False
    return True


def _is_carry(value: object, index: int) -> bool:
    return isinstance(value, StepValue) and value.name == "carry" and value.index == index


def _both(value: object, name: str) -> Iterator[tuple[Any, Any]]:
    """The operands of a sum or product, in both orders."""
    if isinstance(value, StepValue) and value.name == name:
        yield value.of
        if name != "sub":
            yield value.of[::-1]


def _of(value: object, name: str) -> Affine | None:
    """Returns the argument of a gate's function."""
    if isinstance(value, StepValue) and value.name == name and isinstance(value.of[0], Affine):
        return value.of[0]
    return None


def _lstm(index: int, after: Sequence[Any]) -> RecurrentLayer | None:
    """``o * tanh(f * cell + i * g)``."""
    for gate, curve in _both(after[index], "mul"):
        o = _of(gate, "logistic")
        if o is None or not isinstance(curve, StepValue) or curve.name != "tanh":
            continue
        cell = curve.of[0]
        at = next((at for at, value in enumerate(after) if value is cell and at != index), None)
        for one, other in _both(cell, "add"):
            for f, old in _both(one, "mul"):
                for i, g in _both(other, "mul"):
                    gates = _of(i, "logistic"), o, _of(f, "logistic"), _of(g, "tanh")
                    if at is not None and _is_carry(old, at) and None not in gates:
                        return RecurrentLayer("lstm", index, gates, at)  # type: ignore[arg-type]
    return None


def _gru(index: int, after: Sequence[Any]) -> RecurrentLayer | None:
    """``(1 - z) * n + z * hidden``, in the four ways to write it."""
    for z, new in _mixed(after[index], index):
        if not isinstance(new, StepValue) or new.name != "tanh":
            continue
        (total,) = new.of
        if isinstance(total, Affine):  # the reset gate is multiplied with the output before
            for step, _ in total.terms:
                for r, old in _both(step, "mul"):
                    reset = _of(r, "logistic")
                    if reset is not None and _is_carry(old, index):
                        attributes = (("reset_after", False),)
                        return RecurrentLayer(
                            "gru", index, (z, reset, total), None, attributes, step
                        )
        for of_row, product in _both(total, "add"):
            for r, of_state in _both(product, "mul"):
                reset = _of(r, "logistic")
                if reset is None or not isinstance(of_row, Affine):
                    continue
                if isinstance(of_state, Affine) and _names(of_state) <= {"carry"}:
                    if "carry" not in _names(of_row):
                        attributes = (("reset_after", True),)
                        return RecurrentLayer(
                            "gru", index, (z, reset, of_row, of_state), None, attributes
                        )
    return None


def _mixed(value: object, index: int) -> Iterator[tuple[Affine, Any]]:
    """Returns the argument of the gate, and the new value, of a mixture with a carry."""
    for one, other in _both(value, "add"):
        for z, difference in _both(other, "mul"):
            gate = _of(z, "logistic")
            if gate is None:
                continue
            for left, right in _both(difference, "sub"):
                if right is one and _is_carry(left, index):
                    yield gate, one
                if right is one and _is_carry(one, index):
                    yield gate.negative(), left
            for rest, factor in _both(one, "mul"):
                for number, same in _both(rest, "sub"):
                    if same is z and isinstance(number, Known) and number.number == 1.0:
                        if _is_carry(difference, index):
                            yield gate, factor
                        if _is_carry(factor, index):
                            yield gate.negative(), difference


def _names(value: Affine) -> set[str]:
    return {step.name for step, _ in value.terms}


def _simple(index: int, after: Sequence[Any]) -> RecurrentLayer | None:
    """``tanh`` or ``relu`` of a sum."""
    total = _of(after[index], "tanh")
    if total is not None:
        return RecurrentLayer("rnn", index, (total,), None, (("activation", "tanh"),))
    for x, zero in _both(after[index], "max"):
        if isinstance(x, Affine) and isinstance(zero, Known) and zero.number == 0.0:
            return RecurrentLayer("rnn", index, (x,), None, (("activation", "relu"),))
    return None


def _operands_of(
    layer: RecurrentLayer, start: Sequence[Any], rows: Sequence[Any]
) -> list[Any] | None:
    """The operands of the kept function; None where a gate reads something else."""
    steps = {step: None for gate in layer.gates for step, _ in gate.terms}
    inputs = [step for step in steps if step.name == "row"]
    states = [step for step in steps if step.name == "carry"]
    rest = [step for step in steps if step not in inputs and step not in states]
    if not inputs or rest not in ([], [layer.reset]):
        return None
    if any(step.index != layer.state for step in states):
        return None
    hidden, dtype = start[layer.state], start[layer.state].dtype
    size, of_rows = hidden.shape[-1], [rows[step.index] for step in inputs]
    if any(gate.size != size or gate.axis != len(gate.shape) - 1 for gate in layer.gates):
        return None
    if any(each.ndim != hidden.ndim + 1 for each in of_rows):
        return None
    if layer.reset is not None:
        read = [layer.gates[-1].matrix(step) is None for step in states]
        first = all(gate.matrix(layer.reset) is None for gate in layer.gates[:-1])
        if not (all(read) and first):
            return None
    x = of_rows[0] if len(of_rows) == 1 else jnp.concatenate(of_rows, -1)
    gates = layer.gates[:3] if layer.name == "gru" else layer.gates

    def block(gate: Affine, step: StepValue | None, inside: int) -> Any:
        matrix = None if step is None else gate.matrix(step)
        return jnp.zeros((size, inside), dtype) if matrix is None else matrix.T

    def of_row(gate: Affine) -> Any:
        parts = [block(gate, step, step.shape[-1]) for step in inputs]
        return jnp.concatenate(parts, -1)

    state = states[0] if states else None
    of_state = [block(gate, state, size) for gate in gates]
    shifts = [jnp.zeros(size, dtype) for _ in gates]
    if len(layer.gates) == 4 and layer.name == "gru":
        of_state[-1] = block(layer.gates[3], state, size)
        shifts[-1] = layer.gates[3].biases(dtype)
    if layer.reset is not None:
        of_state[-1] = block(gates[-1], layer.reset, size)
    w, r = jnp.concatenate([of_row(g) for g in gates]), jnp.concatenate(of_state)
    b = jnp.concatenate([*(gate.biases(dtype) for gate in gates), *shifts])
    states_given = [hidden] if layer.cell is None else [hidden, start[layer.cell]]
    if hidden.ndim == 1:
        x, states_given = x[:, None], [each[None] for each in states_given]
    return [x, w[None], r[None], b[None], *states_given]
