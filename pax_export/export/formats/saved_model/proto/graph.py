"""The graph that sessions and servers run, which know no objects.

It holds the variables, a call of each signature with a placeholder for each
input, and what reads the variables from a checkpoint and writes them to one.
Names are those that TensorFlow gives, since programs in C ask for them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pax_export.export.formats.saved_model.proto.functions import Function
from pax_export.export.formats.saved_model.proto.nodes import add_call, add_node
from pax_export.export.formats.saved_model.proto.objects import checkpoint_key
from pax_export.export.formats.tf_functions import tensor_spec, tensorflow
from pax_export.export.lowering.variables import Variable
from pax_export.export.tracing import dtypes as _dtypes

_CALL = "StatefulPartitionedCall"


def write_graph(
    meta_graph: Any, variables: Sequence[Variable], signatures: Mapping[str, Sequence[Function]]
) -> None:
    """Fills in the graph, the signatures and how variables are restored.

    Args:
        meta_graph: a `MetaGraphDef`.
        variables: all of them.
        signatures: by key, the functions that `write_functions` made of it.
    """
    tf = tensorflow("to_saved_model")
    versions = meta_graph.graph_def.versions
    versions.producer = tf.version.GRAPH_DEF_VERSION
    versions.min_consumer = tf.version.GRAPH_DEF_VERSION_MIN_CONSUMER
    specs = [tensor_spec(each.name, _dtypes.struct_of(each.value)) for each in variables]
    nodes = meta_graph.graph_def.node
    for place, spec in enumerate(specs):
        add_node(
            nodes, _handle(place), "VarHandleOp",
            dtype=spec.dtype, shape=spec.shape, shared_name=spec.name.encode(),
        )  # fmt: skip
    for number, (key, functions) in enumerate(signatures.items()):
        name = f"{_CALL}_{number}" if number else _CALL
        _call(nodes, meta_graph.signature_def[key], key, name, functions[0])
    _saver(nodes, meta_graph.saver_def, specs)


def _handle(place: int) -> str:
    return f"variables/{place}"


def _call(nodes: Any, signature: Any, key: str, name: str, function: Function) -> None:
    signature.method_name = "tensorflow/serving/predict"
    given = {}
    for argument, spec in function.arguments.items():
        placeholder = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', key)}_{argument}"
        add_node(nodes, placeholder, "Placeholder", dtype=spec.dtype, shape=spec.shape)
        _tensor_info(signature.inputs[argument], f"{placeholder}:0", spec)
        given[placeholder] = spec.dtype
    resource = tensorflow("to_saved_model").resource
    given |= {_handle(operand.place): resource for operand in function.captured}
    results = [spec.dtype for spec in function.results.values()]
    add_call(nodes, name, function.name, given, results)
    for place, (result, spec) in enumerate(function.results.items()):
        _tensor_info(signature.outputs[result], f"{name}:{place}", spec)


def _tensor_info(message: Any, name: str, spec: Any) -> None:
    message.name, message.dtype = name, spec.dtype.as_datatype_enum
    message.tensor_shape.CopyFrom(spec.shape.as_proto())


def _saver(nodes: Any, saver: Any, specs: Sequence[Any]) -> None:
    """What reads the variables of a checkpoint whose path is given, and writes them to one."""
    tf = tensorflow("to_saved_model")
    dtypes = [spec.dtype for spec in specs]
    add_node(nodes, "saver/file", "Placeholder", dtype=tf.string, shape=tf.TensorShape([]))
    _texts(nodes, "saver/names", [checkpoint_key(spec.name) for spec in specs])
    _texts(nodes, "saver/whole", [""] * len(specs))
    given = ["saver/file", "saver/names", "saver/whole"]
    add_node(nodes, "saver/values", "RestoreV2", given, dtypes=dtypes)
    for place, dtype in enumerate(dtypes):
        value = [_handle(place), f"saver/values:{place}"]
        add_node(nodes, f"saver/restore/{place}", "AssignVariableOp", value, dtype=dtype)
        add_node(nodes, f"saver/read/{place}", "ReadVariableOp", [_handle(place)], dtype=dtype)
    places = range(len(specs))
    add_node(nodes, "saver/restore", "NoOp", [f"^saver/restore/{place}" for place in places])
    reads = [f"saver/read/{place}" for place in places]
    add_node(nodes, "saver/write", "SaveV2", [*given, *reads], dtypes=dtypes)
    add_node(nodes, "saver/save", "Identity", ["saver/file", "^saver/write"], T=tf.string)
    saver.filename_tensor_name = "saver/file:0"
    saver.save_tensor_name = "saver/save:0"
    saver.restore_op_name = "saver/restore"
    saver.version = saver.V2


def _texts(nodes: Any, name: str, texts: Sequence[str]) -> None:
    tf = tensorflow("to_saved_model")
    node = add_node(nodes, name, "Const", dtype=tf.string)
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(texts, tf.string, [len(texts)]))
