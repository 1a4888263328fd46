"""Initializers and constants of an ONNX model, without the onnx package, which loads everything."""

from __future__ import annotations

import math
import os
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Self

import numpy as np

from pax_export._foundations.errors import WeightsFileError
from pax_export._foundations.wire import (
    ONNX_DTYPES,
    Memory,
    Message,
    MessageFields,
    RandomAccessBytes,
    message,
    require_integer,
    to_signed,
)
from pax_export.weights.sources._source import (
    Entry,
    InputFile,
    Source,
    check_shape,
    refuse_damaged,
    unsupported_dtype_error,
)

KIND = "ONNX file"
HAS_SIGNATURE = False
_DEEPEST = 32
#: The largest length of all names together, composed of their scopes: a few long ones
#: would be repeated with each array below.
_MOST_OF_NAMES = 1 << 26
# Numbers of the fields.
_MODEL = {1, 2, 3, 4, 5, 6, 7, 8, 14, 20, 25, 26}
_IR_VERSION, _PRODUCER, _GRAPH, _METADATA, _FUNCTION = 1, 2, 7, 14, 25
_NODE, _INITIALIZER, _SPARSE = 1, 5, 15
_INPUT, _OUTPUT, _NODE_NAME, _OPERATOR, _ATTRIBUTE = 1, 2, 3, 4, 5
_NAME, _TENSOR, _SUBGRAPH, _SUBGRAPHS = 1, 5, 6, 11
_FUNCTION_NODE = 7
_FLOAT, _WHOLE, _TEXT, _FLOATS, _TEXTS = 2, 3, 4, 7, 9
#: Operators whose attributes change the function of their weights.
_RECURRENT = ("LSTM", "GRU", "RNN")
_VALUES = {"value_float": 2, "value_int": 3, "value_floats": 7, "value_ints": 8}


def matches(file: InputFile) -> bool:
    """Returns whether a file is a model: it has a version, a graph, and only fields of models."""
    numbers = set()
    try:
        for number, _ in Message(file).fields():
            numbers.add(number)
            if number not in _MODEL:
                return False
    except ValueError:
        return {_IR_VERSION, _GRAPH} <= numbers or file.path.suffix == ".onnx"
    return {_IR_VERSION, _GRAPH} <= numbers


def read(file: InputFile) -> Source:
    fields, found = MessageFields(Message(file)), _ModelArrays(file)
    for graph in fields.messages(_GRAPH):
        found.add_graph(graph, "", 0)
    for function in map(MessageFields, fields.messages(_FUNCTION)):
        for node in function.messages(_FUNCTION_NODE):
            found.add_node(MessageFields(node), f"{''.join(function.texts(_NAME))}/", 0)
    metadata: dict[str, Any] = {"ir_version": fields.whole(_IR_VERSION)}
    metadata |= {"producer_name": fields.text(_PRODUCER)} if _PRODUCER in fields else {}
    metadata |= fields.mapping(_METADATA)
    metadata |= {"used_by": found.used_by, "settings": found.settings}
    return Source("onnx", file.where, found.entries, metadata=metadata, origin="onnx")


class _ModelArrays:
    """The arrays of the graphs of a model."""

    def __init__(self, file: InputFile):
        self._file = file
        self._left = _MOST_OF_NAMES
        self.entries: dict[str, Entry] = {}
        #: By name of an array: the operators that take it, as which input, in which node.
        self.used_by: dict[str, list[tuple[str, int, str]]] = {}
        #: Array name -> settings of the recurrent operators that use it.
        self.settings: dict[str, list[tuple[tuple[str, Any], ...]]] = {}

    def add_graph(self, graph: Message, path: str, depth: int) -> None:
        """The arrays of a graph; the path names the node and its branch."""
        if depth > _DEEPEST:
            raise ValueError("graphs in graphs without end")
        for number, value in graph.fields():
            if number == _INITIALIZER:
                self._add(OnnxTensor(message(value)), path, "")
            elif number == _NODE:
                self.add_node(MessageFields(message(value)), path, depth)
            elif number == _SPARSE:
                raise ValueError("a sparse initialiser, which is not read")

    def add_node(self, node: MessageFields, path: str, depth: int) -> None:
        """The arrays of a node, and how it uses others."""
        name, operator, inputs = node.text(_NODE_NAME), node.text(_OPERATOR), node.texts(_INPUT)
        attributes = [MessageFields(each) for each in node.messages(_ATTRIBUTE)]
        for index, used in enumerate(inputs):
            self.used_by.setdefault(used, []).append((operator, index, name))
        if operator in _RECURRENT:
            settings = tuple(sorted(map(_read_setting, attributes)))
            for used in inputs[1:]:
                self.settings.setdefault(used, []).append((("operator", operator), *settings))
        for attribute in attributes:
            if operator == "Constant":
                for tensor in _read_constants(attribute):
                    self._add(tensor, path, [*node.texts(_OUTPUT), name][0])
                continue
            for graph in attribute.messages(_SUBGRAPH, _SUBGRAPHS):
                below = f"{path}{name or operator}/{attribute.text(_NAME)}/"
                self.add_graph(graph, below, depth + 1)

    def _add(self, tensor: OnnxTensor, path: str, constant: str) -> None:
        if tensor.dtype == _STRING_DTYPE:
            return  # no weight
        own = constant or tensor.name
        name = own if own not in self.entries else path + own
        self._left -= len(name) - len(own)
        if self._left < 0:
            raise ValueError("names without end")
        if name in self.entries:
            raise ValueError(f"two arrays with the name {name!r:.200}")
        where, note = f"{name} in {self._file.where}", "Constant" if constant else ""
        with refuse_damaged(where, KIND):
            self.entries[name] = _make_entry(where, tensor, self._file, note)


