"""Loops, branches and custom linear solves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from pax_export._types import Jaxpr
from pax_export.export.formats.onnx.graph import GraphBuilder, values_of
from pax_export.export.formats.onnx.registry import rule
from pax_export.export.formats.onnx.rules.arithmetic import choose
from pax_export.export.formats.onnx.values import Value

Results = Sequence[Any]


@rule("cond")
def cond(
    builder: GraphBuilder,
    results: Results,
    which: Value,
    *operands: Value,
    branches: Sequence[Any],
    **_: object,
) -> list[Value]:
    if which.known is not None:
        place = int(np.clip(int(which.known), 0, len(branches) - 1))
        return builder.inline(branches[place], operands)
    return _branched(builder, results, which, operands, branches)


def _branched(
    builder: GraphBuilder,
    results: Results,
    which: Value,
    operands: Sequence[Value],
    branches: Sequence[Any],
) -> list[Value]:
    """The first branch, or those that are left: ONNX chooses between two."""
    if len(branches) == 1:
        return builder.inline(branches[0], operands)
    one = which.name
    if which.dtype == np.bool_:
        is_first = builder("Not", one)
    else:
        is_first = builder("LessOrEqual", one, builder.like(0, which))

    def rest() -> list[Value]:
        if which.dtype != np.bool_ and len(branches) > 2:
            less = Value(builder("Sub", one, builder.like(1, which)), which.dtype, ())
            return _branched(builder, results, less, operands, branches[1:])
        return builder.inline(branches[1], operands)

    names = builder.branched(is_first, lambda: builder.inline(branches[0], operands), rest)
    return values_of(results, names)


@rule("while")
def while_(
    builder: GraphBuilder,
    results: Results,
    *operands: Value,
    cond_jaxpr: object,
    body_jaxpr: object,
    cond_nconsts: int,
    body_nconsts: int,
    **_: object,
) -> list[Value]:
    of_cond = operands[:cond_nconsts]
    of_body = operands[cond_nconsts : cond_nconsts + body_nconsts]
    state = operands[cond_nconsts + body_nconsts :]
    if not state:
        return []
    (start,) = builder.inline(cond_jaxpr, [*of_cond, *state])
    inside = [builder.fresh(result.dtype, result.shape) for result in results]
    with builder.body() as nodes:
        after = builder.inline(body_jaxpr, [*of_body, *inside])
        if start.rank:  # of a batch, some are done before others
            (going,) = builder.inline(cond_jaxpr, [*of_cond, *inside])
            after = [_kept(builder, going, *each) for each in zip(after, inside)]
        (more,) = builder.inline(cond_jaxpr, [*of_cond, *after])
        more = _any(builder, more)
    start = _any(builder, start)
    turn, again = builder.new_name("turn"), builder.new_name("again")
    given = [
        builder.entry(turn, np.int64, ()),
        builder.entry(again, np.bool_, ()),
        *(builder.entry(each.name, each.carrier, each.shape) for each in inside),
    ]
    body = builder.graph(nodes, given, [more, *after])
    names = builder("Loop", None, start, *state, results=len(inside), body=body)
    return values_of(results, [names] if isinstance(names, str) else names)


def _any(builder: GraphBuilder, flags: Value) -> Value:
    """Whether one of a batch holds."""
    if not flags.rank:
        return flags
    found = builder("ReduceMax", builder.cast(flags, np.int32), keepdims=0)
    return Value(builder.cast(found, np.bool_), flags.dtype, ())


def _kept(builder: GraphBuilder, going: Value, new: Value, old: Value) -> Value:
    """The new state of what goes on, the old one of what is done."""
    wide = builder.unsqueeze(going, range(going.rank, old.rank))
    return dataclasses.replace(old, name=choose(builder, wide, new, old, old.dtype))


@rule("scan")
def scan(
    builder: GraphBuilder,
    results: Results,
    *operands: Value,
    jaxpr: Jaxpr,
    length: object,
    reverse: bool,
    **_: object,
) -> list[Value]:
    """A scan of ONNX; without arrays to go through, over numbers that nobody reads."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    # How many are constants, state and rows, versions of jax say in different ways.
    num_carry = sum(map(_same_rank, inner.outvars, results))
    num_rows = len(operands) - sum(map(_same_rank, inner.invars, operands))
    num_consts = len(operands) - num_rows - num_carry
    consts = operands[:num_consts]
    state = operands[num_consts : num_consts + num_carry]
    rows = list(operands[num_consts + num_carry :])
    carried = [builder.fresh(each.dtype, each.shape) for each in results[:num_carry]]
    pieces = [builder.fresh(each.dtype, each.shape[1:]) for each in rows]
    with builder.body() as nodes:
        made = builder.inline(jaxpr, [*consts, *carried, *pieces])
    scanned, taken = rows, pieces
    if not scanned:
        steps = builder.name(builder.arange(length))
        scanned = [Value(steps, np.dtype(np.int64), (length,))]
        taken = [Value(builder.new_name("turn"), np.dtype(np.int64), ())]
    given = [*carried, *taken]
    entries = [builder.entry(each.name, each.carrier, each.shape) for each in given]
    body = builder.graph(nodes, entries, made)
    counts = len(made), len(carried)
    ways = {"scan_input_directions": [int(reverse)] * len(scanned)}
    if counts[0] > counts[1]:
        ways["scan_output_directions"] = [int(reverse)] * (counts[0] - counts[1])

    def scanning() -> list[Value]:
        names = builder(
            "Scan",
            *state,
            *scanned,
            results=counts[0],
            body=body,
            num_scan_inputs=len(scanned),
            **ways,
        )
        return values_of(results, [names] if isinstance(names, str) else names)

    def nothing() -> list[Value]:
        """What is left where there are no rows, which onnxruntime does not go through."""
        stacked = values_of(results[num_carry:], [""] * (counts[0] - counts[1]))
        zeros = [
            dataclasses.replace(each, name=builder.expand(np.zeros((), each.carrier), each.shape))
            for each in stacked
        ]
        return [*state, *zeros]

    some = builder.is_some(length)
    if some is None:
        return scanning()
    return values_of(results, builder.branched(some, scanning, nothing))


def _same_rank(inside: Any, outside: Any) -> bool:
    return len(inside.aval.shape) == len(outside.shape)
