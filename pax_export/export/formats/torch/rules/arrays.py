"""Shapes, slices, lookups and constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pax_export.export.formats.torch.values import TorchValue, carrier, is_number, rule, same_size
from pax_export.export.portable import NotInTargetError
from pax_export.export.portable.arithmetic import broadcast_array
from pax_export.export.portable.decompositions.convolutions import is_plain_pad

if TYPE_CHECKING:
    from pax_export._foundations.types import Aval, DTypeLike, Size
    from pax_export.export.formats.torch.graph import TorchGraph
    from pax_export.export.formats.torch.values import Node


@rule("reshape")
def write_reshape(
    builder: TorchGraph, x: TorchValue, *, dimensions: Sequence[int] | None, **_: object
) -> Any:
    node = builder.node_of(x) if dimensions is None else builder.transpose_axes(x, dimensions)
    return builder.reshape_to(node, builder.results[0].shape)


rule("squeeze")(lambda builder, x, *, dimensions: builder.reshape_to(x, builder.results[0].shape))
rule("expand_dims")(lambda builder, x, **_: builder.reshape_to(x, builder.results[0].shape))
rule("transpose")(lambda builder, x, *, permutation: builder.transpose_axes(x, permutation))
rule("tile")(
    lambda builder, x, *, reps: builder("tile", builder.node_of(x), builder.sizes.shape(reps))
)


@rule("concatenate")
def write_concatenate(builder: TorchGraph, *xs: TorchValue, dimension: int) -> Any:
    return xs[0] if len(xs) == 1 else builder("cat", [builder.node_of(x) for x in xs], dimension)


@rule("dim_as_value")
def dim_as_value(builder: TorchGraph, *, dim: Size) -> Any:
    return _scalar(builder, dim, builder.results[0].dtype)


def _scalar(builder: TorchGraph, size: Size, dtype: DTypeLike) -> Any:
    return builder("full", [], builder.sizes.of(size), **builder.kind_of(dtype))


@rule("sizes")
def write_sizes(builder: TorchGraph, *, of: Sequence[Any]) -> Any:
    return builder("stack", [_scalar(builder, size, np.int32) for size in of])


#: Constants of more elements than this are broadcast when the model runs.
_SMALL = 64


@rule("broadcast_in_dim")
def broadcast_in_dim(
    builder: TorchGraph, x: TorchValue, *, broadcast_dimensions: Sequence[int], **_: object
) -> TorchValue:
    return broadcast_to(builder, x, builder.results[0], broadcast_dimensions)


def broadcast_to(
    builder: TorchGraph, x: TorchValue, result: Aval, dims: Sequence[int]
) -> TorchValue:
    """Broadcasts an array to a larger shape, in which its axes are `dims`."""
    shape, dtype = tuple(result.shape), np.dtype(result.dtype)
    if x.known is not None and all(map(is_number, shape)) and x.rank and np.prod(shape) <= _SMALL:
        array = np.array(broadcast_array(x.known, shape=shape, broadcast_dimensions=dims))
        return TorchValue(None, dtype, shape, array)
    added = [axis for axis in range(len(shape)) if axis not in dims]
    if x.known is not None and not x.rank:
        if not shape:
            return x
        full = builder("full", builder.sizes.shape(shape), x.number, **builder.kind_of(dtype))
        return TorchValue(full, dtype, shape, None, x.number, True)
    source = x.thin if x.thin is not None else builder.node_of(x)
    bare = x.bare or (x.rank == 0 and x.thin is None)
    thin = source if bare else builder.add_axes(source, added)
    grows = (
        any(not same_size(shape[axis], 1) for axis in added)
        or bool(bare and shape)
        or any(not same_size(x.shape[axis], shape[dim]) for axis, dim in enumerate(dims))
    )
    if not grows and x.thin is None:
        return TorchValue(thin, dtype, shape)
    if isinstance(thin, (bool, int, float)):
        full = builder("full", builder.sizes.shape(shape), thin, **builder.kind_of(dtype))
        return TorchValue(full, dtype, shape, None, thin, True)
    return TorchValue(builder.expand_to(thin, shape), dtype, shape, None, thin, bare)


@rule("split")
def write_split(
    builder: TorchGraph, x: TorchValue, *, sizes: Sequence[Any], axis: int
) -> list[Any]:
    if len(sizes) == 1:
        return [x]
    found = builder("split", builder.node_of(x), builder.sizes.shape(sizes), axis)
    return [builder.take_item(found, index) for index in range(len(sizes))]


@rule("iota")
def write_iota(builder: TorchGraph, *, dimension: int, **_: object) -> TorchValue:
    (result,) = builder.results
    size, dtype = result.shape[dimension], np.dtype(result.dtype)
    if is_number(size) and size <= _SMALL:
        numbers = np.arange(size).astype(dtype).astype(carrier(dtype))
        row = TorchValue(None, dtype, (size,), numbers)
    else:
        row = TorchValue(builder.fit_to(builder.arange_of(size, dtype), dtype), dtype, (size,))
    return row if len(result.shape) == 1 else broadcast_to(builder, row, result, [dimension])


@rule("slice")
def write_slice(
    builder: TorchGraph,
    x: TorchValue,
    *,
    start_indices: Sequence[Any],
    limit_indices: Sequence[Any],
    strides: Sequence[Any] | None,
) -> Any:
    node, steps = builder.node_of(x), strides or [1] * x.rank
    for axis, size in enumerate(x.shape):
        ends = start_indices[axis], limit_indices[axis]
        if same_size(ends[0], 0) and same_size(ends[1], size) and same_size(steps[axis], 1):
            continue
        sizes = builder.sizes.shape([*ends, steps[axis]])
        node = builder("ops.aten.slice.Tensor", node, axis, *sizes)
    return node if node is not builder.node_of(x) else x


rule("rev")(
    lambda builder, x, *, dimensions: builder(
        "flip", builder.node_of(x), [int(d) for d in dimensions]
    )
)


@rule("pad", when=is_plain_pad)
def write_pad(
    builder: TorchGraph,
    x: TorchValue,
    value: TorchValue,
    *,
    padding_config: Sequence[tuple[Any, Any, int]],
) -> Any:
    ends = [(low, high) for low, high, _ in padding_config]
    if all(same_size(each, 0) for pair in ends for each in pair):
        return x
    if x.dtype == np.bool_:
        node = filled_around(builder, builder.cast_to(x, "uint8"), ends, int(bool(value.known)))
        return builder.cast_to(node, "bool")
    return filled_around(
        builder, builder.node_of(x), ends, value.number if value.known is not None else value
    )


def filled_around(
    builder: TorchGraph, node: Node, ends: Sequence[tuple[Any, Any]], value: TorchValue | float
) -> Any:
    """An array with a number, or a `TorchValue`, around it.

    torch would ask whether symbolic ends are 0 and fix the answer: there, elements are looked up.
    """
    static = [pair if all(map(is_number, pair)) else (0, 0) for pair in ends]
    around = [int(end) for pair in reversed(static) for end in pair]
    if any(around) and not isinstance(value, TorchValue):
        node = builder("nn.functional.pad", node, around, "constant", value)
    for axis, pair in enumerate(ends):
        if (static[axis] is pair and not isinstance(value, TorchValue)) or _are_zero(pair):
            continue
        size = builder("ops.aten.sym_size.int", node, axis)
        low, high = builder.sizes.shape(pair)
        length = builder.add_sizes("add", builder.add_sizes("add", size, low), high)
        places = builder("sub", builder("arange", length, **builder.kind_of("int64")), low)
        last = builder.add_sizes("sub", size, 1)
        found = builder("index_select", node, axis, builder("clamp", places, 0, last))
        inside = builder("logical_and", builder("ge", places, 0), builder("le", places, last))
        inside = builder.reshape_to(inside, [-1] + [1] * (len(ends) - 1 - axis))
        filling = builder.node_of(value) if isinstance(value, TorchValue) else value
        node = builder("where", inside, found, filling)
    return node


def _are_zero(pair: tuple[Any, Any]) -> bool:
    return all(is_number(end) and end == 0 for end in pair)


# --- windows and lookups ----------------------------------------------------


def _known_number(value: TorchValue) -> int | None:
    return None if value.known is None else int(value.known)


def _places(builder: TorchGraph, start: TorchValue, size: Size) -> Any:
    """The places of a window, as an array."""
    line = builder.arange_of(size, np.int64)
    return builder("add", line, builder.cast_to(builder.node_of(start), "int64"))


@rule("window")
def write_window(
    builder: TorchGraph, x: TorchValue, *starts: TorchValue, sizes: Sequence[Any]
) -> Any:
    node = builder.node_of(x)
    for axis, (start, size) in enumerate(zip(starts, sizes)):
        if same_size(x.shape[axis], size):
            continue
        begin = _known_number(start)
        if begin is not None:
            node = builder("narrow", node, axis, begin, builder.sizes.of(size))
        else:
            node = builder("index_select", node, axis, _places(builder, start, size))
    return node


@rule("put_window")
def put_window(builder: TorchGraph, x: TorchValue, update: TorchValue, *starts: TorchValue) -> Any:
    axes = [axis for axis in range(x.rank) if not same_size(x.shape[axis], update.shape[axis])]
    return _put(builder, builder.node_of(x), update, starts, axes)


def _put(
    builder: TorchGraph,
    x: Node,
    update: TorchValue,
    starts: Sequence[TorchValue],
    axes: Sequence[int],
) -> Any:
    if not axes:
        return builder.node_of(update)
    axis, *rest = axes
    places = _places(builder, starts[axis], update.shape[axis])
    inner = builder.node_of(update)
    if rest:
        inner = _put(builder, builder("index_select", x, axis, places), update, starts, rest)
    return builder("index_copy", x, axis, places, inner)


@rule("take")
def write_take(builder: TorchGraph, x: TorchValue, places: TorchValue, *, axis: int) -> Any:
    node = builder.node_of(x)
    if places.known is not None and not places.rank:
        return builder("select", node, axis, int(places.known))
    index = builder.node_of(places)
    if x.rank == 2 and axis == 0 and x.is_float and places.rank:
        return builder("nn.functional.embedding", index, node)
    flat = builder.add_method_call("reshape", index, [-1]) if places.rank != 1 else index
    found = builder("index_select", node, axis, flat)
    return found if places.rank == 1 else builder.reshape_to(found, builder.results[0].shape)


@rule("take_along")
def take_along(builder: TorchGraph, x: TorchValue, places: TorchValue, *, axis: int) -> Any:
    index = builder.cast_to(builder.node_of(places), "int64")
    return builder("gather", builder.node_of(x), axis, index)


_REDUCE = {"mul": "prod", "max": "amax", "min": "amin"}


@rule("put")
def write_put(
    builder: TorchGraph,
    x: TorchValue,
    places: TorchValue,
    rows: TorchValue,
    *inside: TorchValue,
    how: str,
) -> Any:
    if x.dtype == np.uint64 and how in ("max", "min"):
        raise NotInTargetError(f"of {x.dtype.name}")
    node, index = builder.node_of(x), builder.cast_to(builder.node_of(places), "int64")
    updates = builder.node_of(rows)
    if inside:  # rows that are not inside go to one more at the end
        (drops,) = inside
        count = builder.sizes.of(x.shape[0])
        index = builder("where", builder.node_of(drops), index, count)
        more = builder("nn.functional.pad", builder.cast_to(node, "uint8") if x.dtype == np.bool_
                       else node, [0, 0] * (x.rank - 1) + [0, 1])  # fmt: skip
        node = builder.cast_to(more, "bool") if x.dtype == np.bool_ else more
    if how == "set":
        updates = _last_rows(builder, places, index, updates, rows, node)
    result = _put_rows(builder, node, index, updates, how, rows)
    return builder("narrow", result, 0, 0, builder.sizes.of(x.shape[0])) if inside else result


def _last_rows(
    builder: TorchGraph, places: TorchValue, index: Node, updates: Node, rows: TorchValue, x: Node
) -> Any:
    """Rows in which those that go to one place are the last of them, which has the derivative."""
    known, count = places.known, rows.shape[0]
    if same_size(count, 1) or (known is not None and len(set(known.tolist())) == known.size):
        return updates
    numbers = builder.arange_of(count, np.int64)
    table = builder("full", [builder("ops.aten.sym_size.int", x, 0)], 0, **builder.kind_of("int64"))
    table = builder("scatter_reduce", table, 0, index, numbers, "amax", include_self=True)
    last = builder("index_select", table, 0, index)
    found = builder("index_select", builder("detach", updates), 0, last)
    is_last = builder.reshape_to(builder("eq", last, numbers), [count] + [1] * (rows.rank - 1))
    return builder("where", is_last, updates, found)


def _put_rows(
    builder: TorchGraph, x: Node, index: Node, rows: Node, how: str, like: TorchValue
) -> Any:
    if how == "set":
        return builder("index_put", x, [index], rows)
    if how == "add":
        return builder("index_add", x, 0, index, rows)
    wide = builder("unsqueeze", index, 1) if like.rank > 1 else index
    wide = builder.expand_to(wide, like.shape)
    return builder("scatter_reduce", x, 0, wide, rows, _REDUCE[how], include_self=True)


@rule("extreme")
def write_extreme(builder: TorchGraph, x: TorchValue, *, axes: Sequence[int], largest: bool) -> Any:
    if not len(axes):
        return x
    return builder("amax" if largest else "amin", builder.node_of(x), [int(each) for each in axes])
