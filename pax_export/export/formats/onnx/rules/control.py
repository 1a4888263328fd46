"""Loops and branches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pax_export._foundations.jax import scan_operands
from pax_export._foundations.types import Size, TracedProgram
from pax_export.export.formats.onnx.graph import (
    GraphBuilder,
    Operand,
    all_nodes,
    bodies,
    is_number,
    rule,
    values_of,
)
from pax_export.export.formats.onnx.values import Value
from pax_export.export.portable.decompositions.control import is_of_one, is_of_two


@rule("cond", when=is_of_two)
def cond(
    builder: GraphBuilder, which: Value, *operands: Value, branches: Sequence[Any], **_: object
) -> list[Value]:
    (first, second), results = branches, builder.results
    if which.known is not None:
        return builder.inline(second if which.known > 0 else first, operands)
    is_first = builder("LessOrEqual", which, builder.like(0, which))
    ways = (partial(builder.inline, each, operands) for each in branches)
    return values_of(results, builder.branched(is_first, *ways))


@rule("while", when=is_of_one)
def while_(
    builder: GraphBuilder,
    *operands: Value,
    cond_jaxpr: TracedProgram,
    body_jaxpr: TracedProgram,
    cond_nconsts: int,
    body_nconsts: int,
    **_: object,
) -> list[Value]:
    of_cond, results = operands[:cond_nconsts], builder.results
    of_body = operands[cond_nconsts : cond_nconsts + body_nconsts]
    state = operands[cond_nconsts + body_nconsts :]
    (start,) = builder.inline(cond_jaxpr, [*of_cond, *state])
    inside = [builder.fresh(result.dtype, result.shape) for result in results]
    with builder.body() as nodes:
        after = builder.inline(body_jaxpr, [*of_body, *inside])
        (more,) = builder.inline(cond_jaxpr, [*of_cond, *after])
    loop = _Loop(state, inside, nodes, [more, *after])
    return values_of(results, _write_loop(builder, loop, builder.new_name("turn"), None, start))


class _Loop(NamedTuple):
    """A loop or scan: its state and rows, and a body with what that takes for them, and makes."""

    state: Sequence[Value]
    carried: Sequence[Value]
    nodes: Sequence[Any]
    made: Sequence[Value]
    rows: Sequence[Value] = ()
    pieces: Sequence[Value] = ()


def _write_loop(
    builder: GraphBuilder, loop: _Loop, turn: str, count: Operand, start: Value
) -> list[str]:
    """Writes a loop whose body computes the condition and the next state."""
    inputs = [
        builder.entry(turn, np.int64, ()),
        builder.entry(builder.new_name("again"), np.bool_, ()),
        *(builder.entry(each.name, each.carrier, each.shape) for each in loop.carried),
    ]
    body = builder.graph(loop.nodes, inputs, loop.made)
    return builder("Loop", count, start, *loop.state, results=len(loop.made) - 1, body=body)


@rule("scan")
def scan(builder: GraphBuilder, *operands: Value, **params: Any) -> list[Value]:
    """Writes a `Scan`, or a loop where runtimes do not support one."""
    (consts, state, rows), results = scan_operands(params, operands), builder.results
    num_carry, jaxpr, length, reverse = (
        len(state),
        params["jaxpr"],
        params["length"],
        params["reverse"],
    )
    carried = [builder.fresh(each.dtype, each.shape) for each in results[:num_carry]]
    pieces = [builder.fresh(each.dtype, each.shape[1:]) for each in rows]
    with builder.body() as nodes:
        outputs = builder.inline(jaxpr, [*consts, *carried, *pieces])
        if len(outputs) > num_carry and not rows and not _has_scan(nodes):
            pieces = [builder.fresh(np.int64, ())]
            outputs[num_carry:] = _depend_on(builder, pieces[0], outputs[num_carry:])
    if pieces and not rows:
        zeros = builder.expand(np.zeros((), np.int64), [length])
        rows = [Value(zeros, np.dtype(np.int64), (length,))]

    loop = _Loop(state, carried, nodes, outputs, rows, pieces)

    def scanning() -> list[Value]:
        if _is_plain(nodes, outputs[:num_carry], pieces):
            return values_of(results, _write_scan(builder, loop, consts, reverse))
        return values_of(results, _scan_by_loop(builder, loop, length, reverse))

    def nothing() -> list[Value]:
        """Returns the results for zero rows, which onnxruntime does not run."""
        stacked = values_of(results[num_carry:], [""] * (len(outputs) - num_carry))
        zeros = [
            dataclasses.replace(each, name=builder.expand(np.zeros((), each.carrier), each.shape))
            for each in stacked
        ]
        return [*state, *zeros]

    some = builder.is_some(length)
    if some is None:
        return scanning()
    return values_of(results, builder.branched(some, scanning, nothing))


def _has_scan(nodes: Sequence[Any]) -> bool:
    return any(node.op_type == "Scan" for node in all_nodes(nodes))


def _depend_on(builder: GraphBuilder, row: Value, results: Sequence[Value]) -> list[Value]:
    """Makes the smallest of results depend on a row, which is 0: unread ones are not run through.

    Without rows, a scan would be a loop, which is slower, and does not stack in IREE.
    """
    sizes = [[size if is_number(size) else 1000 for size in each.shape] for each in results]
    least = results[min(range(len(sizes)), key=lambda index: math.prod(sizes[index]))]
    # Twice: from a single one, OpenVINO gathers without reading the index.
    once = builder.unsqueeze(least, [0])
    name = builder("Gather", builder("Concat", once, once, axis=0), row, axis=0)
    dependent = Value(name, least.dtype, least.shape)
    return [dependent if each is least else each for each in results]


#: Operators that may only move numbers.
_MOVES = (
    "Cast", "Concat", "Expand", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze",
    "Transpose", "Unsqueeze",
)  # fmt: skip


def _is_plain(nodes: Sequence[Any], states: Sequence[Value], pieces: Sequence[Value]) -> bool:
    """Returns whether OpenVINO runs a scan with this body correctly.

    It does not support nested scans, runs once for unread rows, and returns wrong results if a row
    becomes the next state.
    """
    every = list(all_nodes(nodes))
    if not pieces or _has_scan(nodes):
        return False
    moved = {each.name for each in states}
    for node in reversed(nodes):
        if node.op_type in _MOVES and not moved.isdisjoint(node.output):
            moved.update(node.input)
    read = {name for node in every for name in node.input}
    names = {each.name for each in pieces}
    return moved.isdisjoint(names) and not read.isdisjoint(names)


def _scan_by_loop(builder: GraphBuilder, loop: _Loop, length: Size, reverse: bool) -> list[str]:
    """Writes a scan as a loop, which takes onnxruntime a little longer."""
    turn, one = builder.new_name("turn"), np.array(1, np.int64)
    count = builder.squeeze(builder.sizes.one(length), [0])
    goes_on = builder.literal(np.array(True))
    with builder.body() as begun:
        is_turned = reverse and loop.rows
        index = builder("Sub", builder("Sub", count, one), turn) if is_turned else turn
        for row, piece in zip(loop.rows, loop.pieces):
            builder("Gather", row, index, axis=0)
            begun[-1].output[:] = [piece.name]
    whole = loop._replace(nodes=[*begun, *loop.nodes], made=[goes_on, *loop.made])
    names, stacked = _write_loop(builder, whole, turn, count, goes_on), len(loop.state)
    if reverse:
        ends = [np.array([n], np.int64) for n in (-1, np.iinfo(np.int64).min, 0, -1)]
        names[stacked:] = [builder("Slice", name, *ends) for name in names[stacked:]]
    return names


def _write_scan(
    builder: GraphBuilder, loop: _Loop, consts: Sequence[Value], reverse: bool
) -> list[str]:
    inputs = (*loop.carried, *loop.pieces)
    entries = [builder.entry(each.name, each.carrier, each.shape) for each in inputs]
    body = builder.graph(loop.nodes, entries, loop.made)
    outside = _take_outside(builder, body, consts)
    attributes: dict[str, Any] = {"num_scan_inputs": len(loop.pieces)}
    attributes["scan_input_directions"] = [int(reverse)] * len(loop.pieces)
    if stacked := len(loop.made) - len(loop.carried):
        attributes["scan_output_directions"] = [int(reverse)] * stacked
    operands, results = (*outside, *loop.state, *loop.rows), len(outside) + len(loop.made)
    return builder("Scan", *operands, results=results, body=body, **attributes)[len(outside) :]


def _take_outside(builder: GraphBuilder, body: Any, consts: Sequence[Value]) -> list[str]:
    """Passes outer values of a body as constant state; returns their names.

    In OpenVINO, the body of a scan sees only its inputs and stored constants.
    """
    known, nodes = {each.name: each for each in consts}, list(all_nodes(body.node))
    graphs = [body, *(inner for node in nodes for inner in bodies(node))]
    inside = {each.name for graph in graphs for each in graph.input}
    inside.update(name for node in nodes for name in node.output)
    read = dict.fromkeys(name for node in nodes for name in node.input if name)
    outside = [name for name in read if name not in inside and name not in builder.initializers]
    renamed = {name: builder.new_name("outside") for name in outside}
    for node in nodes:
        node.input[:] = [renamed.get(name, name) for name in node.input]
    for index, (name, body_input) in enumerate(renamed.items()):
        body_output, value = builder.new_name("outside"), known.get(name)
        entries = [builder.onnx.ValueInfoProto(name=each) for each in (body_input, body_output)]
        if value is not None:
            entries = [
                builder.entry(each, value.carrier, value.shape)
                for each in (body_input, body_output)
            ]
        body.node.append(
            builder.onnx.helper.make_node("Identity", [body_input], [body_output], name=body_output)
        )
        body.input.insert(index, entries[0])
        body.output.insert(index, entries[1])
    return outside
