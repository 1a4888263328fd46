"""Loops and branches, as functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pax_export._foundations.jax import scan_operands
from pax_export._foundations.types import TracedProgram
from pax_export.export.formats.saved_model.operations.graph import Frame, NodeBuilder, Output, rule
from pax_export.export.formats.saved_model.proto.messages import (
    VARIANT,
    FunctionName,
    Spec,
    dtype_number,
)
from pax_export.export.portable.decompositions.control import is_of_one
from pax_export.export.portable.sizes import is_number

#: Run in the graph around them, as TensorFlow writes its own, and not each turn as a call.
_IN_GRAPH = {"_lower_using_switch_merge": True}
_INDEX = jax.ShapeDtypeStruct((), np.int32)


class _Handle:
    """A list of tensors."""

    shape, dtype = (), VARIANT


@rule("cond")
def cond(
    builder: NodeBuilder, which: Output, *operands: Output, branches: Sequence[Any], **_: object
) -> list[Output]:
    if which.known is not None:
        return builder.inline(branches[min(max(int(which.known), 0), len(branches) - 1)], operands)
    which = builder.cast(which, np.int32)
    which = builder("Maximum", which, 0)  # beyond the last, `Case` takes the last, too
    results, frames = builder.results, []
    for branch in branches:
        with builder.function([]) as frame:
            frame.results = builder.inline(branch, operands)
        frames.append(frame)
    names, captured = builder.library(*frames)
    attributes = {"Tin": _numbers(captured), "Tout": _numbers(results), **_IN_GRAPH}
    attributes["branches"] = list(map(FunctionName, names))
    return builder.add("StatelessCase", [which, *captured], results, **attributes)


@rule("while", when=is_of_one)
def while_(
    builder: NodeBuilder, *operands: Output, cond_jaxpr: TracedProgram, body_jaxpr: TracedProgram,
    cond_nconsts: int, body_nconsts: int, **_: object,
) -> list[Output]:  # fmt: skip
    of_cond, results = operands[:cond_nconsts], builder.results
    of_body = operands[cond_nconsts : cond_nconsts + body_nconsts]
    state = operands[cond_nconsts + body_nconsts :]
    with builder.function(results) as going:
        going.results = builder.inline(cond_jaxpr, [*of_cond, *going.arguments])
    with builder.function(results) as turn:
        turn.results = builder.inline(body_jaxpr, [*of_body, *turn.arguments])
    return _loop(builder, state, results, going, turn)


def _loop(
    builder: NodeBuilder, state: Sequence[Any], results: Sequence[Any], going: Frame, turn: Frame
) -> list[Output]:
    names, captured = builder.library(going, turn, passes=[turn])
    operands = [*map(builder.tensor, state), *captured]
    attributes: dict[str, Any] = dict(zip(("cond", "body"), map(FunctionName, names)))
    ends = [*results, *operands[len(results) :]]
    shapes = [Spec.of(each).shape for each in ends]
    attributes |= {"T": _numbers(operands), "output_shapes": shapes, **_IN_GRAPH}
    outputs = builder.add("StatelessWhile", operands, ends, **attributes)
    return outputs[: len(results)]


@rule("scan")
def scan(builder: NodeBuilder, *operands: Output, **params: Any) -> list[Output]:
    """A loop over lists of tensors.

    First of its operands are the turn and their number, which TensorFlow's derivative reads.
    """
    (consts, state, rows), results = scan_operands(params, operands), builder.results
    length, reverse, count = params["length"], params["reverse"], len(state)
    size = builder.tensor(builder.sizes.of(length))
    stacks = results[count:]
    lists = [
        builder("TensorListReserve", _known(each.shape[1:]), size, element_dtype=each.dtype)
        for each in stacks
    ]
    shapes = [row.shape[1:] for row in rows]
    row_lists = [builder("TensorListFromTensor", row, _known(row.shape[1:])) for row in rows]
    begun = [builder.tensor(0), size, *state, *lists]
    structs = [_INDEX, _INDEX, *results[:count], *(_Handle for _ in stacks)]
    with builder.function(structs) as going:
        going.results = [builder("Less", *going.arguments[:2])]
    with builder.function(structs) as turn:
        index, last, *carried = turn.arguments
        position = builder("Sub", builder("Sub", last, 1), index) if reverse else index
        pieces = [
            builder("TensorListGetItem", each, position, _known(shape), element_dtype=row.dtype)
            for each, row, shape in zip(row_lists, rows, shapes)
        ]
        pieces = list(map(builder.shaped, pieces, shapes))
        outputs = builder.inline(params["jaxpr"], [*consts, *carried[:count], *pieces])
        stored = [
            builder("TensorListSetItem", handle, position, each)
            for handle, each in zip(carried[count:], outputs[count:])
        ]
        turn.results = [builder("AddV2", index, 1), last, *outputs[:count], *stored]
    found = _loop(builder, begun, structs, going, turn)[2:]
    for at, each in enumerate(stacks, count):
        sizes = builder.sizes.shape(each.shape[1:])
        found[at] = builder("TensorListStack", found[at], sizes, element_dtype=each.dtype)
    return found


def _known(shape: Sequence[Any]) -> list[int]:
    """The sizes that are numbers, which the TFLite converter reads; -1 for others."""
    return [size if is_number(size) else -1 for size in shape]


def _numbers(structs: Sequence[Any]) -> list[Any]:
    return [dtype_number(each.dtype) for each in structs]
