"""Gather and dynamic slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pax_export.export.formats.onnx.graph import GraphBuilder
from pax_export.export.formats.onnx.registry import rule
from pax_export.export.formats.onnx.rules.arithmetic import choose
from pax_export.export.formats.onnx.values import Value, carrier, is_number, same_size

Results = Sequence[Any]


@rule("gather")
def gather(
    builder: GraphBuilder,
    results: Results,
    x: Value,
    indices: Value,
    *,
    dimension_numbers: Any,
    slice_sizes: Sequence[Any],
    mode: Any,
    fill_value: Any,
    **_: object,
) -> Any:
    (result,) = results
    numbers = dimension_numbers
    places = Places(builder, x, indices, numbers.start_index_map, slice_sizes, mode)
    name, axes = _narrowed(builder, x, slice_sizes, numbers)
    batch = list(range(indices.rank - 1))
    collapsed = numbers.collapsed_slice_dims
    windows = [int(axis) for axis in numbers.start_index_map if axis not in collapsed]
    operand_batch = list(numbers.operand_batching_dims)
    indices_batch = list(numbers.start_indices_batching_dims)
    rest = [axis for axis in axes if axis not in (*numbers.start_index_map, *operand_batch)]
    if len(numbers.start_index_map) == 1 and not operand_batch:
        (axis,) = numbers.start_index_map
        at = axes.index(axis)
        made = builder("Gather", name, places.numbered(windows, squeezed=True), axis=at)
        before = axes[:at]
        order = [*before, *(_batch(each) for each in batch), *windows]
        order += [each for each in rest if each not in before]
    else:
        first = [*operand_batch, *numbers.start_index_map]
        turned = builder.transpose(name, [axes.index(axis) for axis in (*first, *rest)])
        others = [axis for axis in batch if axis not in indices_batch]
        index = places.numbered(windows, turn=[*indices_batch, *others])
        made = builder("GatherND", turned, index, batch_dims=len(operand_batch))
        order = [_batch(each) for each in (*indices_batch, *others)]
        order += [*windows, *rest]
    offsets = iter(sorted([*windows, *rest]))
    batches = iter([_batch(each) for each in batch])
    rank = len(result.shape)
    wanted = [
        next(offsets) if axis in numbers.offset_dims else next(batches) for axis in range(rank)
    ]
    made = builder.transpose(made, [order.index(each) for each in wanted])
    return _filled(builder, made, places, result, numbers, fill_value)


def _batch(axis: int) -> int:
    """An axis of the places, beside those of the array, which are not negative."""
    return -1 - axis


def _narrowed(
    builder: GraphBuilder, x: Value, sizes: Sequence[Any], numbers: Any
) -> tuple[Any, list[int]]:
    """The array without what no window reaches, and the axes that are left."""
    name: Any = x.name
    moving = (*numbers.start_index_map, *numbers.operand_batching_dims)
    collapsed, dropped = numbers.collapsed_slice_dims, []
    for axis in (axis for axis in range(x.rank) if axis not in moving):
        if not same_size(sizes[axis], x.shape[axis]):
            name = builder.slice(name, axis, 0, sizes[axis])
        if axis in collapsed:
            dropped.append(axis)
    left = [axis for axis in range(x.rank) if axis not in dropped]
    return builder.squeeze(name, dropped), left


def _filled(
    builder: GraphBuilder,
    made: object,
    places: Places,
    result: Any,
    numbers: Any,
    fill_value: object,
) -> Any:
    """Puts a number where a window would have reached beyond the array."""
    if places.inside is None:
        return made
    batch_axes = [a for a in range(len(result.shape)) if a not in numbers.offset_dims]
    inside = builder.unsqueeze(
        places.inside, [a for a in range(len(result.shape)) if a not in batch_axes]
    )
    dtype = np.dtype(result.dtype)
    kind = carrier(dtype)
    if fill_value is None:
        fill_value = _default_fill(dtype)
    fill = np.asarray(np.asarray(fill_value).astype(dtype)).astype(kind)
    return choose(builder, inside, made, fill, dtype)


def _default_fill(dtype: np.dtype) -> Any:
    if dtype == np.bool_:
        return True
    if jax.numpy.issubdtype(dtype, jax.numpy.inexact):
        return np.nan
    limits = jax.numpy.iinfo(dtype)
    return limits.min if limits.min < 0 else limits.max


class Places:
    """Where windows start: whole numbers of int64 in the last axis, moved inside of the array.

    Attributes:
        axes: the axes of the array that the numbers are for.
        inside: the name of what says which windows were inside; None where all are, or where
            those that are not are moved.
    """

    def __init__(
        self,
        builder: GraphBuilder,
        x: Value,
        indices: Value,
        axes: Sequence[int],
        sizes: Sequence[Any],
        mode: object,
    ):
        self._writer = builder
        self.axes = tuple(axes)
        self._sizes = [sizes[axis] for axis in axes]
        self._rank = indices.rank
        self.batch_rank = indices.rank - 1
        self.inside: str | None = None
        lasts = [x.shape[axis] - sizes[axis] for axis in axes]
        name: Any = indices.name
        if indices.known is not None and self._all_inside(indices.known, lasts):
            self._starts: Any = indices.known.astype(np.int64)
            return
        if indices.carrier != np.int64:
            name = builder.cast(name, np.int64)
        last = builder.sizes.shape(lasts)
        zero = np.zeros(1, np.int64)
        if "FILL" in str(mode).upper() and len(axes):
            low = builder("GreaterOrEqual", name, zero)
            good = builder("And", low, builder("LessOrEqual", name, last))
            number = builder.cast(good, np.int32)
            least = builder("ReduceMin", number, np.array([self._rank - 1], np.int64), keepdims=0)
            self.inside = builder.cast(least, np.bool_)
        self._starts = builder.within(name, last)

    @staticmethod
    def _all_inside(known: np.ndarray, lasts: Sequence[Any]) -> bool:
        limits = [each if is_number(each) else 0 for each in lasts]
        return bool(np.all((known >= 0) & (known <= np.array(limits, np.int64))))

    def numbered(
        self, windows: Sequence[int], turn: Sequence[int] = (), squeezed: bool = False
    ) -> Any:
        """The places of all elements of the windows, which have an axis for each of some axes."""
        builder, count = self._writer, len(windows)
        starts: Any = self._starts
        if turn:
            starts = builder.transpose(starts, [*turn, self._rank - 1])
        batch = self._rank - 1
        starts = builder.unsqueeze(starts, [batch + index for index in range(count)])
        for number, axis in enumerate(windows):
            at = self.axes.index(axis)
            if same_size(self._sizes[at], 1):
                continue
            shape: list[Any] = [1] * (batch + count + 1)
            shape[batch + number] = self._sizes[at]
            steps = builder.reshape(builder.arange(self._sizes[at]), shape)
            chosen = np.zeros(len(self.axes), np.int64)
            chosen[at] = 1
            starts = builder("Add", starts, builder("Mul", steps, chosen))
        return builder.squeeze(starts, [batch + count]) if squeezed else starts
