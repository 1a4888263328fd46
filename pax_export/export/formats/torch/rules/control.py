"""Loops and branches: modules that hold the bodies, see `loops.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from pax_export._foundations.jax import scan_operands
from pax_export.export.formats.torch.values import TorchValue, rule
from pax_export.export.portable.decompositions.control import is_of_one, is_of_two

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pax_export._foundations.types import Aval, TracedProgram
    from pax_export.export.formats.torch.graph import TorchGraph


def _structs(values: Sequence[TorchValue | Aval]) -> list[Any]:
    return [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in values]


@rule("cond", when=is_of_two)
def write_cond(
    builder: TorchGraph, which: TorchValue, *operands: TorchValue,
    branches: Sequence[TracedProgram], **_: object,
) -> Any:  # fmt: skip
    if which.known is not None:
        return builder.inline(branches[int(which.known > 0)], operands)
    bodies = [builder.write_body(each, _structs(operands)) for each in branches]
    chosen = builder.node_of(which)
    chosen = chosen if which.dtype == np.bool_ else builder("gt", chosen, 0)
    branch = builder.loops.Branch(*bodies)
    return builder.add_part(branch, "cond", chosen, *builder.operands_of(operands))


@rule("while", when=is_of_one)
def write_while(
    builder: TorchGraph, *operands: TorchValue, cond_jaxpr: TracedProgram,
    body_jaxpr: TracedProgram, cond_nconsts: int, body_nconsts: int, **_: object,
) -> Any:  # fmt: skip
    consts = operands[: cond_nconsts + body_nconsts]
    state = operands[cond_nconsts + body_nconsts :]
    carried = _structs(builder.results)
    structs, count = [*carried, *_structs(consts)], len(carried)

    def write_condition(values: Sequence[TorchValue]) -> Any:
        return builder.inline(cond_jaxpr, [*values[count : count + cond_nconsts], *values[:count]])

    def write_step(values: Sequence[TorchValue]) -> Any:
        return builder.inline(body_jaxpr, [*values[count + cond_nconsts :], *values[:count]])

    going, step = (builder.body_of(each, structs) for each in (write_condition, write_step))
    loop = builder.loops.While(going, step, count)
    return builder.add_part(loop, "while", *builder.operands_of([*state, *consts]))


@rule("scan")
def write_scan(builder: TorchGraph, *operands: TorchValue, **params: Any) -> Any:
    constants, state, rows = scan_operands(params, operands)
    results, count = builder.results, len(state)
    pieces = [jax.ShapeDtypeStruct(each.shape[1:], each.dtype) for each in rows]
    structs = [*_structs(results[:count]), *pieces, *_structs(constants)]

    def write_step(values: Sequence[TorchValue]) -> Any:
        first = values[count + len(rows) :]
        return builder.inline(params["jaxpr"], [*first, *values[: count + len(rows)]])

    body = builder.body_of(write_step, structs)
    length = builder.sizes.of(params["length"])
    stacked = [(builder.sizes.shape(e.shape), builder.kind_of(e.dtype)) for e in results[count:]]
    loop = builder.loops.RowLoop(body, count, len(rows), bool(params["reverse"]), builder.trains)
    nodes = builder.operands_of([*state, *rows, *constants])
    empty = [builder("empty", shape, **kind) for shape, kind in stacked]
    return builder.add_part(loop, "scan", length, tuple(empty), *nodes)


@rule("own_rule")
def own_rule(builder: TorchGraph, *operands: TorchValue, key: int) -> Any:
    """A function with a derivative of its own, see `own_rules.py`.

    A module keeps it as a function of autograd. A program of `torch.export` has none: there its
    results are constants for autograd, and a linear function with that derivative is added, of
    differences that are 0.
    """
    rule = builder.own_rules[key]
    operands = operands[-len(rule.equation.invars) :]  # after constants of its program
    if not builder.live:
        fixed = [_detached(builder, each) for each in operands]
        moves = [_difference(builder, operands[index]) for index in rule.floats]
        outputs = builder.write(rule.forward, fixed)
        slopes = builder.write(rule.tangent_program(), [*fixed, *moves])
        return [
            builder("add", builder.node_of(y), _finite(builder, t)) for y, t in zip(outputs, slopes)
        ]
    structs, outer = _structs(operands), _structs(builder.results)
    forward = builder.body_of(lambda values: builder.write(rule.forward, values), structs)
    backward = builder.body_of(
        lambda values: builder.write(rule.backward_program(), values), [*structs, *outer]
    )
    loop = builder.loops.OwnGradient(forward, backward, rule.floats, len(operands))
    return builder.add_part(loop, "own_rule", *builder.operands_of(operands))


def _detached(builder: TorchGraph, x: TorchValue) -> TorchValue:
    return TorchValue(builder("detach", builder.node_of(x)), x.dtype, x.shape)


def _difference(builder: TorchGraph, x: TorchValue) -> TorchValue:
    node = builder.node_of(x)
    delta = builder("sub", node, builder("detach", node))
    return TorchValue(builder("where", builder("isfinite", node), delta, 0.0), x.dtype, x.shape)


def _finite(builder: TorchGraph, x: TorchValue) -> Any:
    node = builder.node_of(x)
    return builder("where", builder("isfinite", node), node, 0.0)
