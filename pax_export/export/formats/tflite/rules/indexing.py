"""Gather, scatter, and dynamic slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pax_export.export.formats.tflite.builder import moves
from pax_export.export.formats.tflite.builder import operators as lite
from pax_export.export.formats.tflite.builder.graph import Tensor
from pax_export.export.formats.tflite.rule import NotInTfliteError, Operation, rule
from pax_export.export.formats.tflite.rules.arithmetic import is_float, larger, smaller
from pax_export.export.formats.tflite.tensors import (
    TfliteSizes,
    broadcast,
    constant,
    full,
    is_static,
    joined,
    reshape,
    transpose,
    wrapped,
)


def _at_least_zero(start: Tensor, most: object) -> Any:
    return lite.maximum(lite.minimum(start, most), 0)


def _starts(op: Operation, given: Sequence[Any], sizes: Sequence[Any]) -> list[Any]:
    """Where slices of these sizes begin, moved into the array as jax moves them."""
    found = []
    for axis, (start, size) in enumerate(zip(given, sizes)):
        most = op.operands[0].shape[axis] - size
        if is_static(most) and most == 0:
            found.append(0)
        else:
            found.append(
                _at_least_zero(lite.cast(moves.reshape(start, []), lite.int32), op.sizes.of(most))
            )
    return found


@rule("dynamic_slice")
def dynamic_slice(op: Operation, x: Any, *starts: object) -> Any:
    sizes = op.params["slice_sizes"]
    places = _starts(op, starts[: len(sizes)], sizes)
    for axis, (start, size) in enumerate(zip(places, sizes)):
        if is_static(start) and start == 0 and size == op.operands[0].shape[axis]:
            continue
        if is_static(size) and size == 1:
            # One slice of a loop's inputs, mostly.
            x = moves.gather(x, moves.reshape(start, [1]), axis=axis)
            continue

        def cut(tensor: Any, axes: list[int], start: Any = start, size: Any = size) -> Any:
            begin: list[Any] = [0] * tensor.shape.rank
            ends = [-1 if n is None else n for n in tensor.shape.as_list()]
            if -1 in ends:
                whole = moves.shape(tensor)
                ends = [whole[i] if n == -1 else n for i, n in enumerate(ends)]
            begin[axes[0]], ends[axes[0]] = start, op.sizes.of(size)
            result = moves.slice_(tensor, moves.stack(begin), moves.stack(ends))
            static = tensor.shape.as_list()
            static[axes[0]] = int(size) if is_static(size) else None
            result.set_shape(static)
            return result

        x = joined(x, [axis], 5, cut)
    return x


@rule("dynamic_update_slice")
def dynamic_update_slice(op: Operation, x: Tensor, update: Tensor, *starts: object) -> Any:
    places = _starts(op, starts[: len(op.shape)], op.operands[1].shape)
    return updated(x, update, [lite.tensor(each) for each in places])


def updated(x: Tensor, update: Tensor, starts: Sequence[Any]) -> Any:
    if not starts:
        return update
    return moves.dynamic_update_slice(x, update, moves.stack(list(starts)))


class _Indices:
    """The indices of a gather or scatter: where each component of an index begins.

    Elements are looked up in the indexed axes as one; `places` counts in these.
    """

    def __init__(
        self,
        op: Operation,
        indices: Tensor,
        batches: tuple[Sequence[int], Sequence[int]],
        axes: Sequence[int],
        windows: dict[int, Any],
    ):
        self._op, self._sizes = op, op.sizes
        self.shape = list(op.operands[1].shape[:-1])  # jax keeps the components in the last axis
        shape = op.operands[0].shape
        components = {axis: _component(indices, number) for number, axis in enumerate(axes)}
        for axis, place in zip(*batches):
            size = self.shape[place]
            thin: list[Any] = [1] * len(self.shape)
            thin[place] = size
            components[axis] = reshape(_numbers(size, op.sizes), thin, op.sizes)
        self.axes = sorted(components)
        self.windows = [axis for axis in self.axes if axis in windows]
        self._starts = components
        self._widths = windows
        self._shape = shape
        self._checked = [axis for axis in self.axes if axis not in batches[0]]

    def valid(self) -> Any:
        """Whether a window lies within the array; None if all do."""
        result = None
        for axis in self._checked:
            most = self._sizes.of(self._shape[axis] - self._widths.get(axis, 1))
            start = self._starts[axis]
            inside = lite.logical_and(lite.greater_equal(start, 0), lite.less_equal(start, most))
            result = inside if result is None else lite.logical_and(result, inside)
        return result

    def first(self) -> list[Any]:
        """Where the window of the only index begins, in each axis of the array."""
        found = []
        for axis, size in enumerate(self._shape):
            start = self._starts.get(axis)
            if start is None:
                found.append(lite.constant(0))
                continue
            most = self._sizes.of(size - self._widths.get(axis, 1))
            found.append(_at_least_zero(moves.reshape(start, []), most))
        return found

    def places(self) -> Any:
        """One number for each element: of the shape of the indices, then of the windows."""
        total, rank = None, len(self.shape)
        for axis in self.axes:
            start = self._starts[axis]
            if axis in self._checked:
                most = self._sizes.of(self._shape[axis] - self._widths.get(axis, 1))
                start = _at_least_zero(start, most)
            thin = [*self.shape, *[1] * len(self.windows)]
            thin = [1 if i < rank and start.shape[i] == 1 else size for i, size in enumerate(thin)]
            start = reshape(start, thin, self._sizes)
            if axis in self.windows:
                row: list[Any] = [1] * (rank + len(self.windows))
                row[rank + self.windows.index(axis)] = self._widths[axis]
                start = start + reshape(_numbers(self._widths[axis], self._sizes), row, self._sizes)
            size = self._sizes.of(self._shape[axis])
            total = start if total is None else total * size + start
        if total is None:
            total = moves.zeros([1] * (rank + len(self.windows)), lite.int32)
        return full(
            total, [*self.shape, *(self._widths[axis] for axis in self.windows)], self._sizes
        )


def _component(indices: Tensor, number: int) -> Any:
    return indices[..., number]


def _numbers(size: int, sizes: TfliteSizes) -> Any:
    if is_static(size):
        return constant(np.arange(int(size), dtype=np.int32))
    return moves.range(sizes.of(size))


def _product(shape: Sequence[Any]) -> Any:
    result: Any = 1
    for size in shape:
        result = result * size
    return result


def _index(indices: Tensor) -> Any:
    return lite.cast(indices, lite.int32) if indices.dtype != lite.int32 else indices


def _bytes_of(table: Tensor) -> Tensor:
    """A weight of few bits as it is stored: of a large one only what is looked up is cast."""
    if table.value is None and table.made_by == "CAST":
        stored = table.operator.inputs[0]
        if stored.value is not None and stored.dtype.name in ("int8", "uint8", "float16"):
            return stored
    return table


@rule("gather")
def gather(op: Operation, x: Tensor, indices: Tensor) -> Any:
    numbers, mode = op.params["dimension_numbers"], str(op.params["mode"])
    shape, widths = op.operands[0].shape, op.params["slice_sizes"]
    batches = (numbers.operand_batching_dims, numbers.start_indices_batching_dims)
    hidden = {*numbers.collapsed_slice_dims, *batches[0]}
    indexed = [*batches[0], *numbers.start_index_map]
    windows = {axis: widths[axis] for axis in indexed if axis not in hidden}
    indices = _index(indices)
    if "CLIP" in mode.upper() and op.operands[1].dtype == "uint32":
        # From 2**31 on they look negative.
        indices = lite.where(lite.less(indices, 0), lite.constant(2**31 - 1), indices)
    index = _Indices(op, indices, batches, numbers.start_index_map, windows)
    rest = [axis for axis in range(len(shape)) if axis not in index.axes]
    for axis in rest:  # never indexed, so slices of it begin at 0
        if axis in hidden or widths[axis] != shape[axis]:
            end = op.sizes.of(widths[axis])
            x = moves.gather(x, moves.range(end), axis=axis)
    kept = [axis for axis in rest if axis not in hidden]
    sizes = [widths[axis] for axis in rest]
    found = lite.cast(_looked_up(op, _bytes_of(x), index, rest, sizes), x.dtype)
    outer = len(index.shape)
    made = [*range(outer), *index.windows, *kept]  # the axes of what was found, after the outer
    result_shape = [*index.shape, *(widths[axis] for axis in (*index.windows, *kept))]
    if found.shape.rank != len(result_shape):  # without the axes that are hidden
        found = reshape(found, result_shape, op.sizes)
    if "FILL" in mode.upper():
        found = _filled(op, found, index)
    # Where each axis of the result comes from.
    offsets = sorted([*index.windows, *kept])
    source = {axis: outer + number for number, axis in enumerate([*index.windows, *kept])}
    order, outers, inners = [], iter(range(outer)), iter(offsets)
    for axis in range(len(made)):
        inside = axis in numbers.offset_dims
        order.append(source[next(inners)] if inside else next(outers))
    return transpose(found, order)


def _looked_up(op: Operation, x: Tensor, index: _Indices, rest: Sequence[int], sizes: Any) -> Any:
    shape = op.operands[0].shape
    places = index.places()
    if len(index.axes) == 1:
        axis = index.axes[0]
        ahead = len([each for each in rest if each < axis])
        found = moves.gather(x, places, axis=axis)
        if ahead:  # the axes in front of it stand in front of what was found
            count = places.shape.rank
            order = [
                *range(ahead, ahead + count),
                *range(ahead),
                *range(ahead + count, found.shape.rank),
            ]
            found = transpose(found, order)
        return found
    flat = transpose(x, [*index.axes, *rest])
    flat = reshape(flat, [_product([shape[axis] for axis in index.axes]), *sizes], op.sizes)
    return moves.gather(flat, places)


def _filled(op: Operation, found: Any, index: _Indices) -> Any:
    valid = index.valid()
    known = None if valid is None else lite.static_value(valid)
    if valid is None or (known is not None and bool(np.all(known))):
        return found
    extra = found.shape.rank - len(index.shape)
    shape = [1 if valid.shape[i] == 1 else size for i, size in enumerate(index.shape)]
    valid = reshape(valid, [*shape, *[1] * extra], op.sizes)
    return broadcast(lite.where, valid, found, _filling(op))


def _filling(op: Operation) -> Any:
    value = op.params["fill_value"]
    if value is None:
        if is_float(op):
            value = np.nan
        elif op.dtype == "bool":
            value = True
        elif op.dtype.startswith("uint"):
            value = np.iinfo(op.dtype).max
        else:
            value = np.iinfo(op.dtype).min
    return constant(np.asarray(value, np.float32 if op.dtype in _FLOATS else op.dtype))


_FLOATS = ("float32", "float16", "bfloat16")


#: A product or an order of complex numbers is not that of their parts.
@rule("scatter-mul", "scatter-min", "scatter-max", "scatter_mul", "scatter_min", "scatter_max")
@rule("scatter", "scatter-add", "scatter-sub", "scatter_add", "scatter_sub")
def scatter(op: Operation, x: Tensor, indices: Tensor, updates: Any) -> Any:
    numbers, mode = op.params["dimension_numbers"], str(op.params["mode"])
    shape = op.operands[0].shape
    batches = (numbers.operand_batching_dims, numbers.scatter_indices_batching_dims)
    hidden = {*numbers.inserted_window_dims, *batches[0]}
    axes = numbers.scatter_dims_to_operand_dims
    indexed = [*batches[0], *axes]
    inner = [axis for axis in range(len(shape)) if axis not in hidden]
    widths = dict(zip(inner, (op.operands[2].shape[axis] for axis in numbers.update_window_dims)))
    # An axis without an index of its own may have a part only written: one more index, of 0.
    partial = [axis for axis in inner if axis not in indexed and widths[axis] != shape[axis]]
    index = _index(indices)
    if partial:
        index = moves.concat([index, *(moves.zeros_like(index[..., :1]) for _ in partial)], -1)
    windows = {axis: widths[axis] for axis in (*indexed, *partial) if axis in widths}
    places_of = _Indices(op, index, batches, (*axes, *partial), windows)
    rest = [axis for axis in range(len(shape)) if axis not in places_of.axes]
    if op.name == "scatter" and all(is_static(size) and size == 1 for size in places_of.shape):
        return _write_slice(op, x, updates, places_of, widths)
    outer = [
        axis for axis in range(len(op.operands[2].shape)) if axis not in numbers.update_window_dims
    ]
    where = dict(zip(inner, numbers.update_window_dims))
    updates = transpose(
        updates, [*outer, *(where[a] for a in places_of.windows), *(where[a] for a in rest)]
    )
    order = [*places_of.axes, *rest]
    moved = [shape[axis] for axis in order]
    count, tail = _product(moved[: len(places_of.axes)]), _product(moved[len(places_of.axes) :])
    wide = len(places_of.shape) + len(places_of.windows)
    many = _product([*places_of.shape, *(widths[a] for a in places_of.windows)])
    flat = reshape(transpose(x, order), [count, tail], op.sizes)
    rows = reshape(updates, [many, tail], op.sizes)
    places = reshape(places_of.places(), [many], op.sizes)
    valid = None if "CLIP" in mode.upper() else places_of.valid()
    if valid is not None:
        extra = wide - len(places_of.shape)
        thin = [1 if valid.shape[i] == 1 else size for i, size in enumerate(places_of.shape)]
        valid = reshape(valid, [*thin, *[1] * extra], op.sizes)
        whole = [*places_of.shape, *(widths[a] for a in places_of.windows)]
        valid = reshape(full(valid, whole, op.sizes), [many], op.sizes)
        # What lies outside goes to a row behind the last.
        places = lite.where(valid, places, moves.fill(moves.shape(places), op.sizes.of(count)))
    result = _combined(op, flat, places, rows, op.sizes.of(count), op.sizes.of(many))
    result = reshape(result, moved, op.sizes)
    return transpose(result, [order.index(axis) for axis in range(len(order))])


def _write_slice(
    op: Operation, x: Tensor, update: Tensor, index: _Indices, widths: dict[int, Any]
) -> Any:
    """One slice at one place."""
    rank = x.shape.rank
    update = reshape(update, [widths.get(axis, 1) for axis in range(rank)], op.sizes)
    new = updated(x, update, index.first())
    valid = index.valid()
    known = None if valid is None else lite.static_value(valid)
    if valid is None or (known is not None and bool(np.all(known))):
        return new
    return lite.where(moves.reshape(valid, [1] * rank), new, x)


def _combined(op: Operation, flat: Any, places: Any, rows: Any, count: Any, many: object) -> Any:
    name = op.name.replace("-", "_")
    if name in ("scatter_add", "scatter_sub") and flat.dtype != lite.bool_:
        shape = moves.stack([lite.tensor(count + 1), moves.shape(flat)[1]])
        sums = moves.scatter_nd(places[:, None], rows, shape)[:-1]
        return wrapped(flat + sums if name == "scatter_add" else flat - sums, op.dtype)
    written, last = _last(places, count, many)
    if name == "scatter":
        if not is_static(many):  # nothing to look up in no update
            rows = moves.concat([rows, flat[:1]], 0)
        return lite.where(written, moves.gather(rows, last), flat)
    if op.dtype == "uint32" or flat.dtype == lite.bool_:
        raise NotInTfliteError(f"it has none for {op.dtype}.")
    if name == "scatter_mul":
        return wrapped(flat * moves.unsorted_segment_prod(rows, places, count + 1)[:-1], op.dtype)
    largest = name == "scatter_max"
    segment = moves.unsorted_segment_max if largest else moves.unsorted_segment_min
    found = lite.where(written, segment(rows, places, count + 1)[:-1], flat)
    if is_float(op):  # which kernels lose
        nan = lite.cast(lite.not_equal(rows, rows), lite.float32)
        counts = moves.unsorted_segment_sum(nan, places, count + 1)[:-1]
        found = lite.where(lite.greater(counts, 0.0), lite.constant(np.nan, lite.float32), found)
    return larger(op, flat, found) if largest else smaller(op, flat, found)


def _last(places: Any, count: Any, many: Any) -> tuple[Any, Any]:
    """Which rows are written, and the number of the last update of each."""
    order = constant(np.arange(many, dtype=np.int32)) if is_static(many) else moves.range(many)
    last = moves.unsorted_segment_max(order, places, count + 1)[:-1]
    return lite.greater_equal(last, 0)[:, None], lite.maximum(last, 0)
