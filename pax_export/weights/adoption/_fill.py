"""Fills a module by a choice: leaves are read, converted and placed on devices one by one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from pax_export._foundations.errors import AdoptionError, UnsupportedDtypeError, a_few
from pax_export._foundations.jax import is_key
from pax_export._foundations.types import Array, DTypeLike, PyTree
from pax_export.core import next_rng_key
from pax_export.weights._metadata import is_inexact
from pax_export.weights._save_load import chosen_sharding, refuse_narrowing
from pax_export.weights.adoption._layers import Wanted
from pax_export.weights.adoption._pieces import (
    Piece,
    Recipe,
    apply_piece,
    axes_alone,
    leaf_region,
    pieces_key,
)
from pax_export.weights.sources import Source

#: The number of elements cast at a time.
_AT_ONCE = 1 << 20

Own = Array | jax.ShapeDtypeStruct


@dataclass(eq=False)
class Filler:
    """Builds modules from recipes; leaves that two recipes fill alike are read once."""

    net: PyTree
    leaves: Mapping[str, Own]
    source: Source
    wanted: Wanted
    shardings: Mapping[str, Sharding | None]
    dtype: DTypeLike | None  # of floating leaves
    read: dict[tuple, Any] = field(default_factory=dict)

    def fill(self, recipe: Recipe) -> Any:
        """The module with the leaves of a recipe, in the order of the module."""
        self._require_kinds(recipe)
        values = [self._leaf(path, own, recipe.get(path)) for path, own in self.leaves.items()]
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(self.net), values)

    def _dtype_of(self, own: Own) -> Any:
        floating = jax.numpy.issubdtype(own.dtype, np.floating)
        return np.dtype(self.dtype) if self.dtype is not None and floating else own.dtype

    def _require_kinds(self, recipe: Recipe) -> None:
        """Raises one error for all arrays that have another kind of dtype than their leaves."""
        found = [
            f"{piece.source} of {entry.dtype} for {path} of {dtype}"
            for path, pieces in recipe.items()
            for piece in pieces
            if _dtype_kind((entry := self.source.entries[piece.source]).dtype)
            != _dtype_kind(dtype := self._dtype_of(self.leaves[path]))
        ]
        if found:
            raise AdoptionError(
                "Arrays of the source are of another kind of numbers than their leaves.",
                where=self.source.where,
                got=a_few(found, 20),
                write="a module of these dtypes, or keep= for these leaves",
            )

    def _leaf(self, path: str, own: Own, pieces: tuple[Piece, ...] | None) -> Any:
        sharding = self.shardings.get(path)
        if path in self.wanted.counters or path in self.wanted.zeros:
            number = int(path in self.wanted.counters)  # statistics are there already
            return _placed(np.full(own.shape, number, own.dtype), own, sharding)
        key = (path, pieces and pieces_key(pieces))
        if key not in self.read:
            self.read[key] = (
                _keep_leaf(own, path, sharding)
                if pieces is None
                else self._read_leaf(path, own, pieces, sharding)
            )
        return self.read[key]

    def _read_leaf(
        self, path: str, own: Own, pieces: tuple[Piece, ...], sharding: Sharding | None
    ) -> Any:
        """The leaf as numpy or jax like `own`, with `sharding` or where `own` is."""
        shape, dtype, entries = own.shape, self._dtype_of(own), self.source.entries

        def read() -> np.ndarray:
            return assemble_leaf(path, shape, dtype, pieces, lambda name: entries[name].read())

        def read_part(index: tuple[slice, ...]) -> np.ndarray:
            wanted = [slice(*one.indices(size)[:2]) for one, size in zip(index, shape)]
            found = np.empty([one.stop - one.start for one in wanted], dtype)
            for piece in pieces:
                _read_part_of_piece(piece, self.source, shape, wanted, found, path)
            return found

        if isinstance(own, np.ndarray) and sharding is None:
            return read()
        refuse_narrowing(path, jax.ShapeDtypeStruct(shape, dtype))
        sharding = chosen_sharding(own) if sharding is None else sharding
        if sharding is None:  # the next is read when this one is let go of
            return jax.block_until_ready(jax.device_put(read()))
        in_parts = all(
            entries[piece.source].in_parts and axes_alone(piece, shape) is not None
            for piece in pieces
        )
        if in_parts and len(sharding.device_set) > 1 and not sharding.is_fully_replicated:
            return on_devices(shape, dtype, sharding, read_part)
        return on_devices(shape, dtype, sharding, read().__getitem__)


def _read_part_of_piece(
    piece: Piece, source: Source, shape: tuple[int, ...], wanted: Sequence[slice],
    found: np.ndarray, path: str,
) -> None:  # fmt: skip
    """Fills what a piece has of the wanted part; it only permutes the axes of its array."""
    order = axes_alone(piece, shape) or ()
    put = piece.put or (slice(None),) * len(shape)
    places = [slice(*one.indices(size)[:2]) for one, size in zip(put, shape)]
    both = [
        slice(max(one.start, other.start), min(one.stop, other.stop))
        for one, other in zip(wanted, places)
    ]
    if any(one.start >= one.stop for one in both):
        return
    inner = [slice(b.start - p.start, b.stop - p.start) for b, p in zip(both, places)]
    inner = inner[len(inner) - len(order) :]  # in front of these are the numbers of layers
    theirs = tuple([inner[axis] for axis in np.argsort(order)])
    read = source.entries[piece.source].read_part(theirs).transpose(order)
    into = tuple([slice(b.start - w.start, b.stop - w.start) for b, w in zip(both, wanted)])
    _fill_region(found[into], read.reshape(found[into].shape), path)


def assemble_leaf(
    path: str, shape: tuple[int, ...], dtype: DTypeLike, pieces: Sequence[Piece],
    read: Callable[[str], np.ndarray],
) -> np.ndarray:  # fmt: skip
    """Assembles a leaf from its pieces; `read` returns an array by name."""
    found = np.zeros(shape, dtype)
    if any(piece.adds for piece in pieces):  # a sum is rounded once, from a wide dtype
        arrays = {piece.source: read(piece.source) for piece in pieces}
        dtypes = [each.dtype for each in arrays.values()]
        small = [one.kind == "V" or (one.kind == "f" and one.itemsize < 4) for one in dtypes]
        wide = np.result_type(*[np.float32 if no else one for one, no in zip(dtypes, small)])
        total = np.zeros(shape, wide)
        for piece in pieces:
            part, region = apply_piece(arrays[piece.source], piece), leaf_region(total, piece)
            region[...] = region + part.astype(wide) if piece.adds else part
        _fill_region(found, total, path)
        return found
    for name, few in itertools.groupby(pieces, key=lambda piece: piece.source):
        array = read(name)
        for piece in few:
            _fill_region(leaf_region(found, piece), apply_piece(array, piece), path)
        del array  # before the next one is read
    return found


def _fill_region(into: np.ndarray, array: np.ndarray, path: str) -> None:
    """Converts values into a leaf a few at a time, so temporaries are small."""
    array = np.broadcast_to(array, into.shape)
    if array.dtype == into.dtype:
        into[...] = array
    elif array.size <= _AT_ONCE or not array.ndim:
        into[...] = _cast_array(array, into.dtype, path)
    elif len(array) == 1:
        _fill_region(into[0], array[0], path)
    else:
        step = max(1, _AT_ONCE * len(array) // array.size)
        for first in range(0, len(array), step):
            rows = slice(first, first + step)
            _fill_region(into[rows], array[rows], path)


def _cast_array(array: np.ndarray, dtype: DTypeLike, path: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    if not is_inexact(dtype) and not np.array_equal(cast, array):
        raise _unfit_error(path, dtype, "numbers that it has no room for")
    if is_inexact(dtype) and _count_finite(cast) != _count_finite(array):
        raise _unfit_error(path, dtype, "numbers that would be infinite")
    return cast


def _count_finite(array: np.ndarray) -> int:
    """Counts finite numbers; some small floats have no infinity."""
    native = array.dtype.kind in "fc"
    return int(np.count_nonzero(np.isfinite(array if native else array.astype(np.float32))))


def _dtype_kind(dtype: DTypeLike) -> str:
    for kind in (np.bool_, np.integer, np.floating, np.complexfloating):
        if jax.numpy.issubdtype(dtype, kind):
            return kind.__name__
    return str(dtype)


def _unfit_error(path: str, dtype: DTypeLike, got: str) -> AdoptionError:
    return AdoptionError(
        "An array of the source cannot be converted to the dtype of its leaf.",
        where=path,
        got=f"{got}, for a leaf of {dtype}",
        write="a module of that dtype, or keep= for this leaf",
    )


def _placed(value: Array, own: Own, sharding: Sharding | None) -> Any:
    if isinstance(own, np.ndarray):
        return value
    sharding = chosen_sharding(own) if sharding is None else sharding
    return jax.numpy.asarray(value) if sharding is None else jax.device_put(value, sharding)


def _keep_leaf(own: Own, path: str, sharding: Sharding | None) -> Any:
    """Returns a kept leaf; in an abstract module random keys are drawn, others raise."""
    if isinstance(own, jax.ShapeDtypeStruct):
        if not (is_key(own.dtype) or (own.dtype == np.uint32 and own.shape[-1:] == (2,))):
            raise AdoptionError(
                "A leaf in keep= has no value.",
                where=path,
                got="an abstract module, of jax.eval_shape",
                write="a module that was initialised, or a source that has this leaf",
            )
        key = next_rng_key()
        if is_key(own.dtype):
            key = jax.random.wrap_key_data(key)
            if key.dtype != own.dtype or own.shape:
                raise UnsupportedDtypeError(
                    "Keys of this kind are unsupported here.",
                    where=path, got=own.dtype, write="a module that was initialised",
                )  # fmt: skip
        own = key
    return own if sharding is None else jax.device_put(own, sharding)


#: Of smaller arrays all parts are made first: one call to jax is quicker than one a device.
_LARGE = 1 << 25


def on_devices(
    shape: tuple[int, ...], dtype: DTypeLike, sharding: Sharding, part: Callable[[Any], np.ndarray]
) -> jax.Array:
    """An array whose shards are made and placed one by one; `part` returns the shard at an index.

    `jax.make_array_from_callback` makes all shards of a process before it places the first.
    """
    if np.prod(shape) * np.dtype(dtype).itemsize < _LARGE:
        return jax.make_array_from_callback(shape, sharding, part)
    by_index: dict[Any, tuple[Any, list[Any]]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        index = index or ()
        key = tuple([(one.start, one.stop) for one in index])
        by_index.setdefault(key, (index, []))[1].append(device)
    shards: list[jax.Array] = []
    before: list[jax.Array] = []
    for index, devices in by_index.values():
        shard = part(index)
        for device in devices:
            there = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            shards.append(jax.device_put(shard, there))
        # At most one part is in transit while the next is read; earlier ones are freed.
        jax.block_until_ready(before)
        before = shards[-len(devices) :]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards, dtype=dtype)
