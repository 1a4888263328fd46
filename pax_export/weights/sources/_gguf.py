"""GGUF files of llama.cpp: our own header reader; the gguf package dequantizes.

With ``keep_quantized``, quantized blocks are integers, scales and minima: ``array = integers *
scales + minima``, with scales for 32 neighbors along the last axis, 16 in Q6_K.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import partial
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from pax_export._foundations.errors import UnsupportedDtypeError
from pax_export._foundations.optional import require
from pax_export._foundations.types import DTypeLike
from pax_export.weights._binary_file import FileStream
from pax_export.weights.sources._source import Entry, Index, InputFile, Source, refuse_damaged

KIND = "GGUF file"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 8
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?",
            10: "<u8", 11: "<i8", 12: "<f8"}  # fmt: skip
_PLAIN = {0: "float32", 1: "float16", 24: "int8", 25: "int16", 26: "int32", 27: "int64",
          28: "float64", 30: "bfloat16"}  # fmt: skip
#: The number of elements dequantized at a time.
_AT_ONCE = 1 << 20


def matches(file: InputFile) -> bool:
    return file.begin(4) == _MAGIC


def read(file: InputFile) -> Source:
    entries: dict[str, Entry] = {}
    stream = file.stream()
    version, arrays, keys = stream.unpack("<4xIQQ")
    if version not in _VERSIONS:
        raise ValueError(f"version {version} of the format, or bytes in another order")
    metadata: dict[str, Any] = {}
    for _ in range(keys):
        key = _read_text(stream)
        if key in metadata:
            raise ValueError(f"the key {key!r:.200} twice")
        metadata[key] = _read_value(stream, stream.unpack("<I")[0], 0)
    heads = list(_read_heads(stream, arrays))
    align = metadata.get("general.alignment", 32)
    if type(align) is not int or not 0 < align <= 1 << 20:
        raise ValueError(f"arrays at multiples of {align!r:.50}")
    begin = -(-stream.tell() // align) * align
    for name, shape, code, offset in heads:
        with refuse_damaged(f"{name} in {file.where}", KIND):
            found = _make_entries(file, name, shape, code, begin + offset)
            twice = entries.keys() & found.keys()
            if twice:
                raise ValueError(f"the name {min(twice)!r:.200} twice")
            entries |= found
    return Source("gguf", file.where, entries, metadata=metadata, origin="torch")


def _read_text(stream: FileStream) -> str:
    return stream.take(*stream.unpack("<Q")).decode("utf-8", "surrogateescape")


def _read_value(stream: FileStream, kind: int, depth: int) -> Any:
    if kind in _NUMBERS:
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(stream.take(dtype.itemsize), dtype)[0].item()
    if kind == _STRING:
        return _read_text(stream)
    if kind != _ARRAY or depth > 2:
        raise ValueError(f"a value of the kind {kind} in the metadata")
    kind, count = stream.unpack("<IQ")
    if kind in _NUMBERS:
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(stream.take(count * dtype.itemsize), dtype)
    return [_read_value(stream, kind, depth + 1) for _ in range(count)]  # each takes from the file


def _read_heads(stream: FileStream, count: int) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    for _ in range(count):
        name = _read_text(stream)
        (dimensions,) = stream.unpack("<I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"{name!r:.200} has {dimensions} dimensions")
        sizes = stream.unpack(f"<{dimensions}Q")
        code, offset = stream.unpack("<IQ")
        yield name, sizes[::-1], code, offset  # the fastest dimension is first in the file


def _make_entries(
    file: InputFile, name: str, shape: tuple[int, ...], code: int, begin: int
) -> dict[str, Entry]:
    where = f"{name} in {file.where}"
    if code in _PLAIN:
        return {name: Entry.stored(file, where, KIND, shape, _PLAIN[code], begin)}
    library = require("gguf", "adopt", "open_source of a GGUF file")
    try:
        kind = library.GGMLQuantizationType(code)
        block, size = library.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise UnsupportedDtypeError(
            "The dtype of an array is unsupported by the gguf package.",
            where=where,
            got=f"the dtype {code}",
            write="python -m pip install --upgrade gguf; or a file of Q4_0, Q8_0, F16, ...",
        ) from error
    if not shape or shape[-1] % block:
        raise ValueError(f"{kind.name} in blocks of {block}, in rows of {shape[-1:]}")
    raw_shape = (*shape[:-1], shape[-1] // block * size)
    file.require(begin, math.prod(raw_shape))

    raw = partial(file.array, np.uint8, raw_shape, begin)
    unpack = partial(_unpack_blocks, library, kind)
    if file.keep_quantized and kind.name in _CODES:
        return _make_integer_entries(
            where, name, shape, kind.name, lambda *how: unpack(raw(), *how)
        )

    def read_part(index: Index) -> np.ndarray:
        """Dequantizes only the rows it needs."""
        rows, last = index[: len(shape) - 1], index[len(shape) - 1 :]
        return unpack(raw()[rows])[(..., *last)]

    whole = Entry(where, KIND, shape, np.float32, lambda: unpack(raw()), read_part, kind.name)
    return {name: whole}


def _unpack_blocks(
    library: ModuleType, kind: Enum, raw: np.ndarray, dtype: DTypeLike = np.float32, every: int = 1,
    fields: Mapping[str, int] = MappingProxyType({}),
) -> np.ndarray:  # fmt: skip
    """Dequantizes a few rows at a time, so temporaries are small.

    First, `fields` of each block are set to zero or one. Of each `every` neighbors, one is kept.
    """
    block, size = library.GGML_QUANT_SIZES[kind]
    array = np.empty((*raw.shape[:-1], raw.shape[-1] // size * block // every), dtype)
    if not array.size:
        return array
    rows, packed = array.reshape(-1, array.shape[-1]), raw.reshape(-1, raw.shape[-1])
    step = max(1, _AT_ONCE // (array.shape[-1] * every))
    for first in range(0, len(rows), step):
        few = np.array(packed[first : first + step])
        at = 0
        for field, one in _CODES[kind.name].fields if fields else ():
            if field in fields:
                part = few.reshape(-1, size)[:, at : at + len(one)]
                part[...] = np.frombuffer(one, np.uint8) * np.uint8(fields[field])
            at += len(one)
        rows[first : first + step] = library.dequantize(few, kind)[:, ::every]
    return array


def _make_integer_entries(
    where: str, name: str, shape: tuple[int, ...], code: str, unpack: Callable[..., np.ndarray]
) -> dict[str, Entry]:
    """The integers under the name of the array, the scales and the least values below it."""
    block, dtype, fields = _CODES[code]
    few, note = (*shape[:-1], shape[-1] // block), f"{code}, in blocks of {block}"
    wanted: dict[str, tuple[Any, ...]] = {
        "": (shape, np.int8, 1, {"scales": 1, "minima": 0}),
        ".scales": (few, dtype, block, {"numbers": 1, "minima": 0}),
    }
    if "minima" in dict(fields):
        wanted[".minima"] = (few, dtype, block, {"numbers": 0})
    return {
        name + ending: Entry(where, KIND, size, kind, partial(unpack, kind, *how), note=note)
        for ending, (size, kind, *how) in wanted.items()
    }


class _Code(NamedTuple):
    """A kind of blocks: neighbors to a scale, dtype of the scales, and bytes of one in each field.

    A block is numbers times scales plus minima, so that each is what a block is worth with one or
    zero in the others.
    """

    block: int
    dtype: type
    fields: tuple[tuple[str, bytes], ...]


_ONE = ("scales", np.float16(1).tobytes()), ("minima", np.float16(1).tobytes())
#: Eight scales of six bits, and as many minima, which are times another number.
_SIX_BITS = ("scales", bytes.fromhex("01010101 00000000 01010101"))
_CODES = {
    "Q4_0": _Code(32, np.float16, (_ONE[0], ("numbers", b"\x99" * 16))),
    "Q4_1": _Code(32, np.float16, (*_ONE, ("numbers", b"\x11" * 16))),
    "Q5_0": _Code(32, np.float16, (_ONE[0], ("numbers", b"\xff" * 4 + b"\x11" * 16))),
    "Q5_1": _Code(32, np.float16, (*_ONE, ("numbers", bytes(4) + b"\x11" * 16))),
    "Q8_0": _Code(32, np.float16, (_ONE[0], ("numbers", b"\x01" * 32))),
    "Q4_K": _Code(32, np.float32, (*_ONE, _SIX_BITS, ("numbers", b"\x11" * 128))),
    "Q5_K": _Code(32, np.float32, (*_ONE, _SIX_BITS, ("numbers", bytes(32) + b"\x11" * 128))),
    "Q6_K": _Code(16, np.float32, (("numbers", b"\x11" * 128 + b"\xaa" * 64),
                                   ("scales", b"\x01" * 16), _ONE[0])),
}  # fmt: skip
