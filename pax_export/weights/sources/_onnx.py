"""Initializers and constants of an ONNX model, without the onnx package, which loads everything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pax_export._wire import Message, message, signed, whole
from pax_export.weights.sources._onnx_tensor import ExternalFiles, OnnxTensor, entry
from pax_export.weights.sources._reader import InputFile
from pax_export.weights.sources._source import Entry, Source, refusing

KIND = "ONNX file"
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
#: Operators whose attributes decide what function their weights belong to.
_RECURRENT = ("LSTM", "GRU", "RNN")
_VALUES = {"value_float": 2, "value_int": 3, "value_floats": 7, "value_ints": 8}


def matches(file: InputFile) -> bool:
    """Whether a file is a model: it has a version and a graph, and nothing that no model has."""
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
    """The arrays of a model, those in files beside it too."""
    found = _ModelArrays(file, ExternalFiles(file))
    for number, value in Message(file).fields():
        if number == _GRAPH:
            found.graph(message(value), "", 0)
        elif number == _FUNCTION:
            found.function(message(value))
        elif number == _IR_VERSION:
            found.metadata["ir_version"] = whole(value)
        elif number == _PRODUCER:
            found.metadata["producer_name"] = message(value).text()
        elif number == _METADATA:
            texts = {at: message(text).text() for at, text in message(value).fields()}
            found.metadata[texts.get(1, "")] = texts.get(2, "")
    found.metadata["used_by"] = found.used_by
    found.metadata["settings"] = found.settings
    return Source("onnx", file.where, found.entries, metadata=found.metadata)


class _ModelArrays:
    """What a model holds, as it is gone through."""

    def __init__(self, file: InputFile, external: ExternalFiles):
        self._file, self._external = file, external
        self.entries: dict[str, Entry] = {}
        self.metadata: dict[str, Any] = {}
        self._left = _MOST_OF_NAMES
        #: By name of an array: the operators that take it, as which input, in which node.
        self.used_by: dict[str, list[tuple[str, int, str]]] = {}
        #: By name of an array: what is set of the recurrent operators that take it.
        self.settings: dict[str, list[tuple[tuple[str, Any], ...]]] = {}

    def graph(self, graph: Message, path: str, depth: int) -> None:
        """The arrays of a graph; the path names the node and its branch."""
        if depth > _DEEPEST:
            raise ValueError("graphs in graphs without end")
        for number, value in graph.fields():
            if number == _INITIALIZER:
                self._add(OnnxTensor(message(value)), path, "")
            elif number == _NODE:
                self._node(message(value), path, depth)
            elif number == _SPARSE:
                raise ValueError("a sparse initialiser, which is not read")

    def function(self, function: Message) -> None:
        """The constants of a function of the model."""
        name = "".join(message(value).text() for at, value in function.fields() if at == _NAME)
        for number, value in function.fields():
            if number == _FUNCTION_NODE:
                self._node(message(value), f"{name}/", 0)

    def _node(self, node: Message, path: str, depth: int) -> None:
        texts: dict[int, list[str]] = {_INPUT: [], _OUTPUT: [], _NODE_NAME: [""], _OPERATOR: [""]}
        attributes = []
        for number, value in node.fields():
            if number in texts:
                texts[number].append(message(value).text())
            elif number == _ATTRIBUTE:
                attributes.append(message(value))
        name, operator = texts[_NODE_NAME][-1], texts[_OPERATOR][-1]
        for place, used in enumerate(texts[_INPUT]):
            self.used_by.setdefault(used, []).append((operator, place, name))
        if operator in _RECURRENT:
            settings = tuple(sorted(_setting(attribute) for attribute in attributes))
            for used in texts[_INPUT][1:]:
                self.settings.setdefault(used, []).append((("operator", operator), *settings))
        for attribute in attributes:
            if operator == "Constant":
                for tensor in _constants(attribute):
                    self._add(tensor, path, (texts[_OUTPUT] or [name])[0])
            else:
                self._branches(attribute, f"{path}{name or operator}/", depth)

    def _branches(self, attribute: Message, path: str, depth: int) -> None:
        graphs, name = [], ""
        for number, value in attribute.fields():
            if number == _NAME:
                name = message(value).text()
            elif number in (_SUBGRAPH, _SUBGRAPHS):
                graphs.append(message(value))
        for graph in graphs:
            self.graph(graph, f"{path}{name}/", depth + 1)

    def _add(self, tensor: OnnxTensor, path: str, constant: str) -> None:
        if tensor.is_text:
            return
        own = constant or tensor.name
        name = own if own not in self.entries else path + own
        self._left -= len(name) - len(own)
        if self._left < 0:
            raise ValueError("names without end")
        if name in self.entries:
            raise ValueError(f"two arrays with the name {name!r:.200}")
        where = f"{name} in {self._file.where}"
        with refusing(where, KIND):
            self.entries[name] = entry(
                where, KIND, tensor, self._external, "Constant" if constant else ""
            )


def _setting(attribute: Message) -> tuple[str, Any]:
    """The name of an attribute, and its value as text: numbers and names, no arrays."""
    name, values = "", []
    for number, value in attribute.fields():
        if number == _NAME:
            name = message(value).text()
        elif number in (_TEXT, _TEXTS):
            values.append(message(value).text())
        elif number == _WHOLE:
            values.append(str(signed(whole(value))))
        elif number in (_FLOAT, _FLOATS):
            values.append("a number")
    return name, tuple(values)


def _constants(attribute: Message) -> Iterator[OnnxTensor]:
    """The array of a node Constant: a tensor, or numbers."""
    fields = list(attribute.fields())
    name = "".join(message(value).text() for number, value in fields if number == _NAME)
    if name == "value":
        yield from (OnnxTensor(message(value)) for number, value in fields if number == _TENSOR)
    elif name in _VALUES:
        values = [value for number, value in fields if number == _VALUES[name]]
        yield OnnxTensor.of_numbers(values, many=name.endswith("s"), floats="float" in name)
