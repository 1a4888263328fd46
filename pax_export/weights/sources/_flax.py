"""Flax msgpack files: nested dicts with arrays as extension types, which are memory-mapped."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pax_export.weights._metadata import NUMPY_NAMES
from pax_export.weights.sources._mapping import flatten_containers
from pax_export.weights.sources._source import (
    Entry,
    InputFile,
    Source,
    check_shape,
    unsupported_dtype_error,
)

KIND = "msgpack file of flax"
HAS_SIGNATURE = False
_ARRAY, _COMPLEX, _NUMBER = 1, 2, 3
_CHUNKED = "__msgpack_chunked_array__"
_DTYPES = {*NUMPY_NAMES.values(), "complex128", "int4", "uint4", "float8_e4m3", "float8_e3m4"}
_DEEPEST, _MOST_CONTAINERS = 200, 1_000_000
_NUMBERS = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q",
            0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}  # fmt: skip
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_SIZES = {1: ">B", 2: ">H", 4: ">I"}


def matches(file: InputFile) -> bool:
    """Returns whether a file begins with a dict whose first key is a string."""
    begin = file.begin(6)
    if not begin:
        return False
    after = {0xDE: 3, 0xDF: 5}.get(begin[0], 1 if 0x81 <= begin[0] <= 0x8F else 9)
    key = begin[after : after + 1]
    return bool(key) and (0xA1 <= key[0] <= 0xBF or key[0] in (0xD9, 0xDA))


@dataclass(frozen=True)
class _ArrayChunk:
    """An array of the file, or a chunk of a large one: its dtype, shape and offset."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Pieces:
    """An array stored in one-dimensional chunks."""

    shape: tuple[int, ...]
    parts: tuple[_ArrayChunk, ...]


def read(file: InputFile) -> Source:
    reader = _MsgpackReader(file)
    tree = reader.value(0)
    if reader.stream.tell() != file.size:
        raise ValueError(f"{file.size - reader.stream.tell()} bytes after the last value")
    leaves, others = flatten_containers(
        _join_chunks(tree), lambda each: isinstance(each, (_ArrayChunk, _Pieces))
    )
    entries = {name: _make_entry(file, name, leaf) for name, leaf in leaves.items()}
    return Source("flax", file.where, entries, metadata=others, origin="flax")


class _MsgpackReader:
    """Reads values one after the other."""

    def __init__(self, file: InputFile):
        self.stream, self._file = file.stream(), file
        self._containers = 0

    def value(self, depth: int) -> Any:
        """Reads the next value; an array as its place in the file."""
        if depth > _DEEPEST:
            raise ValueError("containers in containers without end")
        code = self._number(">B")
        if code < 0x80 or code >= 0xE0:
            return code if code < 0x80 else code - 256
        if code in _CONSTANTS:
            return _CONSTANTS[code]
        if code in _NUMBERS:
            return self._number(_NUMBERS[code])
        if code < 0x90 or code in (0xDE, 0xDF):
            return self._dict(code & 15 if code < 0x90 else self._size(code, 0xDE, 2), depth)
        if code < 0xA0 or code in (0xDC, 0xDD):
            self._counted()
            size = code & 15 if code < 0xA0 else self._size(code, 0xDC, 2)
            return [self.value(depth + 1) for _ in range(size)]
        if code < 0xC0 or code in (0xD9, 0xDA, 0xDB):
            size = code & 31 if code < 0xC0 else self._size(code, 0xD9, 1)
            return self.stream.take(size).decode("utf-8", "surrogateescape")
        if code in (0xC4, 0xC5, 0xC6):
            return self._bytes(self._size(code, 0xC4, 1))
        if code in (0xC7, 0xC8, 0xC9):
            return self._extension(self._size(code, 0xC7, 1), depth)
        if code in (0xD4, 0xD5, 0xD6, 0xD7, 0xD8):
            return self._extension(1 << (code - 0xD4), depth)
        raise ValueError(f"the byte {code:#x}, which begins no value")

    def _size(self, code: int, first: int, width: int) -> int:
        return self._number(_SIZES[width << (code - first)])

    def _number(self, kind: str) -> Any:
        return self.stream.unpack(kind)[0]

    def _counted(self) -> None:
        self._containers += 1
        if self._containers > _MOST_CONTAINERS:
            raise ValueError("containers without end")

    def _dict(self, count: int, depth: int) -> dict[Any, Any]:
        self._counted()
        found: dict[Any, Any] = {}
        for _ in range(count):
            key = self.value(depth + 1)
            if not isinstance(key, (str, int)) or key in found:
                raise ValueError(f"the key {key!r:.100}, or the same twice")
            found[key] = self.value(depth + 1)
        return found

    def _bytes(self, size: int) -> range:
        begin = self.stream.tell()
        self._file.require(begin, size)
        return range(begin, self.stream.seek(begin + size))

    def _extension(self, size: int, depth: int) -> Any:
        code = self._number(">b")
        end = self.stream.tell() + size
        if code not in (_ARRAY, _COMPLEX, _NUMBER):
            raise ValueError(f"an extension {code}, which is none of flax")
        inner = self.value(depth + 1)
        if self.stream.tell() != end or not isinstance(inner, list):
            raise ValueError("an extension whose size does not match")
        return complex(*inner) if code == _COMPLEX else _make_chunk(self._file.where, *inner)


def _make_chunk(where: str, shape: Any, dtype: Any, span: Any) -> _ArrayChunk:
    shape = check_shape(shape)
    if dtype not in _DTYPES:
        raise unsupported_dtype_error(where, f"{dtype!r:.100}", sorted(_DTYPES))
    if not isinstance(span, range) or len(span) != math.prod(shape) * np.dtype(dtype).itemsize:
        raise ValueError(f"other bytes than those of {dtype}{list(shape)}")
    return _ArrayChunk(dtype, shape, span.start)


def _join_chunks(tree: Any) -> Any:
    if isinstance(tree, list):
        return [_join_chunks(each) for each in tree]
    if not isinstance(tree, dict):
        return tree
    if _CHUNKED not in tree:
        return {key: _join_chunks(value) for key, value in tree.items()}
    shape, parts = check_shape(_in_order(tree["shape"])), tuple(_in_order(tree["chunks"]))
    dtypes = {part.dtype for part in parts if isinstance(part, _ArrayChunk)}
    count = sum(math.prod(part.shape) for part in parts if isinstance(part, _ArrayChunk))
    if len(dtypes) != 1 or count != math.prod(shape):
        raise ValueError(f"{count} numbers in the parts of {list(shape)}")
    return _Pieces(shape, parts)


def _in_order(numbered: dict[str, Any]) -> list[Any]:
    """A list that flax writes as a dict with its numbers."""
    return [numbered[str(number)] for number in range(len(numbered))]


def _make_entry(file: InputFile, name: str, leaf: _ArrayChunk | _Pieces) -> Entry:
    where = f"{name} in {file.where}"
    if isinstance(leaf, _ArrayChunk):
        return Entry.stored(file, where, KIND, leaf.shape, leaf.dtype, leaf.offset)
    dtype = np.dtype(leaf.parts[0].dtype)

    def read() -> np.ndarray:
        array = np.empty(math.prod(leaf.shape), dtype)
        at = 0
        for part in leaf.parts:
            count = math.prod(part.shape)
            array[at : at + count] = file.array(dtype, (count,), part.offset)
            at += count
        return array.reshape(leaf.shape)

    return Entry(where, KIND, leaf.shape, dtype, read)
