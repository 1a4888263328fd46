"""Datasets of an HDF5 file, memory-mapped if contiguous."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator

import numpy as np

from pax_export.weights._binary_file import BinaryFile
from pax_export.weights.sources._hdf5_objects import UNDEFINED, Hdf5, Object
from pax_export.weights.sources._source import Entry, damaged

_COMPACT, _CONTIGUOUS, _CHUNKED = 0, 1, 2
_DEFLATE, _SHUFFLE, _FLETCHER = 1, 2, 3
_MOST_UNPACKED, _MOST_TIMES = 1 << 28, 100
_MOST_CHUNKS = 1_000_000


def dtype_of(dataset: Object) -> np.dtype | None:
    """What a dataset holds, if numbers; HDF5 has no bfloat16, which Keras notes beside."""
    if dataset.dtype is None and dataset.itemsize == 2:
        return np.dtype("bfloat16") if dataset.attributes.get("dtype") == "bfloat16" else None
    return dataset.dtype


def tied(datasets: dict[str, Object]) -> dict[str, str]:
    """The names of datasets that are one, which has two links."""
    first: dict[int, str] = {}
    return {
        name: first[each.address]
        for name, each in datasets.items()
        if first.setdefault(each.address, name) != name
    }


def entry(
    where: str, kind: str, dataset: Object, hdf5: Hdf5, file: BinaryFile, begin: int, note: str
) -> Entry:
    """The array of a dataset; `begin` is where the HDF5 file begins in the file."""
    dtype, shape, layout = dtype_of(dataset), dataset.shape, dataset.layout
    assert dtype is not None and shape is not None and layout is not None
    native = dtype if dtype.isnative else dtype.newbyteorder("=")
    count = math.prod(shape) * dtype.itemsize
    if layout[0] not in (3, 4):
        raise ValueError(f"a dataset of version {layout[0]}")
    if layout[1] == _CONTIGUOUS and not dataset.filters:
        address, size = struct.unpack_from("<QQ", layout, 2)
        if count and (address == UNDEFINED or size != count):
            raise ValueError(f"{size} bytes of {dtype}{list(shape)}, or none that were written")
        offset = begin + address if count else 0
        return Entry.stored(file, where, kind, shape, dtype, offset, note)
    if layout[1] == _COMPACT:
        (size,) = struct.unpack_from("<H", layout, 2)
        content = layout[4 : 4 + size]
        if len(content) != count:
            raise ValueError(f"{len(content)} bytes of {dtype}{list(shape)}")
        whole = np.frombuffer(content, dtype).reshape(shape).astype(native)
        return Entry(where, kind, shape, native, lambda: whole, note=note)
    if layout[:2] != bytes((3, _CHUNKED)):
        raise ValueError(f"a dataset that is laid out in the way {layout[0]}.{layout[1]}")
    chunks = list(_chunks(hdf5, dataset, layout))
    stored = sum(size for _, size, _, _ in chunks)
    if count > max(_MOST_UNPACKED, _MOST_TIMES * stored):
        raise damaged(where, kind, f"{count} bytes of {dtype}{list(shape)} in {stored}")
    edges = struct.unpack_from(f"<{len(shape)}I", layout, 11)
    _require_all(chunks, shape, edges)
    return Entry(
        where, kind, shape, native,
        lambda: _join_chunks(hdf5, dataset, dtype, edges, chunks).astype(native, copy=False),
        note=note,
    )  # fmt: skip


#: Where a chunk begins in the array, its bytes, what was left out, and where it lies.
Chunk = tuple[tuple[int, ...], int, int, int]


def _chunks(hdf5: Hdf5, dataset: Object, layout: bytes) -> Iterator[Chunk]:
    assert dataset.shape is not None
    rank = len(dataset.shape)
    if layout[2] != rank + 1:
        raise ValueError(f"chunks of {layout[2] - 1} dimensions in an array of {rank}")
    (tree,) = struct.unpack_from("<Q", layout, 3)
    if tree == UNDEFINED:
        return
    for number, (key, place) in enumerate(hdf5.leaves(tree, 1, 8 + 8 * (rank + 1))):
        if number > _MOST_CHUNKS:
            raise ValueError("chunks without end")
        size, mask, *begin = struct.unpack(f"<II{rank + 1}Q", key)
        yield tuple(begin[:rank]), size, mask, place


def _require_all(chunks: list[Chunk], shape: tuple[int, ...], edges: tuple[int, ...]) -> None:
    """Refuses an array with a part that was never written or was written twice."""
    if 0 in edges:
        raise ValueError("chunks of nothing")
    wanted = math.prod(-(-size // edge) for size, edge in zip(shape, edges))
    begins = {begin for begin, *_ in chunks}
    inside = all(
        at % edge == 0 and at < size
        for begin in begins
        for at, edge, size in zip(begin, edges, shape)
    )
    if not inside or len(begins) != len(chunks) or len(chunks) != wanted:
        raise ValueError(f"{len(chunks)} chunks of {wanted}")


def _join_chunks(
    hdf5: Hdf5, dataset: Object, dtype: np.dtype, edges: tuple[int, ...], chunks: list[Chunk]
) -> np.ndarray:
    assert dataset.shape is not None
    array = np.empty(dataset.shape, dtype)
    count = math.prod(edges) * dtype.itemsize
    if count > max(_MOST_UNPACKED, 2 * array.nbytes):
        raise ValueError(f"chunks of {count} bytes")
    for begin, size, mask, place in chunks:
        content = hdf5.read(place, size)
        for at, (code, values) in reversed(list(enumerate(dataset.filters))):
            if not mask >> at & 1:
                content = _unpacked(content, code, values, count)
        if len(content) != count:
            raise ValueError(f"a chunk of {len(content)} bytes, not {count}")
        chunk = np.frombuffer(content, dtype).reshape(edges)
        part = tuple(
            slice(at, min(at + edge, end)) for at, edge, end in zip(begin, edges, array.shape)
        )
        array[part] = chunk[tuple(slice(0, each.stop - each.start) for each in part)]
    return array


def _unpacked(content: bytes, code: int, values: list[int], count: int) -> bytes:
    if code == _DEFLATE:
        return zlib.decompressobj().decompress(content, count + 4)
    if code == _SHUFFLE and values and values[0] > 0 and len(content) % values[0] == 0:
        return np.frombuffer(content, np.uint8).reshape(values[0], -1).T.tobytes()
    if code == _FLETCHER:
        return content[:-4]
    raise ValueError(f"the packing {code}, which is not read")
