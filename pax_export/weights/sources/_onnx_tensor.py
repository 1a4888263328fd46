"""One ONNX tensor: raw bytes, typed values, or external data."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, Self

import numpy as np

from pax_export._errors import WeightsFileError
from pax_export._types import PyTree
from pax_export._wire import ONNX_DTYPES, Fields, Memory, Message, RandomAccessBytes, signed
from pax_export.weights.sources._reader import InputFile
from pax_export.weights.sources._source import Entry, unsupported_dtype_error

_TEXT = 8
_HALF_BYTES = (21, 22, 23)
_DIMS, _DTYPE, _NAME, _RAW = 1, 2, 8, 9
_FLOATS, _LONG, _DOUBLES = 4, 7, 10
#: Fields of typed numbers, those of other integers among them.
_NUMBERS = (_FLOATS, 5, _LONG, _DOUBLES, 11)
_EXTERNAL, _LOCATION = 13, 14
_MOST_DIMENSIONS = 64


class OnnxTensor:
    """What a model says of an array, and where its numbers are."""

    def __init__(self, tensor: Message):
        fields = Fields(tensor)
        self.name, self.dtype = fields.text(_NAME), fields.whole(_DTYPE)
        self.shape: list[int] = []
        for value in fields.all(_DIMS):
            packed = isinstance(value, Message)
            self.shape += value.varints().tolist() if packed else [signed(value)]
        self.raw = (fields.messages(_RAW) or [None])[-1]
        self.numbers = [(number, value) for number in _NUMBERS for value in fields.all(number)]
        self.external = fields.mapping(_EXTERNAL)
        if any(size < 0 for size in self.shape) or len(self.shape) > _MOST_DIMENSIONS:
            raise ValueError(f"the shape {self.shape!r:.100}")
        if (fields.whole(_LOCATION) == 1) != bool(self.external):
            raise ValueError(f"{self.name!r:.200} is beside the file and in it")

    @classmethod
    def of_numbers(cls, values: list[int | Message], many: bool, floats: bool) -> Self:
        """The array of a node that gives its numbers as attributes."""
        made = cls(Message(Memory(b"")))
        made.dtype = 1 if floats else 7
        made.numbers = [(_FLOATS if floats else _LONG, value) for value in values]
        made.shape = [len(_join_numbers(made))] if many else []
        return made

    @property
    def is_text(self) -> bool:
        """Whether it holds texts, which are not weights."""
        return self.dtype == _TEXT


class ExternalFiles:
    """The files beside a model; none that lies elsewhere is opened."""

    def __init__(self, model: InputFile):
        self._model = model
        self._files: dict[str, InputFile] = {}

    def file(self, location: str) -> InputFile:
        """The file that a model names."""
        if location not in self._files:
            self._files[location] = self._model.open_other(self._inside(location))
        return self._files[location]

    def _inside(self, location: str) -> Path:
        name = PurePosixPath(location)
        strange = not location or "\\" in location or "\0" in location or ".." in name.parts
        folder = os.path.realpath(self._model.path.parent)
        path = os.path.realpath(os.path.join(folder, location)) if not strange else ""
        if strange or name.is_absolute() or not path.startswith(os.path.join(folder, "")):
            raise WeightsFileError(
                "The model refers to a file outside of its folder.",
                where=self._model.where,
                got=repr(location)[:200],
                write="a model whose external data lie beside it, with no links elsewhere",
            )
        return Path(path)


def make_entry(
    where: str, kind: str, tensor: OnnxTensor, external: ExternalFiles, note: str
) -> Entry:
    """The array of a tensor, read when it is asked for."""
    if tensor.dtype not in ONNX_DTYPES:
        got = f"the dtype {tensor.dtype} of ONNX"
        raise unsupported_dtype_error(where, got, ONNX_DTYPES.values())
    dtype, shape = np.dtype(ONNX_DTYPES[tensor.dtype]), tuple(tensor.shape)
    count = math.prod(shape)
    if tensor.raw is None and not tensor.external:
        if count > sum(value.size if isinstance(value, Message) else 1
                       for _, value in tensor.numbers):  # fmt: skip
            raise ValueError(f"fewer numbers than {dtype}{list(shape)} has")
        return Entry(where, kind, shape, dtype, lambda: _read_listed(tensor, dtype), note=note)
    file, begin, size = _find_bytes(tensor, external)
    packed = tensor.dtype in _HALF_BYTES
    wanted = -(-count // 2) if packed else count * dtype.itemsize
    if size is not None and size != wanted:
        raise ValueError(f"{size} bytes of {dtype}{list(shape)}")
    if packed:
        file.require(begin, wanted)
        return Entry(
            where, kind, shape, dtype, _half_byte_reader(file, begin, shape, dtype), note=note
        )
    return Entry.stored(file, where, kind, shape, dtype, begin, note)


def _find_bytes(
    tensor: OnnxTensor, external: ExternalFiles
) -> tuple[RandomAccessBytes, int, int | None]:
    if not tensor.external:
        assert tensor.raw is not None
        return tensor.raw.places, tensor.raw.begin, tensor.raw.size
    file = external.file(tensor.external.get("location", ""))
    length = tensor.external.get("length")
    offset = _parse_digits(tensor.external.get("offset", "0"))
    return file, offset, _parse_digits(length) if length else None


def _parse_digits(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ValueError(f"{text!r:.50} as an offset or a length")
    return int(text)


def _half_byte_reader(
    file: RandomAccessBytes, begin: int, shape: PyTree, dtype: Any
) -> Callable[[], np.ndarray]:
    """Two numbers in each byte, the lower half first."""

    def read() -> np.ndarray:
        count = math.prod(shape)
        raw = file.array(np.uint8, (-(-count // 2),), begin)
        halves = np.stack([raw & 15, raw >> 4], axis=-1).reshape(-1)[:count].reshape(shape)
        if dtype.name == "int4":
            halves = (halves ^ 8).astype(np.int8) - np.int8(8)
        return halves.view(dtype) if dtype.name.startswith("float") else halves.astype(dtype)

    return read


def _read_listed(tensor: OnnxTensor, dtype: np.dtype) -> np.ndarray:
    """The array of numbers that a model gives one by one."""
    numbers = _join_numbers(tensor)
    if dtype.kind == "c":
        return numbers.view(dtype).reshape(tensor.shape)
    if numbers.dtype.kind in "iu" and (dtype.kind not in "iub" or dtype.name in ("int4", "uint4")):
        if tensor.dtype in _HALF_BYTES:
            raise ValueError(f"{dtype} in whole numbers")
        bits = numbers.astype(f"uint{8 * dtype.itemsize}")  # as bits, in the lowest places
        return bits.view(dtype).reshape(tensor.shape)
    return numbers.astype(dtype).reshape(tensor.shape)


def _join_numbers(tensor: OnnxTensor) -> np.ndarray:
    pieces = []
    for number, value in tensor.numbers:
        if isinstance(value, int):
            pieces.append(np.array([signed(value)]))
        elif number in (_FLOATS, _DOUBLES):
            pieces.append(np.frombuffer(value.content(), "<f4" if number == _FLOATS else "<f8"))
        else:
            pieces.append(value.varints())
    return np.concatenate(pieces) if pieces else np.empty(0)
