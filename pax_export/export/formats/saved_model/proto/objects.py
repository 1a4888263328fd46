"""What `tf.saved_model.load` gives: variables by name, and signatures.

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

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pax_export._optional import require
from pax_export.export.formats.saved_model.proto.functions import Function, Operand
from pax_export.export.formats.tf_functions import tensor_spec
from pax_export.export.lowering.variables import Variable
from pax_export.export.tracing import dtypes

_ROOT, _DICT, _LIST = "_generic_user_object", "trackable_dict_wrapper", "trackable_list_wrapper"
_SIGNATURES = "signature_map"


def checkpoint_key(name: str) -> str:
    """Where a checkpoint holds the value of a variable, as TensorFlow spells it."""
    escaped = name.replace(".", "..").replace("/", ".S")
    return f"leaves/{escaped}/.ATTRIBUTES/VARIABLE_VALUE"


def write_objects(
    graph: Any, variables: Sequence[Variable], signatures: Mapping[str, Sequence[Function]]
) -> None:
    """Fills in the objects.

    Args:
        graph: a `SavedObjectGraph`.
        variables: all of them.
        signatures: by key, the functions that `write_functions` made of it.
    """
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
        _variable(graph.nodes.add().variable, variable)
    for function in (*(signatures[key][0] for key in keys), *kept.values()):
        node = graph.nodes.add().bare_concrete_function
        node.concrete_function_name = function.name
        node.argument_keywords.extend(function.arguments)
        node.allowed_positional_arguments = 0 if function.by_keyword else len(function.arguments)
    for functions in signatures.values():
        for function in functions:
            _concrete_function(graph, function, first)


def write_checkpoint_objects(variables: Sequence[Variable], graph: Any) -> bytes:
    """The objects as a checkpoint names them.

    Args:
        variables: all of them.
        graph: the `SavedObjectGraph` of the model.

    Returns:
        A `TrackableObjectGraph`, serialised.
    """
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


def _variable(message: Any, variable: Variable) -> None:
    spec = tensor_spec(None, dtypes.struct_of(variable.value))
    message.dtype, message.name = spec.dtype.as_datatype_enum, variable.name
    message.shape.CopyFrom(spec.shape.as_proto())
    message.trainable = variable.trainable


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
