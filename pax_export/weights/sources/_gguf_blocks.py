"""GGUF's quantized blocks: ``array = integers * scales + minima``.

Scales are for blocks of 32 neighbors along the last axis, 16 in Q6_K.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from pax_export.weights.sources._source import Entry

Unpacked = tuple[np.ndarray, np.ndarray, np.ndarray | None]


class _Code(NamedTuple):
    """A kind of blocks."""

    unpack: Callable[[np.ndarray], Unpacked]
    size: int  # bytes of one block
    block: int = 32  # neighbors to a scale
    has_minima: bool = False
    dtype: type = np.float16  # of the scales


def make_entries(
    where: str, kind: str, name: str, shape: tuple[int, ...], code: str,
    raw: Callable[[], np.ndarray],
) -> dict[str, Entry]:  # fmt: skip
    """The integers under the name of the array, the scales and the least values below it."""
    known = CODES[code]
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

        found[name + ending] = Entry(where, kind, wanted, dtype, read, note=note)
    return found


def _read_half(raw: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(raw[:, at : at + 2]).view(np.float16)


def _unpack_nibbles(raw: np.ndarray) -> np.ndarray:
    """The lower halves of some bytes, and behind them the upper ones."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _unpack_bits(raw: np.ndarray) -> np.ndarray:
    return np.unpackbits(raw, axis=-1, bitorder="little")


def _unpack_low_bits(raw: np.ndarray, bits: int, has_minima: bool) -> Unpacked:
    """Integers of four or five bits; without least values, half of them are negative."""
    begin = 4 if has_minima else 2
    whole = _unpack_nibbles(raw[:, begin + 4 * (bits - 4) :])
    if bits == 5:
        whole |= _unpack_bits(raw[:, begin : begin + 4]) << 4
    if has_minima:
        return whole.astype(np.int8), _read_half(raw, 0), _read_half(raw, 2)
    return whole.astype(np.int8) - np.int8(1 << (bits - 1)), _read_half(raw, 0), None


def _q8_0(raw: np.ndarray) -> Unpacked:
    return raw[:, 2:].view(np.int8), _read_half(raw, 0), None


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


CODES = {
    "Q4_0": _low_bits(4, 18, False), "Q4_1": _low_bits(4, 20, True),
    "Q5_0": _low_bits(5, 22, False), "Q5_1": _low_bits(5, 24, True), "Q8_0": _Code(_q8_0, 34),
    "Q4_K": _Code(_q4_k, 144, has_minima=True, dtype=np.float32),
    "Q5_K": _Code(_q5_k, 176, has_minima=True, dtype=np.float32),
    "Q6_K": _Code(_q6_k, 210, block=16, dtype=np.float32),
}  # fmt: skip
