"""Scatter and dynamic updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pax_export.export.formats.onnx.graph import GraphBuilder
from pax_export.export.formats.onnx.registry import Refused, rule
from pax_export.export.formats.onnx.rules.gathering import Places
from pax_export.export.formats.onnx.values import Value, same_size

Results = Sequence[Any]


def _scatter(reduction: str) -> Callable:
    def apply(
        builder: GraphBuilder,
        results: Results,
        x: Value,
        indices: Value,
        updates: Value,
        *,
        dimension_numbers: object,
        mode: object,
        update_jaxpr: object = None,
        **_: object,
    ) -> Any:
        if reduction == "none" and update_jaxpr is not None:
            raise Refused("with a function of the old numbers")
        made = scattered(builder, x, indices, updates, dimension_numbers, mode, reduction)
        return builder.fit(made, x.dtype)

    return apply


rule("scatter")(_scatter("none"))
rule("scatter-add", "scatter_add")(_scatter("add"))
rule("scatter-mul", "scatter_mul")(_scatter("mul"))
rule("scatter-max", "scatter_max")(_scatter("max"))
rule("scatter-min", "scatter_min")(_scatter("min"))


@rule("scatter-sub", "scatter_sub")
def scatter_sub(
    builder: GraphBuilder,
    results: Results,
    x: Value,
    indices: Value,
    updates: Value,
    **parameters: object,
) -> Any:
    minus = Value(builder("Neg", updates), updates.dtype, updates.shape)
    return _scatter("add")(builder, results, x, indices, minus, **parameters)


def scattered(
    builder: GraphBuilder,
    x: Value,
    indices: Value,
    updates: Value,
    numbers: Any,
    mode: object,
    reduction: str,
) -> Any:
    """All axes that places are for come first; batches of places are places, too."""
    batching = list(numbers.operand_batching_dims)
    inserted = (*numbers.inserted_window_dims, *batching)
    window_axes = [axis for axis in range(x.rank) if axis not in inserted]
    width: list[Any] = [1] * x.rank
    for axis, at in zip(window_axes, numbers.update_window_dims, strict=True):
        width[axis] = updates.shape[at]
    placed = list(numbers.scatter_dims_to_operand_dims)
    # What covers part of an axis, and has no place, is at its beginning.
    partial = [
        axis
        for axis in window_axes
        if axis not in placed and not same_size(width[axis], x.shape[axis])
    ]
    axes = [*placed, *partial]
    whole = [axis for axis in window_axes if axis not in axes]
    places = Places(builder, x, _with_zeros(builder, indices, len(partial)), axes, width, mode)
    windows = [axis for axis in axes if axis in window_axes]
    index = places.numbered(windows)
    batch = list(range(indices.rank - 1))
    if batching:
        index = _with_batches(builder, index, indices, numbers, len(windows), len(axes))
    batch_at = [axis for axis in range(updates.rank) if axis not in numbers.update_window_dims]
    window_at = dict(zip(window_axes, numbers.update_window_dims))
    order = [*batch_at, *(window_at[axis] for axis in (*windows, *whole))]
    given = builder.transpose(updates, order)
    first = [*batching, *axes, *whole]
    if not first:
        return _alone(builder, x, updates, reduction)
    turned = builder.transpose(x, first)
    if not (batching or axes):
        turned = builder.unsqueeze(turned, [0])
        zeros = [*(indices.shape[axis] for axis in batch), 1]
        index = builder.expand(np.zeros(1, np.int64), zeros)
    if places.inside is not None:
        index, given = _those_inside(builder, index, given, places)
    made = _reduced(builder, turned, index, given, reduction, x)
    if not (batching or axes):
        made = builder.squeeze(made, [0])
    return builder.transpose(made, [int(axis) for axis in np.argsort(first)])


def _alone(builder: GraphBuilder, x: Value, updates: Value, reduction: str) -> Any:
    """One number, and one that takes its place or is added."""
    if updates.rank:
        raise Refused("of several numbers to one")
    operators = {"add": "Add", "mul": "Mul", "max": "Max", "min": "Min"}
    return updates.name if reduction == "none" else builder(operators[reduction], x, updates)


def _with_zeros(builder: GraphBuilder, indices: Value, count: int) -> Value:
    if not count:
        return indices
    shape = (*indices.shape[:-1], count)
    zeros = builder.expand(np.zeros((), indices.carrier), shape)
    name = builder("Concat", indices, zeros, axis=indices.rank - 1)
    return Value(name, indices.dtype, (*indices.shape[:-1], indices.shape[-1] + count))


def _with_batches(
    builder: GraphBuilder, index: int, indices: Value, numbers: Any, windows: int, count: int
) -> Any:
    """Puts the number of each batch before the places in it."""
    rank = indices.rank - 1 + windows + 1
    shape = builder("Shape", index)
    front = builder.slice(shape, 0, 0, rank - 1)
    full = builder("Concat", front, np.array([1], np.int64), axis=0)
    pieces = []
    for axis in numbers.scatter_indices_batching_dims:
        line: list[Any] = [1] * rank
        line[axis] = indices.shape[axis]
        row = builder.reshape(builder.arange(indices.shape[axis]), line)
        pieces.append(builder("Expand", row, full))
    return builder("Concat", *pieces, index, axis=rank - 1)


def _those_inside(
    builder: GraphBuilder, index: object, updates: Any, places: Places
) -> tuple[Any, Any]:
    """The updates that are inside, and their places: the others are not made."""
    inside: Any = places.inside
    if not places.batch_rank:
        inside, index, updates = (builder.unsqueeze(each, [0]) for each in (inside, index, updates))
    found = builder("Transpose", builder("NonZero", inside), perm=[1, 0])
    return builder("GatherND", index, found), builder("GatherND", updates, found)


def _reduced(
    builder: GraphBuilder, name: object, index: object, updates: Any, reduction: str, x: Value
) -> Any:
    if x.dtype != np.bool_ or reduction == "none":
        return builder("ScatterND", name, index, updates, reduction=reduction)
    numbers = [builder.cast(each, np.int32) for each in (name, updates)]
    kind = {"add": "max", "mul": "min"}.get(reduction, reduction)
    made = builder("ScatterND", numbers[0], index, numbers[1], reduction=kind)
    return builder.cast(made, np.bool_)
