"""Reshapes, broadcasts, iota and constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pax_export.export.formats.onnx.graph import GraphBuilder, rule
from pax_export.export.formats.onnx.values import Value, carrier, is_number, same_size
from pax_export.export.portable.arithmetic import broadcast_array


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
        made = broadcast_array(x.known, shape=shape, broadcast_dimensions=places)
        made = np.ascontiguousarray(made)
        return Value(builder.constant(made), dtype, shape, made)
    added = [axis for axis in range(len(shape)) if axis not in places]
    source = x.thin if x.thin is not None else x.name
    bare = x.bare or (x.rank == 0 and x.thin is None)
    thin = source if bare else builder.unsqueeze(source, added)
    wide = any(not same_size(shape[axis], 1) for axis in added)
    grows = (
        wide
        or bool(bare and shape)
        or any(not same_size(x.shape[axis], shape[place]) for axis, place in enumerate(places))
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
        made = numbers.astype(result.dtype).astype(line)
        row = Value(builder.constant(made), np.dtype(result.dtype), (size,), made)
    else:
        name = builder.fit(builder.sizes.cast(numbers, builder.cast_to(line)), result.dtype)
        row = Value(name, np.dtype(result.dtype), (size,))
    return row if len(shape) == 1 else broadcast(builder, row, result, [dimension])
