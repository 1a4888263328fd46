"""Reshapes, slices, gather and scatter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pax_export.export.formats.onnx.graph import GraphBuilder, Operand, is_number, rule
from pax_export.export.formats.onnx.values import Value, carrier
from pax_export.export.portable.arithmetic import broadcast_array
from pax_export.export.portable.decompositions.convolutions import is_plain_pad
from pax_export.export.portable.sizes import same_size

_BEFORE_ALL = np.array([np.iinfo(np.int64).min + 1], np.int64)


@rule("slice")
def slice_(
    builder: GraphBuilder,
    x: Value,
    *,
    start_indices: Sequence[Any],
    limit_indices: Sequence[Any],
    strides: Sequence[Any] | None,
) -> Any:
    steps = strides or [1] * x.rank
    axes = [
        axis
        for axis, size in enumerate(x.shape)
        if not (
            same_size(start_indices[axis], 0)
            and same_size(limit_indices[axis], size)
            and same_size(steps[axis], 1)
        )
    ]
    if not axes:
        return x
    return builder(
        "Slice",
        x,
        builder.sizes.shape([start_indices[axis] for axis in axes]),
        builder.sizes.shape([limit_indices[axis] for axis in axes]),
        np.array(axes, np.int64),
        builder.sizes.shape([steps[axis] for axis in axes]),
    )


def backwards(builder: GraphBuilder, x: Operand, axes: Sequence[int]) -> Any:
    if not len(axes):
        return x
    count = len(axes)
    minus = np.full(count, -1, np.int64)
    ends = np.repeat(_BEFORE_ALL, count)
    return builder("Slice", x, minus, ends, np.array(axes, np.int64), minus)


rule("rev")(lambda builder, x, *, dimensions: backwards(builder, x, dimensions))


@rule("pad", when=is_plain_pad)
def pad(
    builder: GraphBuilder, x: Value, value: Value, *, padding_config: Sequence[tuple[Any, Any, int]]
) -> Any:
    ends = [each[side] for side in (0, 1) for each in padding_config]
    if all(same_size(each, 0) for each in ends):
        return x
    return builder("Pad", x, builder.sizes.shape(ends), value)


@rule("window")
def window(builder: GraphBuilder, x: Value, *starts: Value, sizes: Sequence[Any]) -> Any:
    axes = [axis for axis in range(x.rank) if not same_size(x.shape[axis], sizes[axis])]
    if not axes:
        return x
    begin = _starts_array(builder, [starts[axis] for axis in axes])
    end = _add(builder, begin, builder.sizes.shape([sizes[axis] for axis in axes]))
    result = builder("Slice", x, begin, end, np.array(axes, np.int64))
    return builder.declare(result, x, sizes)


@rule("put_window")
def put_window(builder: GraphBuilder, x: Value, update: Value, *starts: Value) -> str:
    axes = [axis for axis in range(x.rank) if not same_size(x.shape[axis], update.shape[axis])]
    places = {axis: _starts_array(builder, [starts[axis]]) for axis in axes}
    result = _replace_window(builder, x.name, update, axes, places)
    return builder.declare(result, x, x.shape) if axes else result


def _starts_array(builder: GraphBuilder, starts: Sequence[Value]) -> Any:
    if all(each.known is not None for each in starts):
        return np.array([int(each.known) for each in starts if each.known is not None], np.int64)
    numbers = [builder.unsqueeze(builder.cast(each, np.int64), [0]) for each in starts]
    return numbers[0] if len(numbers) == 1 else builder("Concat", *numbers, axis=0)


def _add(builder: GraphBuilder, one: Operand, other: Operand) -> Any:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one + other
    return builder("Add", one, other)


def _replace_window(
    builder: GraphBuilder, name: str, update: Value, axes: Sequence[int], places: dict[int, Any]
) -> str:
    """Concatenates the parts before, in place of, and after the update, axis by axis."""
    if not axes:
        return update.name
    axis, begin = axes[0], places[axes[0]]
    at = np.array([axis], np.int64)
    end = _add(builder, begin, builder.sizes.one(update.shape[axis]))
    within = builder("Slice", name, begin, end, at) if len(axes) > 1 else name
    within = _replace_window(builder, within, update, axes[1:], places)
    before = builder("Slice", name, np.zeros(1, np.int64), begin, at)
    after = builder("Slice", name, end, np.array([np.iinfo(np.int64).max], np.int64), at)
    return builder("Concat", before, within, after, axis=axis)


# --- Reshapes, broadcasts, iota and constants ----------------------------------------------------


@rule("reshape")
def reshape(builder: GraphBuilder, x: Value, *, dimensions: Any, **_: object) -> Any:
    name = x if dimensions is None else builder.transpose(x, dimensions)
    return builder.reshape(name, builder.results[0].shape)


rule("squeeze")(lambda builder, x, *, dimensions: builder.squeeze(x, dimensions))
rule("transpose")(lambda builder, x, *, permutation: builder.transpose(x, permutation))
rule("broadcast_in_dim")(
    lambda builder, x, broadcast_dimensions, **_: broadcast(
        builder, x, builder.results[0], broadcast_dimensions
    )
)
rule("tile")(lambda builder, x, *, reps: builder("Tile", x, builder.sizes.shape(reps)))
rule("concatenate")(lambda builder, *xs, dimension: builder("Concat", *xs, axis=dimension))
rule("dim_as_value")(
    lambda builder, *, dim: builder.sizes.scalar(
        dim, builder.cast_to(carrier(builder.results[0].dtype))
    )
)


#: Constants of more elements than this are broadcast when the model runs.
_SMALL = 64


def broadcast(builder: GraphBuilder, x: Value, result: Any, places: Sequence[int]) -> Value:
    """Puts the axes of an array at these places of a larger shape."""
    shape = tuple(result.shape)
    dtype = np.dtype(result.dtype)
    if x.known is not None and all(map(is_number, shape)) and np.prod(shape) <= _SMALL:
        array = broadcast_array(x.known, shape=shape, broadcast_dimensions=places)
        array = np.ascontiguousarray(array)
        return Value(builder.constant(array), dtype, shape, array)
    added = [axis for axis in range(len(shape)) if axis not in places]
    source = x.thin if x.thin is not None else x.name
    bare = x.bare or (x.rank == 0 and x.thin is None)
    thin = source if bare else builder.unsqueeze(source, added)
    wide = any(not same_size(shape[axis], 1) for axis in added)
    grows = (
        wide
        or bool(bare and shape)
        or any(not same_size(x.shape[axis], shape[target]) for axis, target in enumerate(places))
    )
    if not grows and x.thin is None:
        return Value(thin, dtype, shape)
    return Value(builder.expand(thin, shape), dtype, shape, None, thin, bare)


@rule("split")
def split(builder: GraphBuilder, x: Value, *, sizes: Sequence[Any], axis: int) -> list[Any]:
    if len(sizes) == 1:
        return [x]
    lengths = builder.sizes.shape(sizes)
    return builder("Split", x, lengths, results=len(sizes), axis=axis)


@rule("iota")
def iota(builder: GraphBuilder, dimension: int, **_: object) -> Value:
    (result,) = builder.results
    size, shape = result.shape[dimension], tuple(result.shape)
    numbers: Any = builder.arange(size)
    line = carrier(result.dtype)
    if isinstance(numbers, np.ndarray):
        values = numbers.astype(result.dtype).astype(line)
        row = Value(builder.constant(values), np.dtype(result.dtype), (size,), values)
    else:
        name = builder.fit(builder.sizes.cast(numbers, builder.cast_to(line)), result.dtype)
        row = Value(name, np.dtype(result.dtype), (size,))
    return row if len(shape) == 1 else broadcast(builder, row, result, [dimension])
