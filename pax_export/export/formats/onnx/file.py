"""An ONNX model as a file, written array by array, and the file of arrays beside a large one.

Messages do not contain the arrays, because protobuf copies its input several times, and cannot
write more than 2 GiB. The bytes of a file without external data are those of protobuf.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from operator import gt, lt
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from pax_export._foundations.files.own_files import data_of_file
from pax_export._foundations.wire import encode_varint

#: A protobuf message cannot be longer.
LARGEST = 2**31 - 1
#: Smaller arrays stay in the model, as torch.onnx has it: runtimes read shapes from them.
_SMALL = 1024
#: Arrays of at least this size in bytes are aligned to pages: runtimes map them into memory.
_MAPPED, _PAGE, _WORD = 1 << 20, 4096, 64
_PIECE = 1 << 24
_GRAPH, _INITIALIZER, _RAW_DATA, _DELIMITED = 7, 5, 9, 2


class ExternalData(NamedTuple):
    name: str
    digest: str
    bytes: int


def write(
    onnx: ModuleType, model: Any, arrays: Mapping[str, np.ndarray], path: Path, external: bool
) -> ExternalData | None:
    """Writes a model whose initializers are these arrays.

    They are external if requested, or if the model is too large.
    """
    arrays = dict(arrays)
    tensors = {name: _tensor(onnx, name, array) for name, array in arrays.items()}
    for name, tensor in tensors.items():
        if len(tensor.raw_data) >= _SMALL:  # packed
            arrays[name] = np.frombuffer(tensor.raw_data, np.uint8)
            tensor.ClearField("raw_data")
    fixed = model.ByteSize() + sum(each.ByteSize() + _WORD for each in tensors.values())
    data = None
    if external or fixed + sum(each.nbytes for each in arrays.values()) > LARGEST:
        data = _write_data(tensors, arrays, path)
    start, end = _around(model, _GRAPH)
    before, after = _around(model.graph, _INITIALIZER)
    raw = {
        name: array
        for name, array in arrays.items()
        if not (tensors[name].HasField("raw_data") or tensors[name].external_data)
    }
    heads = {name: _head(each, raw.get(name)) for name, each in tensors.items()}
    size = len(before) + len(after) + sum(map(len, heads.values()))
    size += sum(each.nbytes for each in raw.values())
    with path.open("wb") as file:
        file.write(start + _tag(_GRAPH) + encode_varint(size) + before)
        for name, head in heads.items():
            file.write(head)
            for piece in _pieces(raw[name]) if name in raw else ():
                file.write(piece)
        file.write(after + end)
    return data


def _tensor(onnx: ModuleType, name: str, array: np.ndarray) -> Any:
    """The message of an array; without its bytes, unless they are few or packed."""
    kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    if array.nbytes < _SMALL or array.dtype.name in ("int4", "uint4", "int2", "uint2"):
        return onnx.numpy_helper.from_array(np.array(array), name)
    return onnx.TensorProto(dims=array.shape, data_type=kind, name=name)


def _write_data(tensors: Mapping[str, Any], arrays: Mapping[str, np.ndarray], path: Path) -> Any:
    """Writes the external arrays, and their locations into the messages."""
    outside = {name: each for name, each in tensors.items() if not each.HasField("raw_data")}
    begun, digest = path.with_name("data"), hashlib.sha256()
    places: dict[str, tuple[int, int]] = {}
    with begun.open("wb") as file:
        for name in outside:
            array = arrays[name]
            align = _PAGE if array.nbytes >= _MAPPED else _WORD
            gap = bytes(-file.tell() % align)
            places[name] = file.tell() + len(gap), array.nbytes
            for piece in (gap, *_pieces(array)):
                file.write(piece)
                digest.update(piece)
        size = file.tell()
    found = digest.hexdigest()
    named = begun.rename(data_of_file(path, found))
    for name, (offset, length) in places.items():
        about = {"location": named.name, "offset": offset, "length": length}
        for key, value in about.items():
            outside[name].external_data.add(key=key, value=str(value))
        outside[name].data_location = outside[name].EXTERNAL
    return ExternalData(named.name, found, size)


def _head(tensor: Any, raw: np.ndarray | None) -> bytes:
    """An initializer, up to the bytes of the array that follow."""
    content = tensor.SerializeToString(deterministic=True)
    if raw is not None:
        content += _tag(_RAW_DATA) + encode_varint(raw.nbytes)
    size = len(content) + (0 if raw is None else raw.nbytes)
    return _tag(_INITIALIZER) + encode_varint(size) + content


def _tag(number: int) -> bytes:
    return encode_varint(number << 3 | _DELIMITED)


def _around(message: Any, number: int) -> Iterator[bytes]:
    """The fields of a message before and after one, as bytes."""
    for keep in (lt, gt):
        part = type(message)()
        part.CopyFrom(message)
        for field, _ in message.ListFields():
            if not keep(field.number, number):
                part.ClearField(field.name)
        yield part.SerializeToString(deterministic=True)


def _pieces(array: np.ndarray) -> Iterator[memoryview]:
    """Yields the bytes of an array in pieces, also for transposed views."""
    if array.flags.c_contiguous:
        flat = array.reshape(-1).view(np.uint8)
        for start in range(0, flat.size, _PIECE):
            yield flat[start : start + _PIECE].data
        return
    rows = max(1, _PIECE * len(array) // array.nbytes)
    for start in range(0, len(array), rows):
        part = np.ascontiguousarray(array[start : start + rows])
        yield part.reshape(-1).view(np.uint8).data
