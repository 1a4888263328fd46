"""TFLite operators that move elements: reshape, transpose, slice, concatenate, gather."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pax_export.export.formats.tflite.builder.graph import (
    ARITHMETIC,
    Tensor,
    TensorLike,
    alike,
    constant,
    current,
    emit,
    float32,
    int32,
    tensor,
)


def one(*arguments: Any, **options: Any) -> Tensor:
    return emit(*arguments, **options)[0]


def _is_moved_free(x: Tensor, permutation: Sequence[int]) -> bool:
    """Whether a transpose moves dimensions of 1 only, which is a reshape."""
    wide = [axis for axis in permutation if x.shape[axis] != 1]
    return wide == sorted(wide) and x.shape.count(None) <= 1 and 0 not in x.shape


def with_rest(sizes: Sequence[int | None]) -> list[int]:
    """Sizes for a reshape, at most one of which is unknown."""
    return [-1 if size is None else size for size in sizes]


def like_shape(x: Tensor, other: Tensor) -> Tensor:
    """A tensor in the shape of another one of as many elements."""
    if other.shape.count(None) <= 1 and 0 not in other.shape:
        return reshape(x, with_rest(other.shape))
    result = reshape(x, shape(other))
    result.set_shape(other.shape)
    return result


def fill(dims: TensorLike, value: Any) -> Tensor:
    dims, value = tensor(dims, int32), tensor(value)
    sizes = _known_sizes(dims)
    return one("FILL", [dims, value], [(sizes, value.dtype)], lambda d, v: np.full(d, v))


def _known_sizes(dims: Tensor) -> list[Any]:
    if dims.value is not None:
        return [int(size) for size in dims.value]
    (rank,) = dims.shape
    if dims.made_by == "PACK":
        scalars = dims.operator.inputs
        return [None if each.value is None else int(each.value) for each in scalars]
    return [None] * rank


def shape(x: Tensor) -> Tensor:
    if x.shape.known:
        return constant(np.array(x.shape, np.int32))
    return one("SHAPE", [x], [([len(x.shape)], int32)], out_type="int32")


def stack(values: Sequence[Any], axis: int = 0) -> Tensor:
    found = [tensor(each, int32) for each in values]
    first = found[0]
    sizes = list(first.shape)
    sizes.insert(axis, len(found))
    return one(
        "PACK", found, [(sizes, first.dtype)], lambda *v: np.stack(v, axis),
        values_count=len(found), axis=axis,
    )  # fmt: skip


def concat(values: Sequence[Any], axis: int) -> Tensor:
    found = alike(*values)
    axis %= len(found[0].shape)
    shapes = zip(*(each.shape for each in found))
    sizes = [next((n for n in each if n is not None), None) for each in shapes]
    along = [each.shape[axis] for each in found]
    sizes[axis] = None if None in along else sum(along)
    return one(
        "CONCATENATION", found, [(sizes, found[0].dtype)], lambda *v: np.concatenate(v, axis),
        axis=axis,
    )  # fmt: skip


def reshape(x: Tensor, sizes: TensorLike) -> Tensor:
    target = tensor(sizes, int32)
    if target.shape == (0,):
        target = constant(np.zeros(0, np.int32))
    found = _known_sizes(target)
    if found.count(-1) == 1:
        rest = [size for size in found if size != -1]
        axis = found.index(-1)
        found[axis] = None
        if x.shape.known and None not in rest and 0 not in rest:
            found[axis] = x.shape.size // int(np.prod(rest, dtype=np.int64))
            target = constant(np.array(found, np.int32))
    if list(x.shape) == found and found.count(None) == 0:
        return x
    if x.made_by == "RESHAPE" and x.graph is current():
        x = x.operator.inputs[0]
        if list(x.shape) == found and found.count(None) == 0:
            return x
    return one("RESHAPE", [x, target], [(found, x.dtype)], lambda v, s: v.reshape(s))


def squeeze(x: Tensor, axis: int) -> Tensor:
    sizes = list(x.shape)
    del sizes[axis]
    if sizes.count(None) <= 1:
        return reshape(x, with_rest(sizes))
    index: list[Any] = [slice(None)] * len(x.shape)
    index[axis] = 0
    return getitem(x, tuple(index))


def expand_dims(x: Tensor, axis: int) -> Tensor:
    sizes = list(x.shape)
    axis = axis if axis >= 0 else len(sizes) + 1 + axis
    sizes.insert(axis, 1)
    if sizes.count(None) <= 1 and 0 not in sizes:
        return reshape(x, with_rest(sizes))
    fold = lambda v, a: np.expand_dims(v, int(a))  # noqa: E731
    return one("EXPAND_DIMS", [x, constant(axis, int32)], [(sizes, x.dtype)], fold)


def transpose(x: Tensor, permutation: Sequence[int]) -> Tensor:
    permutation = [int(each) for each in permutation]
    if x.made_by == "TRANSPOSE" and x.graph is current():
        x, before = x.operator.inputs
        permutation = [int(before.value[each]) for each in permutation]
    if permutation == sorted(permutation):
        return x
    sizes = [x.shape[axis] for axis in permutation]
    if _is_moved_free(x, permutation):
        return reshape(x, with_rest(sizes))
    order = constant(np.array(permutation, np.int32))
    return one("TRANSPOSE", [x, order], [(sizes, x.dtype)], lambda v, p: np.transpose(v, p))


def broadcast_to(x: Tensor, sizes: TensorLike) -> Tensor:
    target = tensor(sizes, int32)
    found = _known_sizes(target)
    if list(x.shape) == found and None not in found:
        return x
    return one("BROADCAST_TO", [x, target], [(found, x.dtype)], lambda v, s: np.broadcast_to(v, s))


def tile(x: Tensor, times: TensorLike) -> Tensor:
    times = tensor(times, int32)
    counts = _known_sizes(times)
    sizes = [None if None in (n, t) else n * t for n, t in zip(x.shape, counts)]
    return one("TILE", [x, times], [(sizes, x.dtype)], lambda v, t: np.tile(v, t))


def pad(x: Tensor, widths: Any, constant_values: Any = 0) -> Tensor:
    widths, value = tensor(widths, int32), tensor(constant_values, x.dtype)
    sizes: list[Any] = [None] * len(x.shape)
    if widths.value is not None:
        sizes = [None if n is None else n + int(w.sum()) for n, w in zip(x.shape, widths.value)]
    elif widths.made_by == "PACK":
        rows = [each.value for each in widths.operator.inputs]
        sizes = [
            None if n is None or row is None else n + int(row.sum())
            for n, row in zip(x.shape, rows)
        ]
    if value.value is not None and x.dtype == float32 and value.value.tobytes() == bytes(4):
        if x.made_by == "PAD" and widths.value is not None and x.graph is current():
            before = x.operator.inputs[1].value
            if before is not None:
                return pad(x.operator.inputs[0], before + widths.value)
        return one("PAD", [x, widths], [(sizes, x.dtype)], lambda v, w: np.pad(v, w))
    return one(
        "PADV2", [x, widths, value], [(sizes, x.dtype)],
        lambda v, w, c: np.pad(v, w, constant_values=c),
    )  # fmt: skip


def reverse(x: Tensor, axes: Sequence[int]) -> Tensor:
    places = constant(np.array(axes, np.int32))
    return one("REVERSE_V2", [x, places], [(x.shape, x.dtype)], lambda v, a: np.flip(v, tuple(a)))


def range(count: Tensor) -> Tensor:
    ends = [constant(0), reshape(count, []), constant(1)]
    return one("RANGE", ends, [([None], int32)])


def getitem(x: Tensor, index: TensorLike) -> Tensor:
    """``x[index]``: numbers and slices, whose ends may be tensors."""
    index = list(index) if isinstance(index, tuple) else [index]
    index += [slice(None)] * (len(x.shape) - len(index))
    if x.made_by == "SHAPE" and isinstance(index[0], int):
        size = x.operator.inputs[0].shape[index[0]]
        if size is not None:
            return constant(size, int32)
    return _strided(x, index)


def _strided(x: Tensor, index: Sequence[Any]) -> Tensor:
    begin, end, steps, sizes = [], [], [], []
    masks = {"begin_mask": 0, "end_mask": 0, "shrink_axis_mask": 0}
    for axis, (each, size) in enumerate(zip(index, x.shape)):
        if not isinstance(each, slice):
            each = each if isinstance(each, Tensor) else int(each)
            begin.append(each)
            end.append(each + 1)
            steps.append(1)
            masks["shrink_axis_mask"] |= 1 << axis
            continue
        step = 1 if each.step is None else int(each.step)
        begin.append(0 if each.start is None else each.start)
        end.append(0 if each.stop is None else each.stop)
        steps.append(step)
        masks["begin_mask"] |= (each.start is None) << axis
        masks["end_mask"] |= (each.stop is None) << axis
        sizes.append(_length(each, size))
    if all(isinstance(each, slice) and each == slice(None) for each in index):
        return x
    if len(sizes) == len(index) and sizes == list(x.shape) and None not in sizes:
        if min(steps) > 0:
            return x

    def fold(v: Any, *_: object) -> Any:
        return v[tuple(_numbers(each) for each in index)]

    known = all(map(_is_known, index))
    ends = [stack(begin), stack(end), constant(np.array(steps, np.int32))]
    return one(
        "STRIDED_SLICE", [x, *ends], [(sizes, x.dtype)], fold if known else None, **masks
    )  # fmt: skip


def _is_known(each: Any) -> bool:
    ends = (each.start, each.stop) if isinstance(each, slice) else (each,)
    return all(not isinstance(end, Tensor) or end.value is not None for end in ends)


def _numbers(each: object) -> Any:
    def number(end: Any) -> Any:
        return int(end.value) if isinstance(end, Tensor) else end

    if isinstance(each, slice):
        return slice(number(each.start), number(each.stop), each.step)
    return number(each)


def _length(each: slice, size: int) -> Any:
    if size is None or not _is_known(each):
        return None
    return len(builtins.range(*_numbers(each).indices(size)))


def gather(x: Tensor, places: TensorLike, axis: int = 0, batch_dims: int = 0) -> Tensor:
    places = tensor(places, int32)
    axis %= max(len(x.shape), 1)
    sizes = [*x.shape[:axis], *places.shape[batch_dims:], *x.shape[axis + 1 :]]
    fold = (lambda v, p: np.take(v, p, axis)) if batch_dims == 0 else None
    return one(
        "GATHER", [x, places], [(sizes, x.dtype)], fold, axis=axis, batch_dims=batch_dims
    )  # fmt: skip


def scatter_nd(indices: TensorLike, updates: Any, sizes: TensorLike) -> Tensor:
    sizes = tensor(sizes, int32)
    return one("SCATTER_ND", [indices, updates, sizes], [(_known_sizes(sizes), updates.dtype)])


def _segment(name: str) -> Callable[[Tensor, Tensor, Any], Tensor]:
    def operate(rows: Tensor, places: Tensor, count: TensorLike) -> Tensor:
        count = tensor(count, int32)
        first = None if count.value is None else int(count.value)
        return one(name, [rows, places, count], [([first, *rows.shape[1:]], rows.dtype)])

    return operate


unsorted_segment_sum = _segment("UNSORTED_SEGMENT_SUM")
unsorted_segment_prod = _segment("UNSORTED_SEGMENT_PROD")
unsorted_segment_max = _segment("UNSORTED_SEGMENT_MAX")
unsorted_segment_min = _segment("UNSORTED_SEGMENT_MIN")


def dynamic_update_slice(x: Tensor, update: Tensor, starts: TensorLike) -> Tensor:
    starts = tensor(starts, int32)
    return one("DYNAMIC_UPDATE_SLICE", [x, update, starts], [(x.shape, x.dtype)])


def identity(x: Tensor) -> Tensor:
    """A tensor of its own with the same elements."""
    inputs = [x, shape(x)]
    return current().append("RESHAPE", inputs, [(x.shape, x.dtype)], {"copied": True})[0]


ARITHMETIC["getitem"] = getitem
