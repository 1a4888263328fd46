"""Loops and branches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pax_export._foundations.jax import scan_operands
from pax_export._foundations.jaxpr import jaxpr_of
from pax_export._foundations.types import PyTree, TracedProgram
from pax_export.export.formats.tflite.builder import moves
from pax_export.export.formats.tflite.builder import operators as lite
from pax_export.export.formats.tflite.builder.graph import (
    Graph,
    Tensor,
    TensorLike,
    current,
    tensor,
)
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
def while_(op: Operation, *operands: TensorLike) -> list[Any]:
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
    return _values(write_while(going, body, start, shape_invariants=shapes), structs)


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
    _, *results = write_while(
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
def cond(op: Operation, which: Tensor, *operands: Tensor) -> list[Any]:
    which = moves.reshape(which, [])

    def run(branch: Any) -> Any:
        return lambda: _flat(op, op.run(branch, list(operands)), op.results)

    first, second = map(run, op.params["branches"])
    return _values(_write_if(lite.less_equal(which, 0), first, second), op.results)


# --- Loops and branches as subgraphs with captured inputs ---


def write_while(
    going: Callable[..., Tensor],
    body: Callable[..., Sequence[Any]],
    start: Sequence[Any],
    shape_invariants: Sequence[Sequence[Any]],
) -> list[Tensor]:
    """The last state of a loop; the shapes are those that every state has."""
    outer = current()
    start = [tensor(each) for each in start]
    test, step = Graph("while_cond", outer), Graph("while_body", outer)
    for graph in (test, step):
        for each, shape in zip(start, shape_invariants):
            graph.placeholder(shape, each.dtype)
    with test.active():
        test.outputs = [test.own(tensor(going(*test.inputs)))]
    with step.active():
        results = [step.own(tensor(each)) for each in body(*step.inputs)]
        # The next state is written over this one, so what moves to another place is copied.
        step.outputs = [
            each if each is here or each.operator else moves.identity(each)
            for each, here in zip(results, step.inputs)
        ]
    inputs = [*start, *_captured(outer, (test, step))]
    step.outputs += step.inputs[len(start) :]
    shapes = [(shape, each.dtype) for each, shape in zip(start, shape_invariants)]
    shapes += [(each.shape, each.dtype) for each in inputs[len(start) :]]
    graphs = {"cond_subgraph_index": test, "body_subgraph_index": step}
    return _append(outer, "WHILE", inputs, shapes, graphs)[: len(start)]


def _write_if(which: Tensor, here: Callable, there: Callable) -> list[Tensor]:
    """Returns the results of one of two functions with equal dtypes and ranks."""
    if which.value is not None:
        return list(here() if bool(which.value) else there())
    outer = current()
    graphs = {
        "then_subgraph_index": Graph("then", outer),
        "else_subgraph_index": Graph("else", outer),
    }
    for graph, function in zip(graphs.values(), (here, there)):
        with graph.active():
            results = [graph.own(tensor(each)) for each in function()]
            graph.outputs = [each if each.operator else _copied(each) for each in results]
    inputs = [which, *_captured(outer, tuple(graphs.values()))]
    first, second = (graph.outputs for graph in graphs.values())
    shapes = [
        ([n if n == m else None for n, m in zip(one.shape, other.shape)], one.dtype)
        for one, other in zip(first, second)
    ]
    return _append(outer, "IF", inputs, shapes, graphs)


def _copied(result: Tensor) -> Tensor:
    """A result of a branch, in memory of its own.

    LiteRT's RESHAPE may return the memory of a constant, which its IF frees; SLICE copies.
    """
    if result.value is None or not result.shape.size:
        return moves.identity(result)
    flat = moves.reshape(result, [-1])
    ends = [constant(np.array([each], np.int32)) for each in (0, -1)]
    (copy,) = current().append("SLICE", [flat, *ends], [(flat.shape, flat.dtype)], {})
    return moves.reshape(copy, list(result.shape))


def _captured(outer: Graph, graphs: Sequence[Graph]) -> list[Tensor]:
    """Makes outer tensors that the graphs read into inputs of all of them."""
    found = list(dict.fromkeys(each for graph in graphs for each, _ in graph.captured))
    for graph in graphs:
        graph.inputs += [graph.own(each) for each in found]
    return [outer.own(each) for each in found]


def _append(
    outer: Graph, name: str, inputs: list[Tensor], shapes: Any, graphs: dict[str, Graph]
) -> list[Tensor]:
    results = outer.append(name, inputs, shapes, {"number": len(outer.operators)})
    operator = results[0].operator
    operator.graphs, operator.options = graphs, {}
    return results
