"""Shapes, slices, lookups, constants, and reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pax_export.export.formats.torch.values import TorchValue, carrier, is_number, rule, same_size
from pax_export.export.portable import NotInTargetError
from pax_export.export.portable.arithmetic import broadcast_array
from pax_export.export.portable.decompositions.convolutions import is_plain_pad
from pax_export.export.portable.decompositions.reductions import of_truth_values

if TYPE_CHECKING:
    from pax_export._foundations.types import Aval, DTypeLike, Equation, Size
    from pax_export.export.formats.torch.graph import TorchGraph
    from pax_export.export.formats.torch.values import Node


@rule("reshape")
def write_reshape(
    builder: TorchGraph, x: TorchValue, *, dimensions: Sequence[int] | None, **_: object
) -> Any:
    node = builder.node_of(x) if dimensions is None else builder.transpose_axes(x, dimensions)
    return builder.reshape_to(node, builder.results[0].shape)


rule("squeeze", "expand_dims")(
    lambda builder, x, **_: builder.reshape_to(x, builder.results[0].shape)
)
rule("transpose")(lambda builder, x, *, permutation: builder.transpose_axes(x, permutation))
rule("tile")(
    lambda builder, x, *, reps: builder("tile", builder.node_of(x), builder.sizes.shape(reps))
)
rule("rev")(
    lambda builder, x, *, dimensions: builder(
        "flip", builder.node_of(x), list(map(int, dimensions))
    )
)
rule("concatenate")(
    lambda builder, *xs, dimension: (
        xs[0] if len(xs) == 1 else builder("cat", list(map(builder.node_of, xs)), dimension)
    )
)


def _scalar(builder: TorchGraph, size: Size, dtype: DTypeLike) -> Any:
    return builder("full", [], builder.sizes.of(size), **builder.kind_of(dtype))


rule("dim_as_value")(lambda builder, *, dim: _scalar(builder, dim, builder.results[0].dtype))
rule("sizes")(
    lambda builder, *, of: builder("stack", [_scalar(builder, size, np.int32) for size in of])
)

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
def write_split(builder: TorchGraph, x: TorchValue, *, sizes: Sequence[Size], axis: int) -> Any:
    if len(sizes) == 1:
        return x
    found = builder("split", builder.node_of(x), builder.sizes.shape(sizes), axis)
    return builder.take_items(found, len(sizes))


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
    builder: TorchGraph, x: TorchValue, *, start_indices: Sequence[Size],
    limit_indices: Sequence[Size], strides: Sequence[Size] | None,
) -> Any:  # fmt: skip
    node, steps = builder.node_of(x), strides or [1] * x.rank
    for axis, size in enumerate(x.shape):
        ends = start_indices[axis], limit_indices[axis]
        if same_size(ends[0], 0) and same_size(ends[1], size) and same_size(steps[axis], 1):
            continue
        sizes = builder.sizes.shape([*ends, steps[axis]])
        node = builder("ops.aten.slice.Tensor", node, axis, *sizes)
    return node if node is not builder.node_of(x) else x


@rule("pad", when=is_plain_pad)
def write_pad(
    builder: TorchGraph, x: TorchValue, value: TorchValue, *,
    padding_config: Sequence[tuple[Size, Size, int]],
) -> Any:  # fmt: skip
    ends = [(low, high) for low, high, _ in padding_config]
    if all(same_size(each, 0) for pair in ends for each in pair):
        return x
    if x.dtype == np.bool_:
        node = filled_around(builder, builder.cast_to(x, "uint8"), ends, int(bool(value.known)))
        return builder.cast_to(node, "bool")
    filling = value.number if value.known is not None else value
    return filled_around(builder, builder.node_of(x), ends, filling)


def filled_around(
    builder: TorchGraph, node: Node, ends: Sequence[tuple[Size, Size]], value: TorchValue | float
) -> Any:
    """An array with a number, or a `TorchValue`, around it.

    torch would ask whether symbolic ends are 0 and fix the answer: there, elements are looked up.
    """
    static = [pair if all(map(is_number, pair)) else (0, 0) for pair in ends]
    around = [int(end) for pair in reversed(static) for end in pair]
    if any(around) and not isinstance(value, TorchValue):
        node = builder("nn.functional.pad", node, around, "constant", value)
    for axis, pair in enumerate(ends):
        if static[axis] is pair and not isinstance(value, TorchValue):
            continue
        if all(is_number(end) and end == 0 for end in pair):
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


# --- windows and lookups ----------------------------------------------------


def _places(builder: TorchGraph, start: TorchValue, size: Size) -> Any:
    """The places of a window, as an array."""
    line = builder.arange_of(size, np.int64)
    return builder("add", line, builder.cast_to(builder.node_of(start), "int64"))


@rule("window")
def write_window(
    builder: TorchGraph, x: TorchValue, *starts: TorchValue, sizes: Sequence[Size]
) -> Any:
    node = builder.node_of(x)
    for axis, (start, size) in enumerate(zip(starts, sizes)):
        if same_size(x.shape[axis], size):
            continue
        if start.known is not None:
            node = builder("narrow", node, axis, int(start.known), builder.sizes.of(size))
        else:
            node = builder("index_select", node, axis, _places(builder, start, size))
    return node


@rule("put_window")
def put_window(builder: TorchGraph, x: TorchValue, update: TorchValue, *starts: TorchValue) -> Any:
    axes = [axis for axis in range(x.rank) if not same_size(x.shape[axis], update.shape[axis])]
    return _put(builder, builder.node_of(x), update, starts, axes)


def _put(
    builder: TorchGraph, x: Node, update: TorchValue, starts: Sequence[TorchValue],
    axes: Sequence[int],
) -> Any:  # fmt: skip
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
    builder: TorchGraph, x: TorchValue, places: TorchValue, rows: TorchValue, *inside: TorchValue,
    how: str,
) -> Any:  # fmt: skip
    if x.dtype == np.uint64 and how in ("max", "min"):
        raise NotInTargetError(f"of {x.dtype.name}")
    node, index = builder.node_of(x), builder.cast_to(builder.node_of(places), "int64")
    updates = builder.node_of(rows)
    if inside:  # rows that are not inside go to one more at the end
        (drops,) = inside
        count = builder.sizes.of(x.shape[0])
        index = builder("where", builder.node_of(drops), index, count)
        is_bool, ends = x.dtype == np.bool_, [0, 0] * (x.rank - 1) + [0, 1]
        more = builder(
            "nn.functional.pad", builder.cast_to(node, "uint8") if is_bool else node, ends
        )
        node = builder.cast_to(more, "bool") if is_bool else more
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


# --- reductions -------------------------------------------------------------


def _reduction(function: str, in_own_dtype: bool = False) -> Callable:
    def write_call(builder: TorchGraph, x: TorchValue, *, axes: Sequence[int], **_: object) -> Any:
        if not len(axes):
            return x
        kind = {"dtype": builder.dtype_of(x.carrier)} if in_own_dtype else {}
        return builder(function, builder.node_of(x), list(map(int, axes)), False, **kind)

    return write_call


@rule("reduce_prod")
def reduce_prod(builder: TorchGraph, x: TorchValue, *, axes: Sequence[int], **_: object) -> Any:
    node = builder.node_of(x)
    for axis in sorted(axes, reverse=True):
        node = builder("prod", node, int(axis), dtype=builder.dtype_of(x.carrier))
    return node


def _is_ordered(equation: Equation) -> bool:
    return equation.invars[0].aval.dtype not in (np.dtype(np.uint64), np.dtype(np.bool_))


rule("reduce_sum")(_reduction("sum", in_own_dtype=True))
rule("reduce_max", when=_is_ordered)(_reduction("amax"))
rule("reduce_min", when=_is_ordered)(_reduction("amin"))
rule("reduce_or", when=of_truth_values)(_reduction("any"))
rule("reduce_and", when=of_truth_values)(_reduction("all"))


@rule("extreme")
def write_extreme(builder: TorchGraph, x: TorchValue, *, axes: Sequence[int], largest: bool) -> Any:
    if not len(axes):
        return x
    return builder("amax" if largest else "amin", builder.node_of(x), list(map(int, axes)))


def _cumulative(function: str, index: int | None = None) -> Callable:
    def write_call(builder: TorchGraph, x: TorchValue, *, axis: int, reverse: bool) -> Any:
        node = builder.node_of(x)
        node = builder("flip", node, [axis]) if reverse else node
        kwargs = {"dtype": builder.dtype_of(x.carrier)} if function in ("cumsum", "cumprod") else {}
        node = builder(function, node, axis, **kwargs)
        node = node if index is None else builder.take_item(node, index)
        return builder("flip", node, [axis]) if reverse else node

    return write_call


rule("cumsum")(_cumulative("cumsum"))
rule("cumprod")(_cumulative("cumprod"))
rule("cumlogsumexp")(_cumulative("logcumsumexp"))
rule("cummax", when=_is_ordered)(_cumulative("cummax", 0))
rule("cummin", when=_is_ordered)(_cumulative("cummin", 0))


def _arg(function: str) -> Callable:
    return lambda builder, x, *, axes, index_dtype, **_: builder.cast_to(
        builder(function, builder.node_of(x), int(axes[0])), carrier(index_dtype)
    )


rule("argmax")(_arg("argmax"))
rule("argmin")(_arg("argmin"))


@rule("rank")
def write_rank(builder: TorchGraph, x: TorchValue, *, axis: int, count: Size, largest: bool) -> Any:
    """The indices of the first elements in an order; stable, with NaN largest."""
    options = {"dim": axis, "descending": largest, "stable": True}
    order = builder.take_item(builder("sort", builder.node_of(x), **options), 1)
    order = builder("narrow", order, axis, 0, builder.sizes.of(count))
    return builder.cast_to(order, "int32")


@rule("sort")
def write_sort(
    builder: TorchGraph, x: TorchValue, *more: TorchValue, dimension: int, num_keys: int,
    **_: object,
) -> Any:  # fmt: skip
    """One key of floats or integers; torch's own, which has a derivative."""
    if num_keys != 1 or x.dtype in (np.uint64, np.bool_):
        return None
    found = builder("sort", builder.node_of(x), dim=dimension, stable=True)
    if not more:
        return builder.take_item(found, 0)
    order = builder.take_item(found, 1)
    rest = [builder("gather", builder.node_of(each), dimension, order) for each in more]
    return [builder.take_item(found, 0), *rest]
