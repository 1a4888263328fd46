"""Constants of a TFLite model."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pax_export._foundations.wire import TFLITE_DTYPES, TFLITE_MARK, FlatTable, root
from pax_export.weights.sources._source import (
    Entry,
    InputFile,
    Source,
    check_shape,
    refuse_damaged,
    unsupported_dtype_error,
)

KIND = "TFLite file"
_STRING = 5
# Numbers of the fields.
_SUBGRAPHS, _BUFFERS = 2, 4
_TENSORS = 0
_SHAPE, _TYPE, _BUFFER, _NAME, _QUANTIZED, _SPARSE = 0, 1, 2, 3, 4, 6
_SCALES, _ZERO_POINTS, _AXIS = 2, 3, 6
_DATA, _OFFSET, _SIZE = 0, 1, 2
_LONGEST_NAME, _MOST_SIZES = 1 << 12, 100


def matches(file: InputFile) -> bool:
    return file.begin(8)[4:] == TFLITE_MARK


def read(file: InputFile) -> Source:
    entries: dict[str, Entry] = {}
    model = root(file)
    buffers = model.tables(_BUFFERS)
    for graph in model.tables(_SUBGRAPHS):
        for at in graph.tables(_TENSORS):
            tensor = _TfliteTensor(at, buffers)
            if not tensor.size:
                continue
            name = tensor.name if tensor.name not in entries else f"{tensor.name}:{at.begin}"
            where = f"{name} in {file.where}"
            with refuse_damaged(where, KIND):
                entries |= _make_entries(where, name, tensor, file)
    return Source("tflite", file.where, entries, origin="tflite")


class _TfliteTensor:
    """The description of an array in a model, and the place of its bytes."""

    def __init__(self, table: FlatTable, buffers: list[FlatTable]):
        number = table.number(_BUFFER, "<I")
        self.offset, self.size = buffers[number].span(_DATA, 1)
        if not self.size:  # a model of more than two gigabytes has them behind the buffer
            self.offset = buffers[number].number(_OFFSET, "<Q")
            self.size = buffers[number].number(_SIZE, "<Q") if self.offset > 1 else 0
        self.name = table.text(_NAME, _LONGEST_NAME)
        self.dtype = table.number(_TYPE, "<b")
        self.size = 0 if self.dtype == _STRING else self.size
        self.shape = check_shape(table.numbers(_SHAPE, "<i4")[:_MOST_SIZES].tolist())
        self.sparse = table.table(_SPARSE) is not None
        self.quantized = table.table(_QUANTIZED)


def _make_entries(
    where: str, name: str, tensor: _TfliteTensor, file: InputFile
) -> dict[str, Entry]:
    if tensor.dtype not in TFLITE_DTYPES or tensor.sparse:
        got = "a sparse array" if tensor.sparse else f"the dtype {tensor.dtype} of TFLite"
        raise unsupported_dtype_error(where, got, TFLITE_DTYPES.values())
    dtype, shape = np.dtype(TFLITE_DTYPES[tensor.dtype]), tensor.shape
    if math.prod(shape) * dtype.itemsize != tensor.size:
        raise ValueError(f"{tensor.size} bytes of {dtype}{list(shape)}")
    scales, zeros, axis = _read_scales(tensor)
    note = f"{dtype}, scaled along the axis {axis}" if len(scales) > 1 else f"{dtype}, scaled"
    if not len(scales) or dtype.kind not in "iu":
        note = ""
    stored = Entry.stored(file, where, KIND, shape, dtype, tensor.offset, note)
    if not note:
        return {name: stored}
    if file.keep_quantized:
        few = scales.shape
        return {
            name: stored,
            f"{name}.scales": Entry(where, KIND, few, np.float32, lambda: scales, note=note),
            f"{name}.zeros": Entry(where, KIND, few, np.int64, lambda: zeros, note=note),
        }
    spread = [1] * len(shape)
    if len(scales) > 1:
        spread[axis] = len(scales)

    def dequantized() -> np.ndarray:
        whole = (stored.read().astype(np.int64) - zeros.reshape(spread)).astype(np.float32)
        return whole * scales.reshape(spread)

    return {name: Entry(where, KIND, shape, np.float32, dequantized, note=note)}


def _read_scales(tensor: _TfliteTensor) -> tuple[Any, Any, int]:
    """The scales and the zeros of integers, one or for each place of an axis."""
    if tensor.quantized is None:
        return np.empty(0), np.empty(0), 0
    scales = tensor.quantized.numbers(_SCALES, "<f4")
    zeros = tensor.quantized.numbers(_ZERO_POINTS, "<i8")
    axis = tensor.quantized.number(_AXIS, "<i")
    zeros = zeros if len(zeros) else np.zeros(len(scales), np.int64)
    fits = len(scales) < 2 or (0 <= axis < len(tensor.shape) and tensor.shape[axis] == len(scales))
    if len(zeros) != len(scales) or not fits:
        raise ValueError(f"{len(scales)} scales and {len(zeros)} zeros of {list(tensor.shape)}")
    return scales, zeros, axis
