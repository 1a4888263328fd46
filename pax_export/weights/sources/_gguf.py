"""GGUF files of llama.cpp: our own header reader; the gguf package dequantizes.

With ``keep_quantised``, quantized blocks are integers, scales and minima: ``array = integers *
scales + minima``, with scales for 32 neighbors along the last axis, 16 in Q6_K.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pax_export._errors import UnsupportedDtypeError
from pax_export._optional import require
from pax_export.weights._binary_file import FileStream
from pax_export.weights.sources._reader import InputFile
from pax_export.weights.sources._source import Entry, Source, refuse_damaged

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
    """Whether a file begins as one of this format does."""
    return file.begin(4) == _MAGIC


def read(file: InputFile) -> Source:
    """Reads the arrays of a file, and its metadata."""
    entries: dict[str, Entry] = {}
    stream = file.stream()
    version, arrays, keys = struct.unpack("<4xIQQ", _read_exactly(stream, 24))
    if version not in _VERSIONS:
        raise ValueError(f"version {version} of the format, or bytes in another order")
    metadata: dict[str, Any] = {}
    for _ in range(keys):
        key = _read_text(stream)
        if key in metadata:
            raise ValueError(f"the key {key!r:.200} twice")
        metadata[key] = _read_value(stream, _read_number(stream, "<I"), 0)
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
    return Source("gguf", file.where, entries, metadata=metadata)


def _read_exactly(stream: FileStream, count: int) -> bytes:
    content = stream.read(count)
    if len(content) != count:
        raise ValueError(f"{count} bytes announced, but {len(content)} are left")
    return content


def _read_number(stream: FileStream, kind: str) -> Any:
    return struct.unpack(kind, _read_exactly(stream, struct.calcsize(kind)))[0]


def _read_text(stream: FileStream) -> str:
    return _read_exactly(stream, _read_number(stream, "<Q")).decode("utf-8", "surrogateescape")


def _read_value(stream: FileStream, kind: int, depth: int) -> Any:
    if kind in _NUMBERS:
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(_read_exactly(stream, dtype.itemsize), dtype)[0].item()
    if kind == _STRING:
        return _read_text(stream)
    if kind != _ARRAY or depth > 2:
        raise ValueError(f"a value of the kind {kind} in the metadata")
    kind, count = struct.unpack("<IQ", _read_exactly(stream, 12))
    if kind in _NUMBERS:
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(_read_exactly(stream, count * dtype.itemsize), dtype)
    return [_read_value(stream, kind, depth + 1) for _ in range(count)]  # each takes from the file


def _read_heads(stream: FileStream, count: int) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    for _ in range(count):
        name = _read_text(stream)
        dimensions = _read_number(stream, "<I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"{name!r:.200} has {dimensions} dimensions")
        sizes = struct.unpack(f"<{dimensions}Q", _read_exactly(stream, 8 * dimensions))
        code, offset = struct.unpack("<IQ", _read_exactly(stream, 12))
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

    def raw() -> np.ndarray:
        return file.array(np.uint8, raw_shape, begin)

    if file.keep_quantised and kind.name in _CODES:
        return _make_kept_entries(where, name, shape, kind.name, raw)
    return {
        name: Entry(
            where, KIND, shape, np.float32,
            lambda: _dequantize_rows(library, raw(), kind, shape),
            lambda index: _dequantize_part(library, raw(), kind, shape, index), note=kind.name,
        )
    }  # fmt: skip


def _dequantize_rows(
    library: Any, raw: np.ndarray, kind: Any, shape: tuple[int, ...]
) -> np.ndarray:
    """Dequantizes a few rows at a time, so temporaries are small."""
    array = np.empty(shape, np.float32)
    if not array.size:
        return array
    rows, packed = array.reshape(-1, shape[-1]), raw.reshape(-1, raw.shape[-1])
    step = max(1, _AT_ONCE // shape[-1])
    for first in range(0, len(rows), step):
        piece = slice(first, first + step)
        rows[piece] = library.dequantize(np.asarray(packed[piece]), kind)
    return array


def _dequantize_part(
    library: Any, raw: np.ndarray, kind: Any, shape: tuple[int, ...], index: Any
) -> Any:
    """A part of an array; dequantizes only the rows it needs."""
    outer, last = index[: len(shape) - 1], index[len(shape) - 1 :]
    packed = raw[outer]
    rows = _dequantize_rows(library, packed, kind, (*packed.shape[:-1], shape[-1]))
    return rows[(..., *last)]


Unpacked = tuple[np.ndarray, np.ndarray, np.ndarray | None]


class _Code(NamedTuple):
    """A kind of blocks."""

    unpack: Callable[[np.ndarray], Unpacked]
    size: int  # bytes per block
    block: int = 32  # neighbors to a scale
    has_minima: bool = False
    dtype: type = np.float16  # of the scales


def _make_kept_entries(
    where: str, name: str, shape: tuple[int, ...], code: str,
    raw: Callable[[], np.ndarray],
) -> dict[str, Entry]:  # fmt: skip
    """The integers under the name of the array, the scales and the least values below it."""
    known = _CODES[code]
    few = (*shape[:-1], shape[-1] // known.block)
    note = f"{code}, in blocks of {known.block}"
    found = {}
    endings = ["", ".scales", ".minima"][: 3 if known.has_minima else 2]
    for which, ending in enumerate(endings):
        wanted, dtype = (few, known.dtype) if ending else (shape, np.int8)

        def read(which: int = which, wanted: tuple[int, ...] = wanted) -> np.ndarray:
            array = known.unpack(raw().reshape(-1, known.size))[which]
            assert array is not None
            return array.reshape(wanted)

        found[name + ending] = Entry(where, KIND, wanted, dtype, read, note=note)
    return found


def _read_half(raw: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(raw[:, at : at + 2]).view(np.float16)


def _unpack_nibbles(raw: np.ndarray) -> np.ndarray:
    """The lower halves of some bytes, and behind them the upper ones."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _unpack_low_bits(raw: np.ndarray, bits: int, has_minima: bool) -> Unpacked:
    """Unpacks integers of four or five bits; signed unless there are minima."""
    begin = 4 if has_minima else 2
    whole = _unpack_nibbles(raw[:, begin + 4 * (bits - 4) :])
    if bits == 5:
        bits_above = np.unpackbits(raw[:, begin : begin + 4], axis=-1, bitorder="little")
        whole |= bits_above << 4
    if has_minima:
        return whole.astype(np.int8), _read_half(raw, 0), _read_half(raw, 2)
    return whole.astype(np.int8) - np.int8(1 << (bits - 1)), _read_half(raw, 0), None


