"""GGUF's quantized blocks: ``array = integers * scales + minima``.

Scales are for blocks of 32 neighbors along the last axis, 16 in Q6_K.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pax_export.weights.sources._source import Entry

Unpacked = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def entries(
    where: str, kind: str, name: str, shape: tuple[int, ...], code: str,
    raw: Callable[[], np.ndarray],
) -> dict[str, Entry]:  # fmt: skip
    """The integers under the name of the array, the scales and the least values below it."""
    unpack, block, has_minima, dtype = KEPT[code]
    size = _SIZES[code]
    few = (*shape[:-1], shape[-1] // block)

    def read(which: int, wanted: tuple[int, ...]) -> np.ndarray:
        array = unpack(raw().reshape(-1, size))[which]
        assert array is not None
        return array.reshape(wanted)

    note = f"{code}, in blocks of {block}"
    found = {
        name: Entry(where, kind, shape, np.int8, lambda: read(0, shape), note=note),
        f"{name}.scales": Entry(where, kind, few, dtype, lambda: read(1, few), note=note),
    }
    if has_minima:
        found[f"{name}.minima"] = Entry(where, kind, few, dtype, lambda: read(2, few), note=note)
    return found


def _half(raw: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(raw[:, at : at + 2]).view(np.float16)


def _nibbles(raw: np.ndarray) -> np.ndarray:
    """The lower halves of some bytes, and behind them the upper ones."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _bits(raw: np.ndarray) -> np.ndarray:
    return np.unpackbits(raw, axis=-1, bitorder="little")


def _q4_0(raw: np.ndarray) -> Unpacked:
    return _nibbles(raw[:, 2:]).astype(np.int8) - np.int8(8), _half(raw, 0), None


def _q4_1(raw: np.ndarray) -> Unpacked:
    return _nibbles(raw[:, 4:]).astype(np.int8), _half(raw, 0), _half(raw, 2)


def _q5_0(raw: np.ndarray) -> Unpacked:
    whole = _nibbles(raw[:, 6:]) | (_bits(raw[:, 2:6]) << 4)
    return whole.astype(np.int8) - np.int8(16), _half(raw, 0), None


def _q5_1(raw: np.ndarray) -> Unpacked:
    whole = _nibbles(raw[:, 8:]) | (_bits(raw[:, 4:8]) << 4)
    return whole.astype(np.int8), _half(raw, 0), _half(raw, 2)


def _q8_0(raw: np.ndarray) -> Unpacked:
    return raw[:, 2:].view(np.int8), _half(raw, 0), None


def _k_scales(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight scales and eight least values, of six bits each, in twelve bytes; times their own."""
    low, middle, high = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 2) & 48)], axis=-1)
    minima = np.concatenate([middle & 63, (high >> 4) | ((middle >> 2) & 48)], axis=-1)
    scale, least = _half(raw, 0).astype(np.float32), _half(raw, 2).astype(np.float32)
    return scale * scales.astype(np.float32), -(least * minima.astype(np.float32))


def _q4_k(raw: np.ndarray) -> Unpacked:
    whole = _nibbles(raw[:, 16:].reshape(-1, 4, 32))
    return whole.astype(np.int8), *_k_scales(raw)


def _q5_k(raw: np.ndarray) -> Unpacked:
    low = _nibbles(raw[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    high = (raw[:, 16:48].reshape(-1, 1, 32) >> shifts) & 1
    return (low | (high << 4)).astype(np.int8), *_k_scales(raw)


def _q6_k(raw: np.ndarray) -> Unpacked:
    low = _nibbles(raw[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8).reshape(1, 1, 4, 1)
    high = (raw[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    scales = raw[:, 192:208].view(np.int8).astype(np.float32)
    scale = _half(raw, 208).astype(np.float32)
    return (low | (high << 4)).astype(np.int8) - np.int8(32), scale * scales, None


#: How it is unpacked, neighbors to a scale, whether there are least values, the scales' dtype.
KEPT = {
    "Q4_0": (_q4_0, 32, False, np.float16),
    "Q4_1": (_q4_1, 32, True, np.float16),
    "Q5_0": (_q5_0, 32, False, np.float16),
    "Q5_1": (_q5_1, 32, True, np.float16),
    "Q8_0": (_q8_0, 32, False, np.float16),
    "Q4_K": (_q4_k, 32, True, np.float32),
    "Q5_K": (_q5_k, 32, True, np.float32),
    "Q6_K": (_q6_k, 16, False, np.float32),
}
#: Bytes of one block as it is packed.
_SIZES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34,
          "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}  # fmt: skip
