"""Loops, branches and custom linear solves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from pax_export._types import Jaxpr
from pax_export.export.formats.onnx.graph import Writer, flat, together
from pax_export.export.formats.onnx.registry import complex_rule, rule
from pax_export.export.formats.onnx.rules.arithmetic import choose
from pax_export.export.formats.onnx.rules.shapes import one_value
from pax_export.export.formats.onnx.values import AnyValue, Parts, Value

Results = Sequence[Any]


@complex_rule("cond")
@rule("cond")
def cond(
    writer: Writer,
    results: Results,
    index: AnyValue,
    *operands: AnyValue,
    branches: Sequence[Any],
    **_: object,
) -> list[AnyValue]:
    which = one_value(index)
    if which.known is not None:
        place = int(np.clip(int(which.known), 0, len(branches) - 1))
        return writer.inline(branches[place], operands)
    return _branched(writer, results, which, operands, branches)


def _branched(
    writer: Writer,
    results: Results,
    which: Value,
    operands: Sequence[AnyValue],
    branches: Sequence[Any],
) -> list[AnyValue]:
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
            return flat(_branched(writer, results, less, operands, branches[1:]))
        return flat(writer.inline(branches[1], operands))

    names = writer.branched(is_first, lambda: flat(writer.inline(branches[0], operands)), rest)
    return together(results, names)


@complex_rule("while")
@rule("while")
def while_(
    writer: Writer,
    results: Results,
    *operands: AnyValue,
    cond_jaxpr: object,
    body_jaxpr: object,
    cond_nconsts: int,
    body_nconsts: int,
    **_: object,
) -> list[AnyValue]:
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
    bodies = flat(inside)
    turn, again = writer.new_name("turn"), writer.new_name("again")
    given = [
        writer.entry(turn, np.int64, ()),
        writer.entry(again, np.bool_, ()),
        *(writer.entry(each.name, each.carrier, each.shape) for each in bodies),
    ]
    body = writer.graph(nodes, given, [one_value(more), *flat(after)])
    names = writer("Loop", None, start, *flat(state), results=len(bodies), body=body)
    return together(results, [names] if isinstance(names, str) else names)


def _any(writer: Writer, flags: AnyValue) -> Value:
    """Whether one of a batch holds."""
    one = one_value(flags)
    if not one.rank:
        return one
    found = writer("ReduceMax", writer.cast(one, np.int32), keepdims=0)
    return Value(writer.cast(found, np.bool_), one.dtype, ())


def _kept(writer: Writer, going: AnyValue, new: AnyValue, old: AnyValue) -> AnyValue:
    """The new state of what goes on, the old one of what is done."""
    flags, made = one_value(going), []
    for one, other in zip(flat([new]), flat([old])):
        wide = writer.unsqueeze(flags, range(flags.rank, other.rank))
        name = choose(writer, wide, one, other, other.dtype)
        made.append(dataclasses.replace(other, name=name))
    return Parts((made[0], made[1]), new.dtype) if isinstance(new, Parts) else made[0]


@complex_rule("scan")
@rule("scan")
def scan(
    writer: Writer,
    results: Results,
    *operands: AnyValue,
    jaxpr: Jaxpr,
    length: object,
    reverse: bool,
    **_: object,
) -> list[AnyValue]:
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
    scanned, taken = flat(rows), flat(pieces)
    if not scanned:
        steps = writer.name(writer.arange(length))
        scanned = [Value(steps, np.dtype(np.int64), (length,))]
        taken = [Value(writer.new_name("turn"), np.dtype(np.int64), ())]
    given = [*flat(carried), *taken]
    entries = [writer.entry(each.name, each.carrier, each.shape) for each in given]
    body = writer.graph(nodes, entries, flat(made))
    counts = len(flat(made)), len(flat(carried))
    ways = {"scan_input_directions": [int(reverse)] * len(scanned)}
    if counts[0] > counts[1]:
        ways["scan_output_directions"] = [int(reverse)] * (counts[0] - counts[1])

    def scanning() -> list[Value]:
        names = writer(
            "Scan",
            *flat(state),
            *scanned,
            results=counts[0],
            body=body,
            num_scan_inputs=len(scanned),
            **ways,
        )
        return flat(together(results, [names] if isinstance(names, str) else names))

    def nothing() -> list[Value]:
        """What is left where there are no rows, which onnxruntime does not go through."""
        stacked = flat(together(results[num_carry:], [""] * (counts[0] - counts[1])))
        zeros = [
            dataclasses.replace(each, name=writer.expand(np.zeros((), each.carrier), each.shape))
            for each in stacked
        ]
        return [*flat(state), *zeros]

    some = writer.is_some(length)
    if some is None:
        return together(results, [each.name for each in scanning()])
    return together(results, writer.branched(some, scanning, nothing))


def _same_rank(inside: Any, outside: Any) -> bool:
    return len(inside.aval.shape) == len(outside.shape)