def _read_setting(attribute: MessageFields) -> tuple[str, Any]:
    """The name of an attribute, and its value as text: numbers and names, no arrays."""
    values = [*attribute.texts(_TEXT), *attribute.texts(_TEXTS)]
    values += [str(to_signed(require_integer(value))) for value in attribute.all(_WHOLE)]
    values += ["a number"] * len([*attribute.all(_FLOAT), *attribute.all(_FLOATS)])
    return attribute.text(_NAME), tuple(values)


def _read_constants(attribute: MessageFields) -> list[OnnxTensor]:
    name = attribute.text(_NAME)
    if name == "value":
        return [OnnxTensor(each) for each in attribute.messages(_TENSOR)]
    if name not in _VALUES:
        return []
    values = attribute.all(_VALUES[name])
    return [OnnxTensor.of_numbers(values, many=name.endswith("s"), floats="float" in name)]


_STRING_DTYPE = 8
_HALF_BYTES = (21, 22, 23)
_DIMS, _DTYPE, _TENSOR_NAME, _RAW = 1, 2, 8, 9
_FLOAT_DATA, _INT64_DATA, _DOUBLE_DATA = 4, 7, 10
#: MessageFields of typed numbers, those of other integers among them.
_DATA = (_FLOAT_DATA, 5, _INT64_DATA, _DOUBLE_DATA, 11)
_EXTERNAL, _LOCATION = 13, 14


class OnnxTensor:
    """The description of an array in a model, and the place of its data."""

    def __init__(self, tensor: Message):
        fields = MessageFields(tensor)
        self.name, self.dtype = fields.text(_TENSOR_NAME), fields.whole(_DTYPE)
        self.shape: list[int] = []
        for value in fields.all(_DIMS):
            packed = isinstance(value, Message)
            self.shape += value.varints().tolist() if packed else [to_signed(value)]
        self.raw = (fields.messages(_RAW) or [None])[-1]
        self.numbers = [(number, value) for number in _DATA for value in fields.all(number)]
        self.external = fields.mapping(_EXTERNAL)
        check_shape(self.shape)
        if (fields.whole(_LOCATION) == 1) != bool(self.external):
            raise ValueError(f"{self.name!r:.200} is both in the file and external")

    @classmethod
    def of_numbers(cls, values: list[int | Message], many: bool, floats: bool) -> Self:
        """Returns the array of a node that has its values as attributes."""
        empty = cls(Message(Memory(b"")))
        empty.dtype = 1 if floats else 7
        empty.numbers = [(_FLOAT_DATA if floats else _INT64_DATA, value) for value in values]
        empty.shape = [len(_join_numbers(empty))] if many else []
        return empty


def _external_file(model: InputFile, location: str) -> InputFile:
    """A file of external data; paths outside the folder of the model are refused."""
    name = PurePosixPath(location)
    strange = not location or "\\" in location or "\0" in location or ".." in name.parts
    folder = os.path.realpath(model.path.parent)
    path = os.path.realpath(os.path.join(folder, location)) if not strange else ""
    if strange or name.is_absolute() or not path.startswith(os.path.join(folder, "")):
        raise WeightsFileError(
            "The model refers to a file outside of its folder.",
            where=model.where,
            got=repr(location)[:200],
            write="a model whose external data are in its folder, without links to other places",
        )
    return model.open_other(Path(path))


def _make_entry(where: str, tensor: OnnxTensor, model: InputFile, note: str) -> Entry:
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
        return Entry(where, KIND, shape, dtype, lambda: _read_listed(tensor, dtype), note=note)
    file, begin, size = _find_bytes(tensor, model)
    packed = tensor.dtype in _HALF_BYTES
    wanted = -(-count // 2) if packed else count * dtype.itemsize
    if size is not None and size != wanted:
        raise ValueError(f"{size} bytes of {dtype}{list(shape)}")
    if packed:
        file.require(begin, wanted)
        read = partial(_read_half_bytes, file, begin, shape, dtype)
        return Entry(where, KIND, shape, dtype, read, note=note)
    return Entry.stored(file, where, KIND, shape, dtype, begin, note)


def _find_bytes(tensor: OnnxTensor, model: InputFile) -> tuple[RandomAccessBytes, int, int | None]:
    if tensor.raw is not None and not tensor.external:
        return tensor.raw.file, tensor.raw.begin, tensor.raw.size
    file = _external_file(model, tensor.external.get("location", ""))
    length = tensor.external.get("length")
    offset = _parse_digits(tensor.external.get("offset", "0"))
    return file, offset, _parse_digits(length) if length else None


def _parse_digits(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ValueError(f"{text!r:.50} as an offset or a length")
    return int(text)


def _read_half_bytes(
    file: RandomAccessBytes, begin: int, shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    """Two numbers in each byte, the lower half first."""
    count = math.prod(shape)
    raw = file.array("uint8", (-(-count // 2),), begin)
    halves = np.stack([raw & 15, raw >> 4], axis=-1).reshape(-1)[:count].reshape(shape)
    if dtype.name == "int4":
        halves = (halves ^ 8).astype(np.int8) - np.int8(8)
    return halves.view(dtype) if dtype.name.startswith("float") else halves.astype(dtype)


def _read_listed(tensor: OnnxTensor, dtype: np.dtype) -> np.ndarray:
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
            pieces.append(np.array([to_signed(value)]))
        elif number in (_FLOAT_DATA, _DOUBLE_DATA):
            pieces.append(np.frombuffer(value.content(), "<f4" if number == _FLOAT_DATA else "<f8"))
        else:
            pieces.append(value.varints())
    return np.concatenate(pieces) if pieces else np.empty(0)
