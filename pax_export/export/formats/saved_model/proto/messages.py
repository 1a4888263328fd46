"""Messages of SavedModels and checkpoints: the fields that are written, tensors, nodes, functions.

The names and numbers are those of TensorFlow's ``.proto`` files, which never change their meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from pax_export._foundations.types import DTypeLike, HasShape
from pax_export._foundations.wire import TENSORFLOW_DTYPES, Map, Schema
from pax_export.export.artifact.dimensions import name_of

#: The release of TensorFlow that has these messages, and its version of graphs.
TENSORFLOW, GRAPH_VERSION = "2.21.0", 2474
Message: TypeAlias = dict[str, Any]


class Dtype(int):
    """A dtype by its number."""


#: Members of `DataType`: float32 and dtypes that numpy lacks.
FLOAT, STRING, RESOURCE = map(Dtype, (1, 7, 20))
#: `SaverDef.CheckpointFormatVersion.V2`
SAVER_VERSION = 2

SHAPE = Schema(dim=(2, Schema(size=1)), unknown_rank=3)
_VERSIONS = Schema(producer=1, min_consumer=2)

# Attributes and nodes
TENSOR = Schema(dtype=1, tensor_shape=(2, SHAPE), tensor_content=4, string_val=8)
_FUNCTION = Schema(name=1)
_LIST = Schema(s=2, i=3, f=4, b=5, type=6, shape=(7, SHAPE), func=(9, _FUNCTION))
ATTRIBUTE = Schema(
    alternatives=True,
    list=(1, _LIST), s=2, i=3, f=(4, "<f"), b=5, type=6, shape=(7, SHAPE), tensor=(8, TENSOR),
    func=(10, _FUNCTION),
)  # fmt: skip
_NODE = Schema(name=1, op=2, input=3, attr=(5, Map(ATTRIBUTE)))

# Functions
_HANDLE = Schema(dtype=1, shape=(2, SHAPE))
_ARGUMENT = Schema(name=1, type=3, handle_data=(7, _HANDLE))
_OPERATION = Schema(
    name=1, input_arg=(2, _ARGUMENT), output_arg=(3, _ARGUMENT), is_stateful=17, control_output=20
)
_FUNCTION_DEF = Schema(
    signature=(1, _OPERATION), node_def=(3, _NODE), ret=(4, Map()), control_ret=(6, Map()),
    arg_attr=(7, Map(Schema(attr=(1, Map(ATTRIBUTE))))),
)  # fmt: skip
_GRADIENT = Schema(gradient_func=1, registered_op_type=2)
_LIBRARY = Schema(function=(1, _FUNCTION_DEF), registered_gradients=(3, _GRADIENT))
GRAPH = Schema(node=(1, _NODE), library=(2, _LIBRARY), versions=(4, _VERSIONS))

# Objects
_CHILD = Schema(node_id=1, local_name=2)
_VARIABLE = Schema(dtype=1, shape=(2, SHAPE), trainable=3, name=6)
_BARE_FUNCTION = Schema(
    concrete_function_name=1, argument_keywords=2, allowed_positional_arguments=3
)
_OBJECT = Schema(
    children=(1, _CHILD),
    user_object=(4, Schema(identifier=1, version=(2, _VERSIONS))),
    variable=(7, _VARIABLE),
    bare_concrete_function=(8, _BARE_FUNCTION),
    resource=(10, Schema()),
    captured_tensor=(12, Schema(name=1, concrete_function=2)),
)
_VALUE = Schema(
    alternatives=True,
    none_value=(1, Schema()),
    tensor_spec_value=(33, Schema(name=1, shape=(2, SHAPE), dtype=3)),
)
_VALUES = Schema(values=(1, _VALUE))
_VALUE.add(list_value=(51, _VALUES), tuple_value=(52, _VALUES))
_VALUE.add(dict_value=(53, Schema(fields=(1, Map(_VALUE)))))
_CONCRETE = Schema(
    bound_inputs=2, canonicalized_input_signature=(3, _VALUE), output_signature=(4, _VALUE)
)
_OBJECTS = Schema(nodes=(1, _OBJECT), concrete_functions=(2, Map(_CONCRETE)))

# The file saved_model.pb
_META = Schema(tags=4, tensorflow_version=5, stripped_default_attrs=7)
_SAVER = Schema(filename_tensor_name=1, save_tensor_name=2, restore_op_name=3, version=7)
_TENSOR_INFO = Map(Schema(name=1, dtype=2, tensor_shape=(3, SHAPE)))
_SIGNATURE = Schema(inputs=(1, _TENSOR_INFO), outputs=(2, _TENSOR_INFO), method_name=3)
_META_GRAPH = Schema(
    meta_info_def=(1, _META), graph_def=(2, GRAPH), saver_def=(3, _SAVER),
    signature_def=(5, Map(_SIGNATURE)), object_graph_def=(7, _OBJECTS),
)  # fmt: skip
SAVED_MODEL = Schema(saved_model_schema_version=1, meta_graphs=(2, _META_GRAPH))

# Checkpoints
_SAVED = Schema(name=1, full_name=2, checkpoint_key=3)
_TRACKED = Schema(
    children=(1, _CHILD), attributes=(2, _SAVED), has_checkpoint_values=(5, Schema(value=1))
)
TRACKED_OBJECTS = Schema(nodes=(1, _TRACKED))
BUNDLE_HEADER = Schema(num_shards=1, version=(3, _VERSIONS))
BUNDLE_ENTRY = Schema(dtype=1, shape=(2, SHAPE), offset=4, size=5, crc32c=(6, "<I"))


# --- tensors, nodes and functions -------------------------------------------


class FunctionName(str):
    """A function of the library by its name."""

    __slots__ = ()


#: The value of an attribute: a dtype, shape, number, text, function, array, or a list of some.
Attribute: TypeAlias = (
    Dtype | Message | bool | int | float | bytes | str | np.ndarray | Sequence["Attribute"]
)
#: The shape of a tensor of unknown rank.
ANY: Message = {"unknown_rank": True}


class Spec(NamedTuple):
    dtype: Dtype
    shape: Message

    @classmethod
    def of(cls, struct: HasShape) -> Spec:
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
_NUMBERS = {name: number for number, name in TENSORFLOW_DTYPES.items()}


def dtype_number(dtype: DTypeLike) -> Dtype:
    return Dtype(21 if dtype == VARIANT else _NUMBERS[name_of(dtype)])


def shape(sizes: Iterable[int]) -> Message:
    return {"dim": [{"size": size} for size in sizes]}


def add_node(
    nodes: list[Message],
    name: str,
    operation: str,
    inputs: Sequence[str] = (),
    **attributes: Attribute,
) -> Message:
    """Adds a node to those of a graph or of a function.

    Its inputs are tensors, then control inputs (``"^node"``). Its attributes are dtypes, shapes,
    numbers, bytes and functions, lists of them, or an array.
    """
    filled = {key: _encode_attribute(value) for key, value in attributes.items()}
    nodes.append({"name": name, "op": operation, "input": list(inputs), "attr": filled})
    return nodes[-1]


def _encode_attribute(value: Attribute) -> Message:
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

    def node(
        self, name: str, operation: str, inputs: Sequence[str], **attributes: Attribute
    ) -> None:
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
        self, name: str, operation: str, inputs: Sequence[str], **attributes: Attribute
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
