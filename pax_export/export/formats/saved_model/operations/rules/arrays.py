"""Shapes, slices, elements at positions, and reductions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pax_export._foundations.types import DTypeLike, Equation, Size
from pax_export.export.formats.saved_model.operations.graph import NodeBuilder, Output, rule
from pax_export.export.portable.arithmetic import broadcast_array
from pax_export.export.portable.decompositions.convolutions import is_plain_pad
from pax_export.export.portable.decompositions.reductions import of_truth_values
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
    lambda builder, x, *, dimensions: builder("ReverseV2", x, list(dimensions)) if dimensions else x
)
rule("concatenate")(
    lambda builder, *xs, dimension: (
        xs[0] if len(xs) == 1 else builder("ConcatV2", xs, int(dimension))
    )
)


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
        row = builder.shaped(builder.cast(numbers, result.dtype), [shape[dimension]])
    return row if len(shape) == 1 else broadcast(builder, row, shape, [dimension])


rule("dim_as_value")(
    lambda builder, *, dim: builder.cast(
        builder.tensor(builder.sizes.of(dim)), builder.results[0].dtype
    )
)
rule("sizes")(lambda builder, *, of: builder.tensor(builder.sizes.shape(of)))


@rule("slice")
def slice_(
    builder: NodeBuilder,
    x: Output,
    *,
    start_indices: Sequence[Size],
    limit_indices: Sequence[Size],
    strides: Sequence[Size] | None,
) -> Output:
    steps = strides or [1] * x.rank
    begins = [same_size(each, 0) for each in start_indices]
    ends = [same_size(*pair) for pair in zip(limit_indices, x.shape)]
    if all(begins) and all(ends) and all(same_size(each, 1) for each in steps):
        return x
    # Ends that are those of the array are left out, so that they need not be computed.
    masks, cuts = {}, []
    for name, sizes, skips in (("begin", start_indices, begins), ("end", limit_indices, ends)):
        masks[f"{name}_mask"] = sum(skip << axis for axis, skip in enumerate(skips))
        cuts.append(builder.sizes.shape([0 if s else e for e, s in zip(sizes, skips)]))
    return builder("StridedSlice", x, *cuts, builder.sizes.shape(steps), **masks)


@rule("pad", when=is_plain_pad)
def pad(
    builder: NodeBuilder, x: Output, value: Output, *,
    padding_config: Sequence[tuple[Size, Size, int]],
) -> Output:  # fmt: skip
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


# --- elements at positions: normal forms of gathers, scatters, slices -------


rule("take")(
    lambda builder, x, places, *, axis: builder("GatherV2", x, places, np.array(axis, np.int32))
)


@rule("take_along")
def take_along(builder: NodeBuilder, x: Output, places: Output, *, axis: int) -> Output:
    """By a batched gather, with the axis last."""
    order = _axis_last(x, axis)
    operands = [builder.transpose(each, order) for each in (x, places)]
    last = np.array(x.rank - 1, np.int32)
    gathered = builder("GatherV2", *operands, last, batch_dims=x.rank - 1)
    return builder.turned_back(builder.shaped(gathered, operands[1].shape), order)


def _axis_last(x: Output, axis: int) -> list[int]:
    return [*(each for each in range(x.rank) if each != axis % x.rank), axis % x.rank]


_SCATTERS = {"set": "Update", "add": "Add", "max": "Max", "min": "Min"}


@rule("put")
def put(
    builder: NodeBuilder, x: Output, places: Output, rows: Output, *inside: Output, how: str
) -> Output:
    if how == "mul":  # an operator of products leaves out negative places
        places = builder("SelectV2", inside[0], places, -1) if inside else places
        count = builder.sizes.of(x.shape[0])
        return builder("Mul", x, builder("UnsortedSegmentProd", rows, places, count))
    if how in ("max", "min") and x.is_float:  # of NaN, operators have no order
        flags = [builder.cast(builder("IsNan", each), x.dtype) for each in (x, rows)]
        bad = _put(builder, builder.shaped(flags[0], x.shape), places, flags[1], inside, "max")
        bad = builder("Greater", bad, builder.like(0, x))
        updated = _put(builder, x, places, rows, inside, how)
        return builder("SelectV2", bad, builder.like(np.nan, x), updated)
    return _put(builder, x, places, rows, inside, how)


def _put(
    builder: NodeBuilder, x: Output, places: Output, rows: Output, inside: Sequence, how: str
) -> Output:
    shape = x.shape
    cuts = inside and (inside[0].known is None or not inside[0].known.all())
    if cuts:  # rows outside go to one more row, which is cut off
        places = builder("SelectV2", inside[0], places, builder.sizes.of(shape[0]))
        x = builder("PadV2", x, [[0, 1], [0, 0]], builder.like(0, x))
    column = builder("ExpandDims", places, 1)
    updated = builder(f"TensorScatter{_SCATTERS[how]}", x, column, rows)
    if not cuts:
        return updated
    return builder("StridedSlice", updated, [0, 0], builder.sizes.shape(shape), [1, 1])


@rule("window")
def window(builder: NodeBuilder, x: Output, *starts: Output, sizes: Sequence[Any]) -> Output:
    if not starts:
        return x
    known = [int(each.known) for each in starts if each.known is not None]
    if len(known) < len(starts):
        known = builder("Pack", [builder.cast(each, np.int32) for each in starts])
    return builder("Slice", x, known, builder.sizes.shape(sizes))


@rule("put_window")
def put_window(builder: NodeBuilder, x: Output, update: Output, *starts: Output) -> Output:
    """Replaces the elements at their positions, along the axes up to the last that is cut."""
    cut = [axis for axis in range(x.rank) if not same_size(x.shape[axis], update.shape[axis])]
    if not cut:
        return update
    sizes = update.shape[: cut[-1] + 1]
    places = []
    for axis, size in enumerate(sizes):
        row = builder.shaped(builder.tensor(builder.sizes.arange(size)), [size])
        if axis in cut:
            moved = builder("AddV2", row, builder.cast(starts[axis], np.int32))
            row = builder.shaped(moved, [size])
        row = builder.reshape(row, [size if each == axis else 1 for each in range(len(sizes))])
        places.append(builder.broadcast(row, sizes))
    return builder("TensorScatterUpdate", x, builder("Pack", places, axis=len(sizes)), update)


@rule("rank")
def rank(builder: NodeBuilder, x: Output, *, axis: int, count: Size, largest: bool) -> Output:
    """By keys in the order of the numbers, because `TopKV2` has no order for NaN."""
    order = _axis_last(x, axis)
    key = _ordered(builder, builder.transpose(x, order))
    if not largest:
        end = {"u": np.iinfo(key.dtype).max, "i": -1} if key.dtype.kind in "ui" else {}
        key = builder("Sub", builder.like(end.get(key.dtype.kind, 0), key), key)
    _, places = builder("TopKV2", key, builder.sizes.of(count))
    sizes = [*(x.shape[each] for each in order[:-1]), count]
    return builder.turned_back(builder.shaped(places, sizes), order)


def _ordered(builder: NodeBuilder, x: Output) -> Output:
    """Numbers in the order of sorting: zeros are equal, and NaN is the largest number."""
    if not x.is_float:
        return x
    nan = builder("IsNan", x)
    if x.dtype != np.float64:  # of more bits, in which there are numbers beyond infinity
        wide = builder("Minimum", builder.cast(x, np.float64), np.asarray(1e300, np.float64))
        return builder("SelectV2", nan, np.asarray(np.inf, np.float64), wide)
    zero, most = np.zeros((), np.float64), np.array(np.iinfo(np.int64).max)
    unsigned = builder("SelectV2", builder("Equal", x, zero), zero, x)
    bits = builder("Bitcast", unsigned, type=np.dtype(np.int64))
    negative = builder("Less", bits, np.array(0, np.int64))
    found = builder("SelectV2", negative, builder("BitwiseXor", bits, most), bits)
    return builder("SelectV2", nan, most, found)


# --- reductions -------------------------------------------------------------


def _reduction(operator: str) -> Callable:
    def reduce(
        builder: NodeBuilder, x: Output, *, axes: Sequence[int], keepdims: bool = False, **_: object
    ) -> Output:
        if not len(axes):
            return x
        # As jax on CPUs: TensorFlow's sum of many small numbers stops at a power of two.
        write = builder.in_float32 if operator in ("Sum", "Prod") else builder
        return write(operator, x, list(map(int, axes)), **({"keep_dims": True} if keepdims else {}))

    return reduce


def _has_order(equation: Equation) -> bool:
    return equation.invars[0].aval.dtype != np.bool_


for _name, _operator, _when in (
    ("reduce_sum", "Sum", None), ("reduce_prod", "Prod", None), ("mean", "Mean", None),
    ("reduce_or", "Any", of_truth_values), ("reduce_and", "All", of_truth_values),
    ("reduce_max", "Max", _has_order), ("reduce_min", "Min", _has_order),
):  # fmt: skip
    rule(_name, when=_when)(_reduction(_operator))
rule("extreme")(
    lambda builder, x, *, axes, largest: _reduction("Max" if largest else "Min")(
        builder, x, axes=axes
    )
)


def _running(operator: str) -> Callable:
    return lambda builder, x, *, axis, reverse: builder.in_float32(
        operator, x, axis, reverse=bool(reverse)
    )


rule("cumsum")(_running("Cumsum"))
rule("cumprod")(_running("Cumprod"))


def _position(operator: str) -> Callable:
    def find(
        builder: NodeBuilder, x: Output, *, axes: Sequence[int], index_dtype: DTypeLike
    ) -> Output:
        """The first of equal elements, or the first NaN, which TensorFlow skips."""
        axis = np.array(axes[0], np.int32)
        kind = np.dtype(np.int64 if np.dtype(index_dtype).itemsize > 4 else np.int32)
        index = builder(operator, x, axis, output_type=kind)
        if x.is_float:
            nan = builder("IsNan", x)
            first = builder("ArgMax", builder.cast(nan, np.float32), axis, output_type=kind)
            index = builder("SelectV2", builder("Any", nan, axis), first, index)
        return builder.cast(index, index_dtype)

    return find


rule("argmax")(_position("ArgMax"))
rule("argmin")(_position("ArgMin"))
