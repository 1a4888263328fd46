"""Loops, branches and custom linear solves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from pax_export._types import Jaxpr
from pax_export.export.formats.onnx.graph import Writer, values_of
from pax_export.export.formats.onnx.registry import rule
from pax_export.export.formats.onnx.rules.arithmetic import choose
from pax_export.export.formats.onnx.values import Value

Results = Sequence[Any]


@rule("cond")
def cond(
    writer: Writer,
    results: Results,
    which: Value,
    *operands: Value,
    branches: Sequence[Any],
    **_: object,
) -> list[Value]:
    if which.known is not None:
        place = int(np.clip(int(which.known), 0, len(branches) - 1))
        return writer.inline(branches[place], operands)
    return _branched(writer, results, which, operands, branches)


def _branched(
    writer: Writer,
    results: Results,
    which: Value,
    operands: Sequence[Value],
    branches: Sequence[Any],
) -> list[Value]:
    """The first branch, or those that are left: ONNX chooses between two."""
    if len(branches) == 1:
        return writer.inline(branches[0], operands)
    one = which.name
    if which.dtype == np.bool_:
        is_first = writer("Not", one)
    else:
        is_first = writer("LessOrEqual", one, writer.like(0, which))

    def rest() -> list[Value]:
        if which.dtype != np.bool_ and len(branches) > 2:
            less = Value(writer("Sub", one, writer.like(1, which)), which.dtype, ())
            return _branched(writer, results, less, operands, branches[1:])
        return writer.inline(branches[1], operands)

    names = writer.branched(is_first, lambda: writer.inline(branches[0], operands), rest)
    return values_of(results, names)


@rule("while")
def while_(
    writer: Writer,
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
    (start,) = writer.inline(cond_jaxpr, [*of_cond, *state])
    inside = [writer.fresh(result.dtype, result.shape) for result in results]
    with writer.body() as nodes:
        after = writer.inline(body_jaxpr, [*of_body, *inside])
        if start.rank:  # of a batch, some are done before others
            (going,) = writer.inline(cond_jaxpr, [*of_cond, *inside])
            after = [_kept(writer, going, *each) for each in zip(after, inside)]
        (more,) = writer.inline(cond_jaxpr, [*of_cond, *after])
        more = _any(writer, more)
    start = _any(writer, start)
    turn, again = writer.new_name("turn"), writer.new_name("again")
    given = [
        writer.entry(turn, np.int64, ()),
        writer.entry(again, np.bool_, ()),
        *(writer.entry(each.name, each.carrier, each.shape) for each in inside),
    ]
    body = writer.graph(nodes, given, [more, *after])
    names = writer("Loop", None, start, *state, results=len(inside), body=body)
    return values_of(results, [names] if isinstance(names, str) else names)


def _any(writer: Writer, flags: Value) -> Value:
    """Whether one of a batch holds."""
    if not flags.rank:
        return flags
    found = writer("ReduceMax", writer.cast(flags, np.int32), keepdims=0)
    return Value(writer.cast(found, np.bool_), flags.dtype, ())


def _kept(writer: Writer, going: Value, new: Value, old: Value) -> Value:
    """The new state of what goes on, the old one of what is done."""
    wide = writer.unsqueeze(going, range(going.rank, old.rank))
    return dataclasses.replace(old, name=choose(writer, wide, new, old, old.dtype))


@rule("scan")
def scan(
    writer: Writer,
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
    carried = [writer.fresh(each.dtype, each.shape) for each in results[:num_carry]]
    pieces = [writer.fresh(each.dtype, each.shape[1:]) for each in rows]
    with writer.body() as nodes:
        made = writer.inline(jaxpr, [*consts, *carried, *pieces])
    scanned, taken = rows, pieces
    if not scanned:
        steps = writer.name(writer.arange(length))
        scanned = [Value(steps, np.dtype(np.int64), (length,))]
        taken = [Value(writer.new_name("turn"), np.dtype(np.int64), ())]
    given = [*carried, *taken]
    entries = [writer.entry(each.name, each.carrier, each.shape) for each in given]
    body = writer.graph(nodes, entries, made)
    counts = len(made), len(carried)
    ways = {"scan_input_directions": [int(reverse)] * len(scanned)}
    if counts[0] > counts[1]:
        ways["scan_output_directions"] = [int(reverse)] * (counts[0] - counts[1])

    def scanning() -> list[Value]:
        names = writer(
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
            dataclasses.replace(each, name=writer.expand(np.zeros((), each.carrier), each.shape))
            for each in stacked
        ]
        return [*state, *zeros]

    some = writer.is_some(length)
    if some is None:
        return scanning()
    return values_of(results, writer.branched(some, scanning, nothing))


def _same_rank(inside: Any, outside: Any) -> bool:
    return len(inside.aval.shape) == len(outside.shape)
