"""Datasets of an HDF5 file, memory-mapped if contiguous."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pax_export._errors import WeightsFileError
from pax_export.weights._binary_file import BinaryFile
from pax_export.weights.sources._source import Entry, check_shape

_COMPACT, _CONTIGUOUS, _CHUNKED = 0, 1, 2
_DEFLATE, _SHUFFLE, _FLETCHER = 1, 2, 3
_MOST_UNPACKED, _MOST_TIMES = 1 << 28, 100


def make_entry(where: str, kind: str, dataset: Object, hdf5: Hdf5, note: str) -> Entry:
    dtype, shape, layout = dataset.dtype, dataset.shape, dataset.layout
    assert dtype is not None and shape is not None and layout is not None
    native = dtype.newbyteorder("=")
    count = math.prod(shape) * dtype.itemsize
    if layout[0] not in (3, 4):
        raise ValueError(f"a dataset of version {layout[0]}")
    if layout[1] == _CONTIGUOUS and not dataset.filters:
        address, size = struct.unpack_from("<QQ", layout, 2)
        if count and (address == UNDEFINED or size != count):
            raise ValueError(f"{size} bytes of {dtype}{list(shape)}, or none that were written")
        offset = hdf5.begin + address if count else 0
        return Entry.stored(hdf5.file, where, kind, shape, dtype, offset, note)
    if layout[1] == _COMPACT:
        (size,) = struct.unpack_from("<H", layout, 2)
        whole = np.frombuffer(layout[4 : 4 + size], dtype).reshape(shape).astype(native)
        return Entry(where, kind, shape, native, lambda: whole, note=note)
    if layout[:2] != bytes((3, _CHUNKED)):
        raise ValueError(f"a dataset that is laid out in the way {layout[0]}.{layout[1]}")
    chunks = list(_find_chunks(hdf5, layout, len(shape)))
    stored = sum(size for _, size, _, _ in chunks)
    if count > max(_MOST_UNPACKED, _MOST_TIMES * stored):
        raise ValueError(f"{count} bytes of {dtype}{list(shape)} in {stored}")
    edges = struct.unpack_from(f"<{len(shape)}I", layout, 11)
    _require_all(chunks, shape, edges)
    return Entry(
        where, kind, shape, native,
        lambda: _join_chunks(hdf5, dataset, edges, chunks).astype(native, copy=False),
        note=note,
    )  # fmt: skip


#: A chunk's start in the array, its size in bytes, its filter mask, its address.
Chunk = tuple[tuple[int, ...], int, int, int]


def _find_chunks(hdf5: Hdf5, layout: bytes, rank: int) -> Iterator[Chunk]:
    if layout[2] != rank + 1:
        raise ValueError(f"chunks of {layout[2] - 1} dimensions in an array of {rank}")
    (tree,) = struct.unpack_from("<Q", layout, 3)
    if tree == UNDEFINED:
        return
    for key, place in hdf5.leaves(tree, 1, 8 + 8 * (rank + 1)):
        size, mask, *begin = struct.unpack(f"<II{rank + 1}Q", key)
        yield tuple(begin[:rank]), size, mask, place


def _require_all(chunks: list[Chunk], shape: tuple[int, ...], edges: tuple[int, ...]) -> None:
    """Refuses an array with a part that was never written or was written twice."""
    if 0 in edges:
        raise ValueError("empty chunks")
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
    hdf5: Hdf5, dataset: Object, edges: tuple[int, ...], chunks: list[Chunk]
) -> np.ndarray:
    assert dataset.shape is not None
    array = np.empty(dataset.shape, dataset.dtype)
    count = math.prod(edges) * array.itemsize
    if count > max(_MOST_UNPACKED, 2 * array.nbytes):
        raise ValueError(f"chunks of {count} bytes")
    for begin, size, mask, place in chunks:
        content = hdf5.read(place, size)
        for at, (code, values) in reversed(list(enumerate(dataset.filters))):
            if not mask >> at & 1:
                content = _unpack_chunk(content, code, values, count)
        if len(content) != count:
            raise ValueError(f"a chunk of {len(content)} bytes, not {count}")
        chunk = np.frombuffer(content, array.dtype).reshape(edges)
        part = tuple(
            slice(at, min(at + edge, end)) for at, edge, end in zip(begin, edges, array.shape)
        )
        array[part] = chunk[tuple(slice(0, each.stop - each.start) for each in part)]
    return array


def _unpack_chunk(content: bytes, code: int, values: list[int], count: int) -> bytes:
    if code == _DEFLATE:
        return zlib.decompressobj().decompress(content, count + 4)
    if code == _SHUFFLE and values and values[0] > 0 and len(content) % values[0] == 0:
        return np.frombuffer(content, np.uint8).reshape(values[0], -1).T.tobytes()
    if code == _FLETCHER:
        return content[:-4]
    raise ValueError(f"the packing {code}, which is not read")


MAGIC = b"\x89HDF\r\n\x1a\n"
UNDEFINED = (1 << 64) - 1
_DATASPACE, _LINK_INFO, _DATATYPE, _LINK, _EXTERNAL, _LAYOUT = 1, 2, 3, 6, 7, 8
_FILTERS, _ATTRIBUTE, _CONTINUED, _SYMBOLS = 11, 12, 16, 17
_SHARED = 2
_MOST_MESSAGES, _MOST_OBJECTS, _DEEPEST = 65_536, 200_000, 64
_LARGEST_HEAP = 1 << 26
_FIXED, _FLOAT, _TEXT, _ENUM, _VARIABLE = 0, 1, 3, 8, 9


@dataclass
class Object:
    """A group or a dataset; a dataset has a shape and a layout."""

    address: int
    attributes: dict[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] | None = None
    dtype: np.dtype | None = None
    itemsize: int = 0
    layout: bytes | None = None
    filters: list[tuple[int, list[int]]] = field(default_factory=list)
    symbols: tuple[int, int] | None = None
    links: dict[str, int] = field(default_factory=dict)


class Hdf5:
    """The objects by path of an HDF5 file, which begins somewhere in another file."""

    def __init__(self, file: BinaryFile, begin: int, size: int):
        self.file, self.begin, self._size = file, begin, size
        self._read_objects = 0
        #: The groups, and the datasets in the order in which they were made.
        self.groups: dict[str, Object] = {}
        self.datasets: dict[str, Object] = {}
        self._walk(self._root())

    def read(self, address: int, count: int) -> bytes:
        if address + count > self._size:
            raise ValueError(f"bytes {address} to {address + count} of {self._size}")
        return self.file.read(self.begin + address, count)

    def _root(self) -> int:
        version = self.read(8, 1)[0]
        if version in (0, 1):
            more = 4 * version
            sizes, base = self.read(13, 2), self.read(24 + more, 8)
            root = self.read(64 + more, 8)
        elif version in (2, 3):
            sizes, base, root = self.read(9, 2), self.read(12, 8), self.read(36, 8)
        else:
            raise ValueError(f"version {version} of the format")
        if sizes != b"\x08\x08" or any(base):
            raise ValueError("an HDF5 file behind other bytes, or of another word size")
        return int.from_bytes(root, "little")

    def _walk(self, root: int) -> None:
        found: list[tuple[int, str, Object]] = []
        seen = {root}
        waiting = [("", root, 0)]
        while waiting:
            path, address, depth = waiting.pop()
            self._read_objects += 1
            if depth > _DEEPEST or self._read_objects > _MOST_OBJECTS:
                raise ValueError("groups in groups without end")
            this = self._object(address)
            if this.layout is not None:
                found.append((address, path, this))
                continue
            self.groups[path] = this
            links = dict(this.links) | dict(self._symbols(this.symbols))
            for name, below in links.items():
                if below not in seen or _LAYOUT in [kind for kind, *_ in self._messages(below)]:
                    seen.add(below)
                    waiting.append((f"{path}/{name}" if path else name, below, depth + 1))
        for _, path, this in sorted(found, key=lambda each: each[:2]):
            self.datasets[path] = this

    def _object(self, address: int) -> Object:
        this = Object(address)
        for kind, flags, content in self._messages(address):
            if flags & _SHARED and kind in (_DATASPACE, _DATATYPE, _FILTERS, _ATTRIBUTE):
                raise ValueError("a header that leads to another one")
            if kind == _DATASPACE:
                this.shape = _read_shape(content)
            elif kind == _DATATYPE:
                this.dtype, this.itemsize = _read_dtype(content), _read_itemsize(content)
            elif kind == _LAYOUT:
                this.layout = content
            elif kind == _FILTERS:
                this.filters = list(_read_filters(content))
            elif kind == _SYMBOLS:
                this.symbols = struct.unpack_from("<QQ", content)
            elif kind == _LINK:
                name, target = _read_link(content)
                this.links[name] = target
            elif kind == _LINK_INFO:
                self._require_no_heap(content)
            elif kind == _EXTERNAL:
                raise ValueError("an array in another file")
            elif kind == _ATTRIBUTE:
                self._attribute(content, this.attributes)
        if (this.itemsize, this.attributes.get("dtype")) == (2, "bfloat16"):  # of Keras
            this.dtype = this.dtype or np.dtype("bfloat16")
        return this

    def _messages(self, address: int) -> Iterator[tuple[int, int, bytes]]:
        """Yields the messages of an object header: kind, flags, content."""
        left = _MOST_MESSAGES
        newer = self.read(address, 4) == b"OHDR"
        order = 0
        if newer:
            flags = self.read(address + 5, 1)[0]
            at = address + 6 + (16 if flags & 32 else 0) + (4 if flags & 16 else 0)
            width, order = 1 << (flags & 3), 2 if flags & 4 else 0
            blocks = [(at + width, int.from_bytes(self.read(at, width), "little"))]
        else:
            version, size = struct.unpack("<B7xI", self.read(address, 12))
            if version != 1:
                raise ValueError(f"a header of version {version}")
            blocks = [(address + 16, size)]
        seen = set()
        while blocks:
            begin, size = blocks.pop(0)
            if begin in seen:
                raise ValueError("a header that continues in itself")
            seen.add(begin)
            block = self.read(begin, size)
            at, head = 0, 4 + order if newer else 8
            while at + head <= size:
                left -= 1
                if left < 0:
                    raise ValueError("a header without end")
                kind, length, flags = struct.unpack_from("<BHB" if newer else "<HHB", block, at)
                if at + head + length > size:
                    raise ValueError("a header that is longer than its place")
                content = block[at + head : at + head + length]
                at += head + length
                if kind == _CONTINUED:
                    place, length = struct.unpack_from("<QQ", content)
                    blocks.append((place + 4, length - 8) if newer else (place, length))
                elif kind:
                    yield kind, flags, content

    def _require_no_heap(self, content: bytes) -> None:
        """Refuses a group of many links in the newer form, which neither Keras nor h5py writes."""
        (heap,) = struct.unpack_from("<Q", content, 10 if content[1] & 1 else 2)
        if heap != UNDEFINED:
            raise WeightsFileError(
                "A group of the HDF5 file has an unsupported storage format.",
                where=self.file.where,
                got="the newest form of HDF5, for groups of more than eight members",
                write='h5py.File(path, "w", libver="earliest"), as Keras does',
            )

    def _symbols(self, table: tuple[int, int] | None) -> Iterator[tuple[str, int]]:
        """The links of a group of the older kind: a tree of nodes, and a heap of names."""
        if table is None:
            return
        tree, heap = table
        if self.read(heap, 4) != b"HEAP":
            raise ValueError("a group without its names")
        size, place = struct.unpack("<Q8xQ", self.read(heap + 8, 24))
        if size > _LARGEST_HEAP:
            raise ValueError(f"names of {size} bytes in a group")
        names = self.read(place, size)
        for node in self.leaves(tree, 0, 8):
            if self.read(node[1], 4) != b"SNOD":
                raise ValueError("a group without its links")
            (count,) = struct.unpack("<H", self.read(node[1] + 6, 2))
            entries = self.read(node[1] + 8, 40 * count)
            for at in range(0, 40 * count, 40):
                name, target, kind = struct.unpack_from("<QQI", entries, at)
                if kind == 2:
                    raise ValueError("a link to another place or file")
                yield names[name : names.index(b"\0", name)].decode(), target

    def leaves(self, tree: int, kind: int, key: int) -> Iterator[tuple[bytes, int]]:
        """The keys and addresses of the leaves of a tree; `key` is the size of a key in bytes."""
        waiting, seen, left = [(tree, 256)], set(), self._size
        while waiting:
            node, above = waiting.pop()
            head = self.read(node, 24)
            count = struct.unpack_from("<H", head, 6)[0]
            if head[:4] != b"TREE" or head[4] != kind or head[5] >= above or node in seen:
                raise ValueError("a tree that is none")
            seen.add(node)
            left -= count * (key + 8)
            if left < 0:
                raise ValueError("nodes of a tree that overlap")
            entries = self.read(node + 24, count * (key + 8))
            below = [
                (entries[at : at + key], *struct.unpack_from("<Q", entries, at + key))
                for at in range(0, count * (key + 8), key + 8)
            ]
            if head[5]:
                waiting += [(place, head[5]) for _, place in reversed(below)]
            else:
                yield from below

    def _attribute(self, content: bytes, attributes: dict[str, Any]) -> None:
        """Takes over an attribute that is a text, or a list of texts."""
        version = content[0]
        sizes = struct.unpack_from("<HHH", content, 2)
        at = 9 if version == 3 else 8
        parts = []
        for size in sizes:
            parts.append(content[at : at + size])
            at += -(-size // 8) * 8 if version == 1 else size
        name = parts[0].rstrip(b"\0").decode("utf-8", "replace")
        shape, kind = _read_shape(parts[2]), parts[1][0] & 15
        if shape is None or len(shape) > 1 or kind not in (_TEXT, _VARIABLE):
            return
        count, size = (shape[0] if shape else 1), _read_itemsize(parts[1])
        if size <= 0 or at + count * size > len(content):
            raise ValueError(f"the attribute {name!r:.100} is longer than its place")
        raws = (content[at + number * size : at + (number + 1) * size] for number in range(count))
        texts = [self._text(raw) if kind == _VARIABLE else raw for raw in raws]
        texts = [text.rstrip(b"\0").decode("utf-8", "replace") for text in texts]
        attributes[name] = texts if shape else texts[0]

    def _text(self, reference: bytes) -> bytes:
        """Reads a string from a heap: its length, the address of the heap, its index there."""
        length, heap, number = struct.unpack_from("<IQI", reference)
        if not length:
            return b""
        head = self.read(heap, 16)
        size = int.from_bytes(head[8:], "little")
        if head[:4] != b"GCOL":
            raise ValueError("an invalid reference to a string")
        at = heap + 16
        while at + 16 <= heap + size:
            own, length_here = struct.unpack("<H6xQ", self.read(at, 16))
            if own == number:
                return self.read(at + 16, min(length, length_here))
            if own == 0:
                break
            at += 16 + -(-length_here // 8) * 8
        raise ValueError("an invalid reference to a string")


def _read_shape(content: bytes) -> tuple[int, ...] | None:
    version, rank = content[0], content[1]
    if version == 2 and content[3] == 2:
        return None  # an empty dataspace
    return check_shape(struct.unpack_from(f"<{rank}Q", content, 8 if version == 1 else 4))


def _read_itemsize(content: bytes) -> int:
    return int.from_bytes(content[4:8], "little")


def _read_dtype(content: bytes) -> np.dtype | None:
    """Returns the numpy dtype of a numeric datatype message, else None."""
    kind, bits, size = content[0] & 15, content[1], _read_itemsize(content)
    order = ">" if bits & 1 else "<"
    if kind == _FIXED and size in (1, 2, 4, 8):
        offset, precision = struct.unpack_from("<HH", content, 8)
        if (offset, precision) == (0, 8 * size):
            return np.dtype(f"{order}{'i' if bits & 8 else 'u'}{size}")
    if kind == _FLOAT:
        known = _FLOATS.get(content[8:20])
        return known.newbyteorder(order) if known is not None else None
    if kind == _ENUM and content[8:9] and content[8] & 15 == _FIXED and size == 1:
        return np.dtype(bool) if b"FALSE" in content and b"TRUE" in content else None
    return None


#: Floats by the bits of their parts: offset, size, exponent, mantissa, bias.
_FLOATS = {
    struct.pack("<HHBBBBI", 0, 8 * size, last, exponent, 0, last, bias): np.dtype(f"f{size}")
    for size, exponent, last, bias in ((2, 5, 10, 15), (4, 8, 23, 127), (8, 11, 52, 1023))
}


def _read_filters(content: bytes) -> Iterator[tuple[int, list[int]]]:
    version, count = content[0], content[1]
    at = 8 if version == 1 else 2
    for _ in range(count):
        (code,) = struct.unpack_from("<H", content, at)
        named = version == 1 or code >= 256
        at += 2
        length = struct.unpack_from("<H", content, at)[0] if named else 0
        at += 2 if named else 0
        _, values = struct.unpack_from("<HH", content, at)
        at += 4 + (-(-length // 8) * 8 if version == 1 else length)
        yield code, list(struct.unpack_from(f"<{values}I", content, at))
        at += 4 * (values + (values & 1 if version == 1 else 0))


def _read_link(content: bytes) -> tuple[str, int]:
    flags, at = content[1], 2
    if flags & 8:
        if content[at]:
            raise ValueError("a link to another place or file")
        at += 1
    at += (8 if flags & 4 else 0) + (1 if flags & 16 else 0)
    width = 1 << (flags & 3)
    length = int.from_bytes(content[at : at + width], "little")
    at += width
    name = content[at : at + length].decode()
    return name, *struct.unpack_from("<Q", content, at + length)
