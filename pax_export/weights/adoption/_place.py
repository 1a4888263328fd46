"""Reads, converts and places leaves one by one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from pax_export._foundations.errors import AdoptionError, UnsupportedDtypeError, a_few
from pax_export._foundations.jax import is_key
from pax_export._foundations.types import Array, DTypeLike
from pax_export.weights._metadata import is_inexact
from pax_export.weights._save_load import chosen_sharding, refuse_narrowing
from pax_export.weights.adoption._array_transforms import (
    Piece,
    apply_piece,
    assemble_leaf,
    axes_alone,
    leaf_region,
)
from pax_export.weights.sources import Source

#: The number of elements cast at a time.
_AT_ONCE = 1 << 20


class LeafReader(NamedTuple):
    """A leaf of the module, and the pieces of arrays that fill it."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    pieces: tuple[Piece, ...]
    source: Source

    def put(self, own: Array | jax.ShapeDtypeStruct, sharding: Sharding | None) -> Any:
        """The leaf as numpy or jax like `own`, with `sharding` or where `own` is."""
        if isinstance(own, np.ndarray) and sharding is None:
            return self._read()
        refuse_narrowing(self.path, jax.ShapeDtypeStruct(self.shape, self.dtype))
        sharding = chosen_sharding(own) if sharding is None else sharding
        if sharding is None:  # the next is read when this one is let go of
            return jax.block_until_ready(jax.device_put(self._read()))
        in_parts = all(
            self.source.entries[piece.source].in_parts and axes_alone(piece, self.shape) is not None
            for piece in self.pieces
        )
        if in_parts and len(sharding.device_set) > 1 and not sharding.is_fully_replicated:
            return on_devices(self.shape, self.dtype, sharding, self._read_part)
        return on_devices(self.shape, self.dtype, sharding, self._read().__getitem__)

    def _read_part(self, index: tuple[slice, ...]) -> np.ndarray:
        wanted = [slice(*one.indices(size)[:2]) for one, size in zip(index, self.shape)]
        found = np.empty([one.stop - one.start for one in wanted], self.dtype)
        for piece in self.pieces:
            order = axes_alone(piece, self.shape) or ()
            put = piece.put or (slice(None),) * len(self.shape)
            places = [slice(*one.indices(size)[:2]) for one, size in zip(put, self.shape)]
            both = [
                slice(max(one.start, other.start), min(one.stop, other.stop))
                for one, other in zip(wanted, places)
            ]
            if any(one.start >= one.stop for one in both):
                continue
            inner = [slice(b.start - p.start, b.stop - p.start) for b, p in zip(both, places)]
            inner = inner[len(inner) - len(order) :]  # in front of these are the numbers of layers
            theirs = tuple([inner[axis] for axis in np.argsort(order)])
            read = self.source.entries[piece.source].read_part(theirs).transpose(order)
            into = tuple([slice(b.start - w.start, b.stop - w.start) for b, w in zip(both, wanted)])
            _fill_region(found[into], read.reshape(found[into].shape), self.path)
        return found

    def _read(self) -> np.ndarray:
        found = np.zeros(self.shape, self.dtype)
        if any(piece.adds for piece in self.pieces):
            _fill_region(found, self._sum_arrays(), self.path)
            return found
        for name, pieces in itertools.groupby(self.pieces, key=lambda piece: piece.source):
            array = self.source.entries[name].read()
            for piece in pieces:
                _fill_region(leaf_region(found, piece), apply_piece(array, piece), self.path)
            del array  # before the next one is read
        return found

    def _sum_arrays(self) -> np.ndarray:
        """The sum of the pieces in a wide dtype, to be rounded once."""
        arrays = {piece.source: self.source.entries[piece.source].read() for piece in self.pieces}
        dtypes = [each.dtype for each in arrays.values()]
        small = [one.kind == "V" or (one.kind == "f" and one.itemsize < 4) for one in dtypes]
        wide = np.result_type(*[np.float32 if no else one for one, no in zip(dtypes, small)])
        return assemble_leaf(self.shape, wide, self.pieces, arrays.__getitem__)


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


def require_kinds(wanted: Mapping[str, tuple[Any, tuple[Piece, ...]]], source: Source) -> None:
    """Raises one error for all arrays that have another kind of dtype than their leaves."""
    found = [
        f"{piece.source} of {source.entries[piece.source].dtype} for {path} of {dtype}"
        for path, (dtype, pieces) in wanted.items()
        for piece in pieces
        if _dtype_kind(source.entries[piece.source].dtype) != _dtype_kind(dtype)
    ]
    if found:
        raise AdoptionError(
            "Arrays of the source are of another kind of numbers than their leaves.",
            where=source.where,
            got=a_few(found, 20),
            write="a module of these dtypes, or keep= for these leaves",
        )


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


def constant_leaf(own: Array | jax.ShapeDtypeStruct, sharding: Sharding | None, number: int) -> Any:
    """Returns a leaf filled with one number: a counter for existing statistics, or a zero bias."""
    if isinstance(own, np.ndarray):
        return np.full_like(own, number)
    sharding = chosen_sharding(own) if sharding is None else sharding
    value = np.full(own.shape, number, own.dtype)
    return jax.numpy.asarray(value) if sharding is None else jax.device_put(value, sharding)


def keep_leaf(
    own: Array | jax.ShapeDtypeStruct,
    path: str,
    sharding: Sharding | None,
    draw: Callable[..., Any],
) -> Any:
    """Returns a kept leaf; in an abstract module random keys are drawn, others raise."""
    if isinstance(own, jax.ShapeDtypeStruct):
        if not (is_key(own.dtype) or (own.dtype == np.uint32 and own.shape[-1:] == (2,))):
            raise AdoptionError(
                "A leaf in keep= has no value.",
                where=path,
                got="an abstract module, of jax.eval_shape",
                write="a module that was initialised, or a source that has this leaf",
            )
        key = draw()
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
