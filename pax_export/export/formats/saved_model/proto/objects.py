"""What `tf.saved_model.load` gives, variables by name and signatures; and the graph of servers.

Objects are numbered, and each knows its children by name.  The root has

    leaves                  the variables, a dict
    variables               the same as a list
    trainable_variables     those of them that are trained
    signatures              functions by the keys of the signatures
    gradients               those of their gradients that have gradients, likewise

The graph that a checkpoint holds has the same numbers; it says under which key
the value of each variable lies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pax_export._optional import require
from pax_export.export.formats.saved_model.proto.functions import (
    Function,
    Operand,
    add_call,
    add_node,
)
from pax_export.export.formats.tf_functions import tensor_spec, tensorflow
from pax_export.export.lowering.variables import Variable
from pax_export.export.tracing.dtypes import struct_of

_ROOT, _DICT, _LIST = "_generic_user_object", "trackable_dict_wrapper", "trackable_list_wrapper"
_SIGNATURES = "signature_map"


def checkpoint_key(name: str) -> str:
    """Where a checkpoint holds the value of a variable, as TensorFlow spells it."""
    escaped = name.replace(".", "..").replace("/", ".S")
    return f"leaves/{escaped}/.ATTRIBUTES/VARIABLE_VALUE"


def write_objects(
    graph: Any, variables: Sequence[Variable], signatures: Mapping[str, Sequence[Function]]
) -> None:
    """Fills in a `SavedObjectGraph`; `signatures` are what `SignatureWriter` made."""
    first = 6  # after the root and its children
    numbers = [first + place for place in range(len(variables))]
    by_name = {each.name: number for each, number in zip(variables, numbers)}
    trainable = [number for each, number in zip(variables, numbers) if each.trainable]
    after = first + len(variables)
    keys = {key: after + place for place, key in enumerate(sorted(signatures))}
    kept = {key: each for key in keys for each in signatures[key] if each.kept}
    after += len(keys)
    parts = {
        "leaves": (_DICT, by_name),
        "variables": (_LIST, _numbered(numbers)),
        "trainable_variables": (_LIST, _numbered(trainable)),
        "signatures": (_SIGNATURES, keys),
        "gradients": (_DICT, {key: after + place for place, key in enumerate(kept)}),
    }
    _user_object(graph, _ROOT, {name: place for place, name in enumerate(parts, 1)})
    for kind, children in parts.values():
        _user_object(graph, kind, children)
    for variable in variables:
        spec = tensor_spec(variable.name, struct_of(variable.value))
        message = graph.nodes.add().variable
        message.dtype, message.name = spec.dtype.as_datatype_enum, spec.name
        message.shape.CopyFrom(spec.shape.as_proto())
        message.trainable = variable.trainable
    for function in (*(signatures[key][0] for key in keys), *kept.values()):
        node = graph.nodes.add().bare_concrete_function
        node.concrete_function_name = function.name
        node.argument_keywords.extend(function.arguments)
        node.allowed_positional_arguments = 0 if function.by_keyword else len(function.arguments)
    for functions in signatures.values():
        for function in functions:
            _concrete_function(graph, function, first)


def write_checkpoint_objects(variables: Sequence[Variable], graph: Any) -> bytes:
    """The objects of a `SavedObjectGraph` as a checkpoint names them, serialised."""
    messages = require(
        "tensorflow.core.protobuf.trackable_object_graph_pb2", "tensorflow", "to_saved_model"
    )
    written, left = messages.TrackableObjectGraph(), iter(variables)
    for node in graph.nodes:
        kind = node.WhichOneof("kind")
        if kind == "captured_tensor":
            continue
        made = written.nodes.add()
        for child in node.children:
            made.children.add(node_id=child.node_id, local_name=child.local_name)
        if kind == "variable":
            name = next(left).name
            made.attributes.add(
                name="VARIABLE_VALUE", full_name=name, checkpoint_key=checkpoint_key(name)
            )
        made.has_checkpoint_values.value = kind == "variable"
    return written.SerializeToString(deterministic=True)


def _numbered(numbers: Iterable[int]) -> dict[str, int]:
    return {str(place): number for place, number in enumerate(numbers)}


def _user_object(graph: Any, kind: str, children: Mapping[str, int]) -> None:
    node = graph.nodes.add()
    for name, number in children.items():
        node.children.add(node_id=number, local_name=name)
    node.user_object.identifier = kind
    node.user_object.version.producer = node.user_object.version.min_consumer = 1


def _concrete_function(graph: Any, function: Function, first: int) -> None:
    """How a function is called, and the numbers of what it captures."""
    message = graph.concrete_functions[function.name]
    for operand in function.captured:
        message.bound_inputs.append(_captured(graph, function, operand, first))
    positional = message.canonicalized_input_signature.tuple_value.values.add().tuple_value
    keyword = message.canonicalized_input_signature.tuple_value.values.add().dict_value
    positional.SetInParent()
    keyword.SetInParent()
    if function.by_keyword:
        results = message.output_signature.dict_value
        for name, spec in function.arguments.items():
            _fill(keyword.fields[name], spec)
        for name, spec in function.results.items():
            _fill(results.fields[name], spec)
    else:
        results = message.output_signature.list_value
        for spec in function.arguments.values():
            _fill(positional.values.add(), spec)
        for spec in function.results.values():
            _fill(results.values.add(), spec)
    results.SetInParent()


def _captured(graph: Any, function: Function, operand: Operand, first: int) -> int:
    if function.captured_from is None:
        return first + operand.place
    captured = graph.nodes.add().captured_tensor
    captured.name, captured.concrete_function = f"{operand.name}:0", function.captured_from
    return len(graph.nodes) - 1


def _fill(message: Any, spec: Any) -> None:
    if spec is None:
        message.none_value.SetInParent()
    else:
        message.tensor_spec_value.name = spec.name
        message.tensor_spec_value.shape.CopyFrom(spec.shape.as_proto())
        message.tensor_spec_value.dtype = spec.dtype.as_datatype_enum


_CALL = "StatefulPartitionedCall"


def write_graph(
    meta_graph: Any, variables: Sequence[Variable], signatures: Mapping[str, Sequence[Function]]
) -> None:
    """Fills in a `MetaGraphDef`, which sessions and servers run that know no objects.

    It holds the variables, a call of each signature with a placeholder for each
    input, and what reads the variables from a checkpoint and writes them to one.
    Names are those that TensorFlow gives, since programs in C ask for them.
    """
    tf = tensorflow("to_saved_model")
    versions = meta_graph.graph_def.versions
    versions.producer = tf.version.GRAPH_DEF_VERSION
    versions.min_consumer = tf.version.GRAPH_DEF_VERSION_MIN_CONSUMER
    specs = [tensor_spec(each.name, struct_of(each.value)) for each in variables]
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
    kinds = [spec.dtype for spec in specs]
    add_node(nodes, "saver/file", "Placeholder", dtype=tf.string, shape=tf.TensorShape([]))
    _texts(nodes, "saver/names", [checkpoint_key(spec.name) for spec in specs])
    _texts(nodes, "saver/whole", [""] * len(specs))
    given = ["saver/file", "saver/names", "saver/whole"]
    add_node(nodes, "saver/values", "RestoreV2", given, dtypes=kinds)
    for place, dtype in enumerate(kinds):
        value = [_handle(place), f"saver/values:{place}"]
        add_node(nodes, f"saver/restore/{place}", "AssignVariableOp", value, dtype=dtype)
        add_node(nodes, f"saver/read/{place}", "ReadVariableOp", [_handle(place)], dtype=dtype)
    places = range(len(specs))
    add_node(nodes, "saver/restore", "NoOp", [f"^saver/restore/{place}" for place in places])
    reads = [f"saver/read/{place}" for place in places]
    add_node(nodes, "saver/write", "SaveV2", [*given, *reads], dtypes=kinds)
    add_node(nodes, "saver/save", "Identity", ["saver/file", "^saver/write"], T=tf.string)
    saver.filename_tensor_name = "saver/file:0"
    saver.save_tensor_name = "saver/save:0"
    saver.restore_op_name = "saver/restore"
    saver.version = saver.V2


def _texts(nodes: Any, name: str, texts: Sequence[str]) -> None:
    tf = tensorflow("to_saved_model")
    node = add_node(nodes, name, "Const", dtype=tf.string)
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(texts, tf.string, [len(texts)]))
