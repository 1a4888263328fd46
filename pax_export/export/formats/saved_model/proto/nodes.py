"""Messages of tensors, nodes and functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pax_export._foundations.types import DTypeLike
from pax_export._foundations.wire import TENSORFLOW_DTYPES
from pax_export.export.artifact.dimensions import name_of
from pax_export.export.formats.saved_model.proto import schemas

Message = dict[str, Any]
_NUMBERS = {name: number for number, name in TENSORFLOW_DTYPES.items()}


class Dtype(int):
    """A dtype by its number."""


class FunctionName(str):
    """A function of the library by its name."""

    __slots__ = ()


STRING, RESOURCE = Dtype(schemas.STRING), Dtype(schemas.RESOURCE)
#: The shape of a tensor of unknown rank.
ANY: Message = {"unknown_rank": True}


class Spec(NamedTuple):
    dtype: Dtype
    shape: Message

    @classmethod
    def of(cls, struct: Any) -> Spec:
        """Returns the spec of an array or struct; symbolic sizes are unknown, as is no shape."""
        if struct.shape is None:
            return cls.unknown(struct.dtype)
        sizes = [int(size) if isinstance(size, (int, np.integer)) else -1 for size in struct.shape]
        return cls(dtype_number(struct.dtype), shape(sizes))

    @classmethod
    def unknown(cls, dtype: DTypeLike) -> Spec:
        """Returns the spec of a tensor of any shape."""
        return cls(dtype_number(dtype), ANY)


#: The dtype of a list of tensors, which numpy has not.
VARIANT = np.dtype("V1")


def dtype_number(dtype: DTypeLike) -> Dtype:
    if dtype == VARIANT:
        return Dtype(schemas.VARIANT)
    return Dtype(_NUMBERS[name_of(dtype)])


def shape(sizes: Iterable[int]) -> Message:
    return {"dim": [{"size": size} for size in sizes]}


def add_node(
    nodes: list[Message],
    name: str,
    operation: str,
    inputs: Sequence[str] = (),
    **attributes: object,
) -> Message:
    """Adds a node to those of a graph or of a function.

    Its inputs are tensors, then control inputs (``"^node"``). Its attributes are dtypes, shapes,
    numbers, bytes and functions, lists of them, or an array.
    """
    filled = {key: _encode_attribute(value) for key, value in attributes.items()}
    nodes.append({"name": name, "op": operation, "input": list(inputs), "attr": filled})
    return nodes[-1]


def _encode_attribute(value: object) -> Message:
    if isinstance(value, np.ndarray):
        return {"tensor": {**_tensor_spec(value), "tensor_content": value.tobytes()}}
    if isinstance(value, str) and not isinstance(value, FunctionName):
        return {"tensor": {"dtype": STRING, "tensor_shape": shape([]), "string_val": [value]}}
    if isinstance(value, FunctionName):
        return {"func": {"name": str(value)}}
    if isinstance(value, list):
        if value and isinstance(value[0], FunctionName):
            return {"list": {"func": [{"name": str(each)} for each in value]}}
        return {"list": {_FIELDS[type(value[0])]: value} if value else {}}
    return {_FIELDS[type(value)]: value}


def _tensor_spec(value: np.ndarray) -> Message:
    spec = Spec.of(value)
    return {"dtype": spec.dtype, "tensor_shape": spec.shape}


_FIELDS = {Dtype: "type", dict: "shape", bool: "b", int: "i", float: "f", bytes: "s"}


def add_call(
    nodes: list[Message],
    name: str,
    function: str,
    operands: Mapping[str, Dtype],
    results: Iterable[Dtype],
) -> None:
    """Adds a call of a function; `operands` are dtypes by tensors."""
    node = add_node(
        nodes, name, "StatefulPartitionedCall", list(operands),
        Tin=list(operands.values()), Tout=list(results),
    )  # fmt: skip
    node["attr"]["f"] = {"func": {"name": function}}


class Body:
    """A function of a library, written node by node.

    A tensor is called by the name of an argument, or ``node:output:number``.
    """

    def __init__(self, library: list[Message], name: str, stateful: bool = True):
        self._library, self._name = library, name
        self._signature: Message = {"name": name, "is_stateful": stateful}
        self._signature |= {"input_arg": [], "output_arg": [], "control_output": []}
        self._nodes: list[Message] = []
        self._function: Message = {"signature": self._signature, "node_def": self._nodes}
        self._function |= {"ret": {}, "control_ret": {}, "arg_attr": {}}
        library.append(self._function)

    def argument(self, name: str, spec: Spec) -> None:
        index = len(self._signature["input_arg"])
        self._signature["input_arg"].append({"name": name, "type": spec.dtype})
        attributes = {"_output_shapes": _encode_attribute([spec.shape])}
        self._function["arg_attr"][index] = {"attr": attributes}

    def resource(self, name: str, spec: Spec) -> None:
        argument = {"name": name, "type": RESOURCE, "handle_data": [spec._asdict()]}
        self._signature["input_arg"].append(argument)

    def node(self, name: str, operation: str, inputs: Sequence[str], **attributes: object) -> None:
        add_node(self._nodes, name, operation, inputs, **attributes)

    def extend(self, nodes: Iterable[Message]) -> None:
        """Adds nodes that were written elsewhere."""
        self._nodes.extend(nodes)

    def include(
        self, nodes: Iterable[Message], functions: Iterable[Message], tensors: Mapping[str, str]
    ) -> None:
        """Adds nodes that were written elsewhere, with functions, whose names follow its own.

        `tensors` are other names of inputs of the nodes.
        """
        for each in functions:
            signature = {**each["signature"], "name": self._name + each["signature"]["name"]}
            inside = [_with_functions_of(self._name, node) for node in each["node_def"]]
            self._library.append({**each, "signature": signature, "node_def": inside})
        for node in nodes:
            inputs = [tensors.get(each, each) for each in node["input"]]
            self._nodes.append({**_with_functions_of(self._name, node), "input": inputs})

    def call(
        self, name: str, function: str, operands: Mapping[str, Spec], results: Iterable[Spec]
    ) -> None:
        dtypes = {tensor: spec.dtype for tensor, spec in operands.items()}
        add_call(self._nodes, name, function, dtypes, [spec.dtype for spec in results])

    def effect(
        self, name: str, operation: str, inputs: Sequence[str], **attributes: object
    ) -> None:
        """Runs an operation for its side effects, even if its results are unused."""
        self.node(name, operation, inputs, **attributes)
        self._function["control_ret"][name] = name
        self._signature["control_output"].append(name)

    def result(self, name: str, tensor: str, spec: Spec) -> None:
        self._signature["output_arg"].append({"name": name, "type": spec.dtype})
        self._function["ret"][name] = tensor


def _with_functions_of(name: str, node: Message) -> Message:
    """A node that calls functions whose names follow this one."""
    attributes = {key: _after(name, value) for key, value in node["attr"].items()}
    return {**node, "attr": attributes}


def _after(name: str, attribute: Message) -> Message:
    called = attribute.get("list", attribute).get("func")
    if called is None:
        return attribute
    if isinstance(called, list):
        return {"list": {"func": [{"name": name + each["name"]} for each in called]}}
    return {"func": {"name": name + called["name"]}}
