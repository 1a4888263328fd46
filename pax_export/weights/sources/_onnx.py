"""Initializers and constants of an ONNX model, without the onnx package, which loads everything."""

from __future__ import annotations

from typing import Any

from pax_export._wire import Fields, Message, message, signed, whole
from pax_export.weights.sources._onnx_tensor import ExternalFiles, OnnxTensor, make_entry
from pax_export.weights.sources._reader import InputFile
from pax_export.weights.sources._source import Entry, Source, refuse_damaged

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
    fields, found = Fields(Message(file)), _ModelArrays(file)
    for graph in fields.messages(_GRAPH):
        found.add_graph(graph, "", 0)
    for function in map(Fields, fields.messages(_FUNCTION)):
        for node in function.messages(_FUNCTION_NODE):
            found.add_node(Fields(node), f"{''.join(function.texts(_NAME))}/", 0)
    metadata: dict[str, Any] = {"ir_version": fields.whole(_IR_VERSION)}
    metadata |= {"producer_name": fields.text(_PRODUCER)} if _PRODUCER in fields else {}
    metadata |= fields.mapping(_METADATA)
    metadata |= {"used_by": found.used_by, "settings": found.settings}
    return Source("onnx", file.where, found.entries, metadata=metadata)


class _ModelArrays:
    """The arrays of the graphs of a model."""

    def __init__(self, file: InputFile):
        self._file, self._external = file, ExternalFiles(file)
        self._left = _MOST_OF_NAMES
        self.entries: dict[str, Entry] = {}
        #: By name of an array: the operators that take it, as which input, in which node.
        self.used_by: dict[str, list[tuple[str, int, str]]] = {}
        #: By name of an array: what is set of the recurrent operators that take it.
        self.settings: dict[str, list[tuple[tuple[str, Any], ...]]] = {}

    def add_graph(self, graph: Message, path: str, depth: int) -> None:
        """The arrays of a graph; the path names the node and its branch."""
        if depth > _DEEPEST:
            raise ValueError("graphs in graphs without end")
        for number, value in graph.fields():
            if number == _INITIALIZER:
                self._add(OnnxTensor(message(value)), path, "")
            elif number == _NODE:
                self.add_node(Fields(message(value)), path, depth)
            elif number == _SPARSE:
                raise ValueError("a sparse initialiser, which is not read")

    def add_node(self, node: Fields, path: str, depth: int) -> None:
        """The arrays of a node, and how it uses others."""
        name, operator, inputs = node.text(_NODE_NAME), node.text(_OPERATOR), node.texts(_INPUT)
        attributes = [Fields(each) for each in node.messages(_ATTRIBUTE)]
        for place, used in enumerate(inputs):
            self.used_by.setdefault(used, []).append((operator, place, name))
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
        if tensor.is_text:
            return
        own = constant or tensor.name
        name = own if own not in self.entries else path + own
        self._left -= len(name) - len(own)
        if self._left < 0:
            raise ValueError("names without end")
        if name in self.entries:
            raise ValueError(f"two arrays with the name {name!r:.200}")
        where, note = f"{name} in {self._file.where}", "Constant" if constant else ""
        with refuse_damaged(where, KIND):
            self.entries[name] = make_entry(where, KIND, tensor, self._external, note)


def _read_setting(attribute: Fields) -> tuple[str, Any]:
    """The name of an attribute, and its value as text: numbers and names, no arrays."""
    values = [*attribute.texts(_TEXT), *attribute.texts(_TEXTS)]
    values += [str(signed(whole(value))) for value in attribute.all(_WHOLE)]
    values += ["a number"] * len([*attribute.all(_FLOAT), *attribute.all(_FLOATS)])
    return attribute.text(_NAME), tuple(values)


def _read_constants(attribute: Fields) -> list[OnnxTensor]:
    """The array of a node Constant: a tensor, or numbers."""
    name = attribute.text(_NAME)
    if name == "value":
        return [OnnxTensor(each) for each in attribute.messages(_TENSOR)]
    if name not in _VALUES:
        return []
    values = attribute.all(_VALUES[name])
    return [OnnxTensor.of_numbers(values, many=name.endswith("s"), floats="float" in name)]
