"""Loops and branches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pax_export._foundations.jax import scan_operands
from pax_export._foundations.jaxpr import jaxpr_of
from pax_export._foundations.types import PyTree, TracedProgram
from pax_export.export.formats.tflite.builder import loops, moves
from pax_export.export.formats.tflite.builder import operators as lite
from pax_export.export.formats.tflite.builder.graph import TensorLike
from pax_export.export.formats.tflite.rules.layout import bytes_of, updated
from pax_export.export.formats.tflite.tensors import (
    CARRIERS,
    Operation,
    constant,
    full,
    is_static,
    kind,
    rule,
)
from pax_export.export.portable.decompositions.control import is_of_one, is_of_two


def _structs(program: TracedProgram) -> tuple[Sequence[Any], Sequence[Any]]:
    jaxpr = jaxpr_of(program)
    return [each.aval for each in jaxpr.invars], [each.aval for each in jaxpr.outvars]


def _flat(op: Operation, values: Sequence[Any], structs: Sequence[Any]) -> list[Any]:
    """Tensors with all dimensions, as loops and branches take them."""
    return [
        full(value() if callable(value) else value, struct.shape, op.sizes)
        for value, struct in zip(values, structs)
    ]


def _values(flat: Sequence[Any], structs: Sequence[Any]) -> list[Any]:
    """Restores the known sizes of values."""
    for each, struct in zip(flat, structs):
        each.set_shape(struct.shape)
    return list(flat)


def _invariants(structs: Sequence[Any]) -> list[Any]:
    """Shapes that may change from one step to the next as little as jax lets them."""
    return [[int(n) if is_static(n) else None for n in struct.shape] for struct in structs]


@rule("while", thin=True, when=is_of_one)
def while_loop(op: Operation, *operands: TensorLike) -> list[Any]:
    first = op.params["cond_nconsts"]
    last = first + op.params["body_nconsts"]
    structs = op.results
    start = _flat(op, operands[last:], structs)

    def going(*state: PyTree) -> Any:
        values = [*operands[:first], *_values(state, structs)]
        (found,) = op.run(op.params["cond_jaxpr"], values)
        return full(found() if callable(found) else found, (), op.sizes)

    def body(*state: PyTree) -> Any:
        values = [*operands[first:last], *_values(state, structs)]
        return _flat(op, op.run(op.params["body_jaxpr"], values), structs)

    shapes = _invariants(structs)
    return _values(loops.while_loop(going, body, start, shape_invariants=shapes), structs)


@rule("scan", thin=True)
def scan(op: Operation, *operands: TensorLike) -> list[Any]:
    constants, carry, inputs = scan_operands(op.params, list(operands))
    program, length = op.params["jaxpr"], op.params["length"]
    body_inputs, body_outputs = _structs(program)
    carried, rows = body_outputs[: len(carry)], op.results[len(carry) :]
    input_structs = scan_operands(op.params, list(op.operands))[2]
    start = _flat(op, carry, op.results[: len(carry)])
    whole = _flat(op, inputs, input_structs)
    count = op.sizes.of(length)
    # TFLite also prepares a loop without iterations, which then needs space for its output.
    room = count if is_static(count) else lite.maximum(count, 1)
    buffers = [_zeros(op, struct, room) for struct in rows]

    def body(step: Any, *state: PyTree) -> Any:
        index = count - 1 - step if op.params["reverse"] else step
        now = _values(state[: len(start)], carried)
        slices = [lite.cast(moves.gather(bytes_of(x), index), x.dtype) for x in whole]
        xs = _values(slices, body_inputs[len(constants) + len(carry) :])
        results = op.run(program, [*constants, *now, *xs])
        after = _flat(op, results[: len(carry)], carried)
        ys = _flat(op, results[len(carry) :], body_outputs[len(carry) :])
        written = []
        for old, new in zip(state[len(start) :], ys):
            places = [index, *[lite.constant(0)] * (old.shape.rank - 1)]
            written.append(updated(old, moves.expand_dims(new, 0), places))
        return (step + 1, *after, *written)

    structs, flat = op.results, [*start, *buffers]
    if is_static(count) and count <= _UNROLLED:
        state = (lite.constant(0), *flat)
        for number in range(count):
            state = body(lite.constant(number), *state[1:])
        return _values(state[1:], structs)
    begun, shapes = [lite.constant(0), *flat], [[], *_invariants(structs)]
    _, *results = loops.while_loop(
        lambda step, *_: lite.less(step, count), body, begun, shape_invariants=shapes
    )
    if not is_static(count):
        results[len(start) :] = [each[:count] for each in results[len(start) :]]
    return _values(results, structs)


#: A loop of so few steps is written out.
_UNROLLED = 2


def _zeros(op: Operation, struct: Any, room: Any) -> Any:
    carrier = CARRIERS[kind(struct)]
    sizes = moves.stack([room, *map(op.sizes.of, struct.shape[1:])])
    result = moves.fill(sizes, constant(0, np.dtype(carrier)))
    result.set_shape(struct.shape)
    return result


@rule("cond", thin=True, when=is_of_two)
def cond(op: Operation, which: TensorLike, *operands: TensorLike) -> list[Any]:
    which = moves.reshape(which, [])

    def run(branch: Any) -> Any:
        return lambda: _flat(op, op.run(branch, list(operands)), op.results)

    first, second = map(run, op.params["branches"])
    return _values(loops.cond(lite.less_equal(which, 0), first, second), op.results)
