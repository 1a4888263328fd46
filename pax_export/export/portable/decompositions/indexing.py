"""Gather and scatter as lookups along one axis: `take` and `put` of `kept`.

Indexed axes are merged into one; an index is the position of an element in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pax_export._foundations.types import Array, ArrayLike, TracedProgram
from pax_export.export.portable import kept
from pax_export.export.portable.decompositions import NotDecomposedError, decomposes
from pax_export.export.portable.decompositions.reductions import of_arrays, ordered, unordered
from pax_export.export.portable.program import is_static
from pax_export.export.portable.sizes import has_no_elements, same_size

#: Places are counted in int32.
_MOST = 2**31 - 1


@decomposes("gather", any_dtype=True)
def gather(
    x: Array,
    indices: Array,
    *,
    dimension_numbers: Any,
    slice_sizes: Sequence[Any],
    mode: lax.GatherScatterMode,
    fill_value: Any,
    **_: object,
) -> Any:
    numbers = dimension_numbers
    placed, batches = numbers.start_index_map, numbers.operand_batching_dims
    hidden = {*numbers.collapsed_slice_dims, *batches}
    widths = {axis: size for axis, size in enumerate(slice_sizes) if axis not in hidden}
    starts = _Starts(x.shape, indices, placed, widths)
    pairs = dict(zip(batches, numbers.start_indices_batching_dims))
    if not batches and any(not same_size(widths.get(axis, 1), 1) for axis in starts.moving):
        # One window, without a list of its elements; LiteRT returns no empty arrays.
        if starts.is_single and is_static([widths.get(axis, 1) for axis in starts.moving]):
            found = lax.dynamic_slice(x, starts.of_axes(), slice_sizes)
            found = found.reshape(*starts.shape, *(widths[axis] for axis in widths))
            return _filled(found, starts, numbers.offset_dims, mode, fill_value)
    if len(batches) + 1 == x.ndim == len(starts.shape) and len(hidden) == x.ndim:
        if len(placed) == 1 and all(pairs.get(axis, axis) == axis for axis in (*batches, *placed)):
            indices_of_rows = starts.places(placed, (), {})
            found = kept.call("take_along", x, indices_of_rows, axis=placed[0])
            return _filled(found, starts, (), mode, fill_value)
    indexed = sorted((*batches, *starts.moving))
    cut = [size if axis in indexed else slice_sizes[axis] for axis, size in enumerate(x.shape)]
    if not all(map(same_size, cut, x.shape)):  # axes without index start at 0
        x = lax.slice(x, [0] * x.ndim, cut)
    axes = [axis for axis in range(x.ndim) if axis in indexed or axis in widths]
    x = lax.squeeze(x, [axis for axis in range(x.ndim) if axis not in axes])
    at = axes.index(indexed[0]) if indexed else 0
    if axes[at : at + len(indexed)] != indexed:
        order = [*indexed, *(axis for axis in axes if axis not in indexed)]
        x, axes, at = lax.transpose(x, [axes.index(axis) for axis in order]), order, 0
    before, after = axes[:at], axes[at + len(indexed) :]
    if len(indexed) != 1:
        shape = (cut[axis] for axis in indexed)
        x = x.reshape(*x.shape[:at], math.prod(shape), *x.shape[at + len(indexed) :])
    windows = [axis for axis in indexed if axis in widths]
    found = kept.call("take", x, starts.places(indexed, windows, pairs), axis=at)
    outer = [-1 - axis for axis in range(len(starts.shape))]
    current = [*before, *outer, *windows, *after]
    offsets, outers = iter(sorted(axis for axis in current if axis >= 0)), iter(outer)
    wanted = (
        next(offsets if axis in numbers.offset_dims else outers) for axis in range(len(current))
    )
    found = lax.transpose(found, [current.index(each) for each in wanted])
    return _filled(found, starts, numbers.offset_dims, mode, fill_value)


def _filled(
    found: Array,
    starts: _Starts,
    offsets: Sequence[int],
    mode: lax.GatherScatterMode,
    value: ArrayLike,
) -> Any:
    """Fills windows that would reach beyond the array."""
    if "FILL" not in str(mode).upper() or not starts.components:
        return found
    inside = lax.expand_dims(starts.inside(), offsets)
    return jnp.where(inside, found, jnp.asarray(value, found.dtype))


def _scatter(how: str, *names: str) -> None:
    @decomposes(*names, any_dtype=True)
    def scatter(
        x: Array,
        indices: Array,
        updates: Array,
        *,
        dimension_numbers: Any,
        mode: lax.GatherScatterMode,
        unique_indices: bool,
        update_jaxpr: TracedProgram | None = None,
        update_consts: Sequence[Any] = (),
        **_: object,
    ) -> Any:
        numbers, combine = dimension_numbers, None
        if how == "set" and update_jaxpr is not None:
            function = of_arrays(update_jaxpr, 2, update_consts)
            combine = _Combine(lambda old, new: function((old,), (new,))[0], unique_indices)
        if how == "mul" and jnp.issubdtype(x.dtype, jnp.complexfloating):
            combine = _Combine(lax.mul, unique_indices)
        if how == "sub":
            return scattered("add", x, indices, -updates, numbers, mode)
        return scattered(how, x, indices, updates, numbers, mode, combine)


_scatter("set", "scatter")
for _how in ("add", "sub", "mul", "max", "min"):
    _scatter(_how, f"scatter-{_how}", f"scatter_{_how}")


@dataclass(frozen=True)
class _Combine:
    """A function of old and new rows, which targets lack, and whether all places differ."""

    function: Callable[[Any, Any], Any]
    unique: bool

    def put(self, x: Array, indices: Array, rows: Array, *inside: Array) -> Any:
        """Returns `x` with rows combined at positions."""
        old = kept.call("take", x, indices, axis=0)
        return kept.call("put", x, indices, self.function(old, rows), *inside, how="set")

    def put_in_turn(self, x: Array, *rows: Array) -> Any:
        """The same, where several rows may have one position."""

        def step(number: Array, x: Array) -> Any:
            return self.put(x, *(lax.dynamic_slice_in_dim(each, number, 1) for each in rows))

        return lax.fori_loop(0, rows[0].shape[0], step, x)


def scattered(
    how: str,
    x: Array,
    indices: Array,
    updates: Array,
    numbers: Any,
    mode: lax.GatherScatterMode,
    combine: _Combine | None = None,
) -> Any:
    """Returns the array with updates set, added, multiplied, compared or combined at indices."""
    if has_no_elements(updates):
        return x
    if x.dtype == np.bool_ and how != "set":
        wide = (each.astype(np.int32) for each in (x, updates))
        return scattered(how, next(wide), indices, next(wide), numbers, mode) != 0
    if x.dtype in (np.uint32, np.uint64) and how in ("max", "min"):
        x, updates = ordered(x), ordered(updates)
        return unordered(scattered(how, x, indices, updates, numbers, mode))
    batches, placed = numbers.operand_batching_dims, numbers.scatter_dims_to_operand_dims
    hidden = {*numbers.inserted_window_dims, *batches}
    inner = [axis for axis in range(x.ndim) if axis not in hidden]
    at = dict(zip(inner, numbers.update_window_dims))
    widths = {axis: updates.shape[update_axis] for axis, update_axis in at.items()}
    starts = _Starts(x.shape, indices, placed, widths)
    drops = "FILL" in str(mode).upper() and bool(starts.components)
    # A whole first axis needs no transpose.
    leads = all(axis in starts.moving for axis in range(x.ndim - len(inner)))
    leads = leads and all(map(same_size, x.shape[-len(inner) :], widths.values()))
    if how == "set" and not combine and starts.is_single and not batches and not leads:
        update = updates.reshape([widths.get(axis, 1) for axis in range(x.ndim)])
        if drops:  # outside, the old window is written again
            old = lax.dynamic_slice(x, starts.of_axes(), update.shape)
            update = lax.select(starts.inside().reshape(()), update, old)
        return lax.dynamic_update_slice(x, update, starts.of_axes())
    # A part of an axis that is not indexed is at its beginning.
    indexed = [
        axis
        for axis, size in enumerate(x.shape)
        if axis in (*batches, *starts.moving)
        or (axis not in placed and not same_size(widths.get(axis, 1), size))
    ]
    rest = [axis for axis in range(x.ndim) if axis not in indexed]
    windows = [axis for axis in indexed if axis in widths]
    outer = [axis for axis in range(updates.ndim) if axis not in numbers.update_window_dims]
    rows = lax.transpose(updates, [*outer, *(at[axis] for axis in (*windows, *rest) if axis in at)])
    order = [*indexed, *rest]
    turned = lax.transpose(x, order)
    count, tail = (math.prod(x.shape[axis] for axis in axes) for axes in (indexed, rest))
    pairs = dict(zip(batches, numbers.scatter_indices_batching_dims))
    indices_of_rows = starts.places(indexed, windows, pairs)
    many = math.prod(indices_of_rows.shape)
    flat, rows = turned.reshape(count, tail), rows.reshape(many, tail)
    inside = []
    if drops:
        wide = lax.expand_dims(starts.inside(), range(len(outer), len(outer) + len(windows)))
        inside = [jnp.broadcast_to(wide, indices_of_rows.shape).reshape(many)]
    operands = flat, indices_of_rows.reshape(many), rows, *inside
    if combine is None:
        found = kept.call("put", *operands, how=how)
    else:
        is_unique = combine.unique or starts.is_single
        found = (combine.put if is_unique else combine.put_in_turn)(*operands)
    return lax.transpose(found.reshape(turned.shape), [int(axis) for axis in np.argsort(order)])


@decomposes("dynamic_slice", any_dtype=True)
def dynamic_slice(x: Array, *starts: Array, slice_sizes: Sequence[Any], **_: object) -> Any:
    inside = _moved_inside(x.shape, starts, slice_sizes)
    return kept.call("window", x, *inside, sizes=tuple(slice_sizes))


@decomposes("dynamic_update_slice", any_dtype=True)
def dynamic_update_slice(x: Array, update: Array, *starts: Array, **_: object) -> Any:
    if has_no_elements(update):
        return x
    return kept.call("put_window", x, update, *_moved_inside(x.shape, starts, update.shape))


def _moved_inside(
    shape: Sequence[Any], starts: Sequence[Array], widths: Sequence[Any]
) -> list[Any]:
    """Clamps the starts of windows of these widths to the array."""
    found: list[Any] = []
    for start, size, width in zip(starts, shape, widths):
        if same_size(size, width):
            found.append(np.int32(0))
            continue
        start = start.astype(np.int32) if start.dtype.itemsize < 4 else start
        most = _numbers([size - width]).astype(start.dtype)
        found.append(_between(start, most).astype(np.int32))
    return found


class _Starts:
    """The starts of the windows of a gather or scatter.

    Attributes:
        shape: the shape of the indices, without components.
        components: the axes of the components.
        moving: the axes along which starts differ.
    """

    def __init__(
        self, shape: Sequence[Any], indices: Array, axes: Sequence[int], widths: dict[int, Any]
    ):
        self.shape = indices.shape[:-1]  # jax keeps the components in the last axis
        self.components = tuple(axes)
        self.moving = [axis for axis in axes if not same_size(widths.get(axis, 1), shape[axis])]
        self._array, self._widths = shape, widths
        indices = indices.astype(np.int32) if indices.dtype.itemsize < 4 else indices
        self._starts = indices.reshape(self.shape) if len(axes) == 1 else indices
        lasts = [shape[axis] - widths.get(axis, 1) for axis in axes]
        most = _numbers(lasts).astype(indices.dtype)
        self._clamped = _between(self._starts, most)

    @property
    def is_single(self) -> bool:
        return all(same_size(size, 1) for size in self.shape)

    def inside(self) -> Any:
        """Whether windows are inside the array."""
        found = self._clamped == self._starts
        return found if len(self.components) == 1 else found.all(-1)

    def of_axes(self) -> list[Any]:
        """Returns the start of the only window, in each axis of the array."""
        starts = self._clamped.reshape(-1).astype(np.int32)
        numbers = {axis: starts[component] for component, axis in enumerate(self.components)}
        return [numbers.get(axis, np.int32(0)) for axis in range(len(self._array))]

    def places(
        self, indexed: Sequence[int], windows: Sequence[int], batches: dict[int, int]
    ) -> Any:
        """Returns the positions of all elements of the windows in the merged indexed axes.

        Args:
            indexed: the indexed axes of the array.
            windows: those that have an axis in the result, after the axes of the indices.
            batches: the batch axis of the indices for an axis of the array.
        """
        strides: dict[int, Any] = {}
        stride: Any = 1
        for axis in reversed(indexed):
            strides[axis] = stride
            stride = stride * self._array[axis]
        if isinstance(stride, int) and stride > _MOST:
            raise NotDecomposedError(f"of more than {_MOST} elements")
        rank = len(self.shape)
        total = self._counted([strides.get(axis, 0) for axis in self.components])
        total = lax.expand_dims(total, range(rank, rank + len(windows)))
        lines = {**batches, **{axis: rank + index for index, axis in enumerate(windows)}}
        offset: Any = 0
        for axis, result_axis in lines.items():
            size = self._widths[axis] if axis in windows else self.shape[result_axis]
            line = [size if each == result_axis else 1 for each in range(rank + len(windows))]
            numbers = (np if isinstance(size, int) else jnp).arange(size, dtype=np.int32)
            if not same_size(strides[axis], 1):
                numbers = numbers * _numbers([strides[axis]])
            offset = offset + numbers.reshape(line)
        return total + offset if lines else total

    def _counted(self, strides: Sequence[Any]) -> Any:
        """Returns the starts of windows in the merged indexed axes."""
        if not self.moving:
            return jnp.zeros(self.shape, np.int32)
        starts = self._clamped.astype(np.int32)
        if len(self.moving) > 1:
            return (starts * _numbers(strides)).sum(-1, dtype=np.int32)
        index = self.components.index(self.moving[0])
        if len(self.components) > 1:
            starts = kept.call("take", starts, np.int32(index), axis=starts.ndim - 1)
        return starts if same_size(strides[index], 1) else starts * _numbers([strides[index]])


def _between(x: Array, most: Array) -> Any:
    """Clamps integers between 0 and others."""
    return jnp.minimum(x if x.dtype.kind == "u" else jnp.maximum(x, 0), most)


def _numbers(sizes: Sequence[Any]) -> Any:
    """Returns sizes as an array; one size as a scalar."""
    if all(isinstance(size, int) for size in sizes):
        found = np.array(sizes, np.int32)
        return found[0] if len(sizes) == 1 else found
    if len(sizes) == 1:
        return jnp.asarray(sizes[0]).astype(np.int32)
    return kept.call("sizes", of=tuple(sizes))
