"""Reshapes, broadcasts, slices, padding and numbers in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from pax_export._foundations.types import Size
from pax_export.export.formats.saved_model.operations.graph import NodeBuilder, Output, rule
from pax_export.export.portable.arithmetic import broadcast_array
from pax_export.export.portable.decompositions.convolutions import is_plain_pad
from pax_export.export.portable.sizes import is_number, same_shape, same_size

#: Constants of more elements than this are broadcast when the model runs.
_SMALL = 64


@rule("reshape")
def reshape(
    builder: NodeBuilder, x: Output, *, dimensions: Sequence[int] | None, **_: object
) -> Output:
    turned = x if dimensions is None else builder.transpose(x, dimensions)
    return builder.reshape(turned, builder.results[0].shape)


@rule("squeeze")
def squeeze(builder: NodeBuilder, x: Output, *, dimensions: Sequence[int]) -> Output:
    shape = builder.results[0].shape
    if sum(not is_number(size) for size in shape) < 2:
        return builder.reshape(x, shape)
    return builder("Squeeze", x, squeeze_dims=list(dimensions)) if len(dimensions) else x


rule("transpose")(lambda builder, x, *, permutation: builder.transpose(x, permutation))
rule("tile")(lambda builder, x, *, reps: builder("Tile", x, builder.sizes.shape(reps)))
rule("rev")(
    lambda builder, x, *, dimensions: (
        builder("ReverseV2", x, list(dimensions)) if len(dimensions) else x
    )
)


@rule("concatenate")
def concatenate(builder: NodeBuilder, *xs: Output, dimension: int) -> Output:
    return xs[0] if len(xs) == 1 else builder("ConcatV2", xs, int(dimension))


@rule("broadcast_in_dim")
def broadcast_in_dim(
    builder: NodeBuilder, x: Output, *_: Any, broadcast_dimensions: Sequence[int], **__: object
) -> Output:
    """Puts the axes of an array at these places of a larger shape."""
    return broadcast(builder, x, tuple(builder.results[0].shape), broadcast_dimensions)


def broadcast(
    builder: NodeBuilder, x: Output, shape: tuple[Any, ...], places: Sequence[int]
) -> Output:
    if x.known is not None and all(map(is_number, shape)) and np.prod(shape) <= _SMALL:
        array = broadcast_array(x.known, shape=shape, broadcast_dimensions=places)
        return builder.literal(np.ascontiguousarray(array))
    source = x if x.thin is None else x.thin
    if source.rank == x.rank and source.rank:
        sizes = dict(zip(places, source.shape))
        source = builder.reshape(source, [sizes.get(axis, 1) for axis in range(len(shape))])
    elif source.rank:  # fewer axes broadcast from the last one only
        return broadcast(builder, dataclasses.replace(x, thin=None), shape, places)
    if same_shape(source.shape, shape):
        return source
    return dataclasses.replace(builder.broadcast(source, shape), thin=source)


@rule("split")
def split(builder: NodeBuilder, x: Output, *, sizes: Sequence[Any], axis: int) -> list[Output]:
    if len(sizes) == 1:
        return [x]
    lengths = builder.sizes.shape(sizes)
    return builder("SplitV", x, lengths, np.array(axis, np.int32), num_split=len(sizes))


@rule("iota")
def iota(builder: NodeBuilder, *_: Any, dimension: int, **__: object) -> Output:
    (result,) = builder.results
    shape = tuple(result.shape)
    numbers: Any = builder.sizes.arange(shape[dimension])
    if isinstance(numbers, np.ndarray):
        row = builder.literal(numbers.astype(result.dtype))
    else:
        row = builder.cast(numbers, result.dtype)
        row = dataclasses.replace(row, shape=(shape[dimension],))
    return row if len(shape) == 1 else broadcast(builder, row, shape, [dimension])


@rule("dim_as_value")
def dim_as_value(builder: NodeBuilder, *, dim: Size) -> Output:
    return builder.cast(builder.tensor(builder.sizes.of(dim)), builder.results[0].dtype)


@rule("sizes")
def sizes_(builder: NodeBuilder, *, of: Sequence[Any]) -> Output:
    return builder.tensor(builder.sizes.shape(of))


@rule("slice")
def slice_(
    builder: NodeBuilder,
    x: Output,
    *,
    start_indices: Sequence[Any],
    limit_indices: Sequence[Any],
    strides: Sequence[Any] | None,
) -> Output:
    steps = strides or [1] * x.rank
    begins = [same_size(each, 0) for each in start_indices]
    ends = [same_size(*pair) for pair in zip(limit_indices, x.shape)]
    if all(begins) and all(ends) and all(same_size(each, 1) for each in steps):
        return x
    # Ends that are those of the array are left out, so that they need not be computed.
    masks = [
        sum(1 << axis for axis, is_end in enumerate(each) if is_end) for each in (begins, ends)
    ]
    starts = [0 if skip else each for each, skip in zip(start_indices, begins)]
    stops = [0 if skip else each for each, skip in zip(limit_indices, ends)]
    cuts = map(builder.sizes.shape, (starts, stops, steps))
    return builder("StridedSlice", x, *cuts, begin_mask=masks[0], end_mask=masks[1])


@rule("pad", when=is_plain_pad)
def pad(
    builder: NodeBuilder,
    x: Output,
    value: Output,
    *,
    padding_config: Sequence[tuple[Any, Any, int]],
) -> Output:
    ends = [side for low, high, _ in padding_config for side in (low, high)]
    if all(same_size(each, 0) for each in ends):
        return x
    paddings = builder.sizes.shape(ends)
    if isinstance(paddings, np.ndarray):
        return builder("PadV2", x, paddings.reshape(-1, 2), value)
    # At some sizes, symbolic padding may be negative.
    more = builder("Reshape", builder("Maximum", paddings, 0), [-1, 2])
    wide = builder("PadV2", x, more, value)
    if all(str(each).isidentifier() for each in ends if not is_number(each)):
        return wide
    lows = builder.sizes.shape([low for low, _, _ in padding_config])
    begin = builder("Maximum", builder("Neg", lows), 0)
    return builder("Slice", wide, begin, builder.sizes.shape(builder.results[0].shape))
