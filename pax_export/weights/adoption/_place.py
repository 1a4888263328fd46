"""Leaves read, turned and put where they belong, one after the other."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from pax_export._errors import AdoptionError, UnsupportedDtypeError
from pax_export.weights._dtypes import is_key
from pax_export.weights._save_load import chosen_sharding, refuse_narrowing
from pax_export.weights.adoption._moves import Piece, assembled, axes_alone
from pax_export.weights.sources import Source


def placed(
    own: Any, pieces: tuple[Piece, ...], source: Source, path: str, dtype: Any, sharding: Any
) -> Any:
    """A leaf from its pieces: numpy's for numpy's, otherwise jax's, at its place.

    Args:
        own: the leaf of the module, or its shape and dtype.
        pieces: what fills it.
        source: the open source.
        path: of the leaf.
        dtype: of the new leaf.
        sharding: where it goes, if it is said; otherwise where `own` lies.
    """
    _require_kind(dtype, pieces, source, path)
    if isinstance(own, np.ndarray) and sharding is None:
        return _read(own.shape, pieces, source, path, dtype)
    refuse_narrowing(path, jax.ShapeDtypeStruct(own.shape, dtype))
    sharding = chosen_sharding(own) if sharding is None else sharding
    if sharding is None:
        return jax.numpy.asarray(_read(own.shape, pieces, source, path, dtype))
    if len(sharding.device_set) == 1 or sharding.is_fully_replicated:
        whole = _read(own.shape, pieces, source, path, dtype)
        return jax.make_array_from_callback(own.shape, sharding, lambda index: whole[index])
    orders = [axes_alone(piece, own.shape) for piece in pieces]
    if None in orders:
        whole = _read(own.shape, pieces, source, path, dtype)
        return jax.make_array_from_callback(own.shape, sharding, lambda index: whole[index])
    # Each device is given its part only; the whole is never in memory at once.
    return jax.make_array_from_callback(
        own.shape, sharding,
        lambda index: _part(own.shape, index, list(zip(pieces, orders)), source, dtype, path),
    )  # fmt: skip


def _part(
    shape: tuple[int, ...],
    index: Any,
    pieces: list[tuple[Piece, Any]],
    source: Source,
    dtype: Any,
    path: str,
) -> np.ndarray:
    """A part of a leaf, of the pieces that lie in it; no more of each is read than that."""
    wanted = [slice(*one.indices(size)[:2]) for one, size in zip(index, shape)]
    found = np.empty([one.stop - one.start for one in wanted], dtype)
    for piece, order in pieces:
        put = piece.put or (slice(None),) * len(shape)
        places = [slice(*one.indices(size)[:2]) for one, size in zip(put, shape)]
        both = [
            slice(max(one.start, other.start), min(one.stop, other.stop))
            for one, other in zip(wanted, places)
        ]
        if any(one.start >= one.stop for one in both):
            continue
        inner = [slice(b.start - p.start, b.stop - p.start) for b, p in zip(both, places)]
        inner = inner[len(shape) - len(order) :]  # in front of these are the numbers of layers
        theirs = tuple([inner[axis] for axis in np.argsort(order)])
        read = source.entries[piece.source].read_part(theirs).transpose(order)
        into = tuple([slice(b.start - w.start, b.stop - w.start) for b, w in zip(both, wanted)])
        found[into] = _cast(read, dtype, path).reshape(found[into].shape)
    return found


def _read(
    shape: tuple[int, ...], pieces: tuple[Piece, ...], source: Source, path: str, dtype: Any
) -> np.ndarray:
    kept: dict[str, np.ndarray] = {}

    def read(name: str) -> np.ndarray:
        if name not in kept:
            kept[name] = source.entries[name].read()
        return kept[name]

    wide = np.result_type(*[np.float32 if _is_small(entry.dtype) else entry.dtype for entry in (
        source.entries[piece.source] for piece in pieces)])  # fmt: skip
    if len(pieces) == 1:
        wide = source.entries[pieces[0].source].dtype
    return np.ascontiguousarray(_cast(assembled(shape, wide, pieces, read), dtype, path))


def _is_small(dtype: np.dtype) -> bool:
    return dtype.kind == "V" or (dtype.kind == "f" and dtype.itemsize < 4)


def _cast(array: np.ndarray, dtype: Any, path: str) -> np.ndarray:
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    if not _is_float(dtype) and not np.array_equal(cast, array):
        raise _unfit(path, array.dtype, dtype, "numbers that it has no room for")
    if _is_float(dtype) and np.isinf(cast.astype(np.float32)).sum() != np.isinf(array).sum():
        raise _unfit(path, array.dtype, dtype, "numbers that would be infinite")
    return cast


def _is_float(dtype: Any) -> bool:
    return jax.numpy.issubdtype(dtype, np.inexact)


def _require_kind(dtype: Any, pieces: tuple[Piece, ...], source: Source, path: str) -> None:
    for piece in pieces:
        theirs = source.entries[piece.source].dtype
        if _kind(theirs) != _kind(dtype):
            raise _unfit(path, theirs, dtype, f"an array of {theirs}, {piece.source}")


def _kind(dtype: Any) -> str:
    for kind in (np.bool_, np.integer, np.floating, np.complexfloating):
        if jax.numpy.issubdtype(dtype, kind):
            return kind.__name__
    return str(dtype)


def _unfit(path: str, theirs: Any, dtype: Any, got: str) -> AdoptionError:
    return AdoptionError(
        "An array of the source does not become one of the leaf's dtype.",
        where=path,
        got=f"{got}, for a leaf of {dtype}",
        write="a module of that dtype, or keep= for this leaf",
    )


def ones(own: Any, sharding: Any) -> Any:
    """A counter that says that statistics are there."""
    if isinstance(own, np.ndarray):
        return np.ones_like(own)
    sharding = chosen_sharding(own) if sharding is None else sharding
    value = np.ones(own.shape, own.dtype)
    return jax.numpy.asarray(value) if sharding is None else jax.device_put(value, sharding)


def own_value(own: Any, path: str, sharding: Any, draw: Any) -> Any:
    """A leaf that stays; of an abstract module there is none, but random keys can be drawn."""
    if isinstance(own, jax.ShapeDtypeStruct):
        if not (is_key(own.dtype) or (own.dtype == np.uint32 and own.shape[-1:] == (2,))):
            raise AdoptionError(
                "A leaf is to stay as it is, and has no value.",
                where=path,
                got="an abstract module, of jax.eval_shape",
                write="a module that was initialised, or a source that has this leaf",
            )
        key = draw()
        if is_key(own.dtype):
            key = jax.random.wrap_key_data(key)
            if key.dtype != own.dtype or own.shape:
                raise UnsupportedDtypeError(
                    "Keys of this kind cannot be drawn here.",
                    where=path, got=own.dtype, write="a module that was initialised",
                )  # fmt: skip
        own = key
    if sharding is not None:
        return jax.device_put(own, sharding)
    return own