def _k_scales(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight scales and eight least values, of six bits each, in twelve bytes; times their own."""
    low, middle, high = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 2) & 48)], axis=-1)
    minima = np.concatenate([middle & 63, (high >> 4) | ((middle >> 2) & 48)], axis=-1)
    scale, least = _read_half(raw, 0).astype(np.float32), _read_half(raw, 2).astype(np.float32)
    return scale * scales.astype(np.float32), -(least * minima.astype(np.float32))


def _q4_k(raw: np.ndarray) -> Unpacked:
    whole = _unpack_nibbles(raw[:, 16:].reshape(-1, 4, 32))
    return whole.astype(np.int8), *_k_scales(raw)


def _q5_k(raw: np.ndarray) -> Unpacked:
    low = _unpack_nibbles(raw[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    high = (raw[:, 16:48].reshape(-1, 1, 32) >> shifts) & 1
    return (low | (high << 4)).astype(np.int8), *_k_scales(raw)


def _q6_k(raw: np.ndarray) -> Unpacked:
    low = _unpack_nibbles(raw[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8).reshape(1, 1, 4, 1)
    high = (raw[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    scales = raw[:, 192:208].view(np.int8).astype(np.float32)
    scale = _read_half(raw, 208).astype(np.float32)
    return (low | (high << 4)).astype(np.int8) - np.int8(32), scale * scales, None


def _low_bits(bits: int, size: int, has_minima: bool) -> _Code:
    unpack = partial(_unpack_low_bits, bits=bits, has_minima=has_minima)
    return _Code(unpack, size, has_minima=has_minima)


_CODES = {
    "Q4_0": _low_bits(4, 18, False), "Q4_1": _low_bits(4, 20, True),
    "Q5_0": _low_bits(5, 22, False), "Q5_1": _low_bits(5, 24, True),
    "Q8_0": _Code(lambda raw: (raw[:, 2:].view(np.int8), _read_half(raw, 0), None), 34),
    "Q4_K": _Code(_q4_k, 144, has_minima=True, dtype=np.float32),
    "Q5_K": _Code(_q5_k, 176, has_minima=True, dtype=np.float32),
    "Q6_K": _Code(_q6_k, 210, block=16, dtype=np.float32),
}  # fmt: skip
