"""The object graph of a SavedModel, and the graph for servers.

Objects are numbered, and each has its children by name. The root has

    leaves                  the variables, a dict
    variables               the same as a list
    trainable_variables     the trainable ones
    signatures              functions by signature key
    gradients               gradients that have gradients, by signature key
    initializer             variables computed at loading, and their function; optional

The graph in a checkpoint has the same numbers, and the key of each variable's value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pax_export.export.formats.saved_model.proto import messages
from pax_export.export.formats.saved_model.proto.functions import GraphFunction, Operand
from pax_export.export.formats.saved_model.proto.messages import (
    ANY,
    RESOURCE,
    STRING,
    Message,
    Spec,
    add_call,
    add_node,
    shape,
)
from pax_export.export.lowering.variables import Variable
from pax_export.export.tracing.names import legal_names

_ROOT, _DICT, _LIST = "_generic_user_object", "trackable_dict_wrapper", "trackable_list_wrapper"
_SIGNATURES = "signature_map"


def checkpoint_key(name: str) -> str:
    escaped = name.replace(".", "..").replace("/", ".S")
    return f"leaves/{escaped}/.ATTRIBUTES/VARIABLE_VALUE"


def saved_objects(
    variables: Sequence[Variable],
    signatures: Mapping[str, Sequence[GraphFunction]],
    initializer: Sequence[GraphFunction] = (),
) -> Message:
    """Returns the objects of a SavedModel.

    `signatures` are results of `SignatureWriter`, `initializer` that of `write_initializer`.
    """
    first = 6 + bool(initializer)  # after the root and its children
    every = {each.name: first + index for index, each in enumerate(variables)}
    computed = {each.name: every[each.name] for each in variables if each.computed_from is not None}
    by_name = {name: number for name, number in every.items() if name not in computed}
    numbers = list(by_name.values())
    trainable = [every[each.name] for each in variables if each.trainable]
    after = first + len(variables)
    keys = {key: after + index for index, key in enumerate(sorted(signatures))}
    gradients = {key: each for key in keys for each in signatures[key] if each.kept}
    after += len(keys)
    parts = {
        "leaves": (_DICT, by_name),
        "variables": (_LIST, _number_children(numbers)),
        "trainable_variables": (_LIST, _number_children(trainable)),
        "signatures": (_SIGNATURES, keys),
        "gradients": (_DICT, {key: after + index for index, key in enumerate(gradients)}),
    }
    names = [*parts, *["initializer"] * bool(initializer)]
    nodes = [_user_object(_ROOT, {name: number for number, name in enumerate(names, 1)})]
    nodes += (_user_object(kind, children) for kind, children in parts.values())
    if initializer:
        after += len(gradients)
        own = {"_initialize": after, "_create_resource": after + 1}
        nodes.append({"resource": {}, "children": _children(computed | own)})
    for each in variables:
        about = {"name": each.name, "trainable": each.trainable}
        nodes.append({"variable": {**Spec.of(each.value)._asdict(), **about}})
    for function in (*(signatures[key][0] for key in keys), *gradients.values(), *initializer):
        # Signatures with several inputs have no order, as in TensorFlow's own files.
        positional = len(function.arguments)
        bare = {
            "concrete_function_name": function.name,
            "argument_keywords": list(function.arguments),
            "allowed_positional_arguments": 0
            if function.by_keyword and positional > 1
            else positional,
        }
        nodes.append({"bare_concrete_function": bare})
    functions = [each for group in (*signatures.values(), initializer) for each in group]
    concrete = {each.name: _concrete_function(nodes, each, first) for each in functions}
    return {"nodes": nodes, "concrete_functions": concrete}


def tracked_objects(variables: Sequence[Variable], objects: Message) -> bytes:
    """The same objects as a checkpoint names them, serialized."""
    saved = iter(variables)
    nodes: list[Message] = []
    for node in objects["nodes"]:
        if "captured_tensor" in node:
            continue
        tracked: Message = {"children": node.get("children"), "has_checkpoint_values": {}}
        variable = next(saved) if "variable" in node else None
        if variable is not None and variable.computed_from is None:
            about = {"name": "VARIABLE_VALUE", "full_name": variable.name}
            tracked["attributes"] = [{**about, "checkpoint_key": checkpoint_key(variable.name)}]
            tracked["has_checkpoint_values"] = {"value": True}
        nodes.append(tracked)
    return messages.TRACKED_OBJECTS.encode({"nodes": nodes})


def _number_children(numbers: Iterable[int]) -> dict[str, int]:
    return {str(index): number for index, number in enumerate(numbers)}


def _user_object(kind: str, children: Mapping[str, int]) -> Message:
    version = {"producer": 1, "min_consumer": 1}
    return {
        "children": _children(children),
        "user_object": {"identifier": kind, "version": version},
    }


def _children(numbers: Mapping[str, int]) -> list[Message]:
    return [{"node_id": at, "local_name": name} for name, at in numbers.items()]


def _concrete_function(nodes: list[Message], function: GraphFunction, first: int) -> Message:
    """Returns the call specification of a function, and the numbers of its captures."""
    captured = [_captured(nodes, function, operand, first) for operand in function.captured]
    inputs = {name: _structured_value(name, spec) for name, spec in function.arguments.items()}
    found = {name: _structured_value(name, spec) for name, spec in function.results.items()}
    if function.by_keyword:
        positional, keyword = [], inputs
        results = {"dict_value": {"fields": found}}
    else:
        positional, keyword = list(inputs.values()), {}
        results = {"list_value": {"values": list(found.values())}}
    if function.gives_one:
        (results,) = found.values()
    arguments = [{"tuple_value": {"values": positional}}, {"dict_value": {"fields": keyword}}]
    return {
        "bound_inputs": captured,
        "canonicalized_input_signature": {"tuple_value": {"values": arguments}},
        "output_signature": results,
    }


def _captured(nodes: list[Message], function: GraphFunction, operand: Operand, first: int) -> int:
    if function.captured_from is None:
        return first + operand.place
    tensor = {"name": f"{operand.name}:0", "concrete_function": function.captured_from}
    nodes.append({"captured_tensor": tensor})
    return len(nodes) - 1


def _structured_value(name: str, spec: Spec | None) -> Message:
    if spec is None:
        return {"none_value": {}}
    return {"tensor_spec_value": {"name": name, **spec._asdict()}}


_CALL = "StatefulPartitionedCall"
#: TensorFlow's name of the operation that runs after variables are restored.
_INITIALIZE = "__saved_model_init_op"


def meta_graph(
    library: Message,
    variables: Sequence[Variable],
    signatures: Mapping[str, Sequence[GraphFunction]],
    initializer: Sequence[GraphFunction] = (),
) -> Message:
    """Returns the graph for sessions and servers, which do not use objects.

    It has the variables, a call of each signature with a placeholder per input, operations that
    save and restore the variables, and those that compute variables after that. Names are
    TensorFlow's own, because C programs use them.
    """
    nodes: list[Message] = []
    specs = [Spec.of(each.value) for each in variables]
    for index, spec in enumerate(specs):
        name = _handle_name(index)  # the TFLite converter looks for the node by its shared name
        add_node(nodes, name, "VarHandleOp", **spec._asdict(), shared_name=name.encode())
    calls = {}
    names = [f"{_CALL}_{number}" if number else _CALL for number in range(len(signatures))]
    arguments = [(key, each) for key in signatures for each in signatures[key][0].arguments]
    # `encode(text_x)` and `encode_text(x)` would have the same placeholder.
    distinct = legal_names([*names, *(f"{key}_{each}" for key, each in arguments)])[len(names) :]
    placeholders = dict(zip(arguments, distinct))
    for name, (key, functions) in zip(names, signatures.items()):
        operands = {each: placeholders[key, each] for each in functions[0].arguments}
        calls[key] = _add_signature(nodes, operands, name, functions[0])
    for function in initializer[:1]:
        operands = {_handle_name(operand.place): RESOURCE for operand in function.captured}
        add_call(nodes, "initialize", function.name, operands, [])
        calls[_INITIALIZE] = {"outputs": {_INITIALIZE: {"name": "initialize", "tensor_shape": ANY}}}
    saver = _add_saver(nodes, variables, specs)
    versions = {"producer": messages.GRAPH_VERSION}
    return {
        "meta_info_def": {
            "tags": ["serve"],
            "tensorflow_version": messages.TENSORFLOW,
            "stripped_default_attrs": True,
        },
        "graph_def": {"node": nodes, "library": library, "versions": versions},
        "signature_def": calls,
        "saver_def": saver,
    }


def _handle_name(index: int) -> str:
    return f"variables/{index}"


def _add_signature(
    nodes: list[Message], placeholders: Mapping[str, str], name: str, function: GraphFunction
) -> Message:
    """Adds a call; returns the message of the signature."""
    inputs, outputs, operands = {}, {}, {}
    for argument, spec in function.arguments.items():
        placeholder = placeholders[argument]
        add_node(nodes, placeholder, "Placeholder", **spec._asdict())
        inputs[argument] = _tensor_info(f"{placeholder}:0", spec)
        operands[placeholder] = spec.dtype
    operands |= {_handle_name(operand.place): RESOURCE for operand in function.captured}
    dtypes = [spec.dtype for spec in function.results.values()]
    add_call(nodes, name, function.name, operands, dtypes)
    for index, (result, spec) in enumerate(function.results.items()):
        outputs[result] = _tensor_info(f"{name}:{index}", spec)
    return {"inputs": inputs, "outputs": outputs, "method_name": "tensorflow/serving/predict"}


def _tensor_info(name: str, spec: Spec) -> Message:
    return {"name": name, "dtype": spec.dtype, "tensor_shape": spec.shape}


def _add_saver(
    nodes: list[Message], variables: Sequence[Variable], specs: Sequence[Spec]
) -> Message:
    """Adds operations that restore variables from a checkpoint, and save them."""
    indices = [index for index, each in enumerate(variables) if each.computed_from is None]
    keys = [checkpoint_key(variables[index].name) for index in indices]
    dtypes = [specs[index].dtype for index in indices]
    add_node(nodes, "saver/file", "Placeholder", dtype=STRING, shape=shape([]))
    written = []
    if indices:  # no kernel saves or restores nothing
        _add_texts(nodes, "saver/names", keys)
        _add_texts(nodes, "saver/whole", [""] * len(keys))
        inputs = ["saver/file", "saver/names", "saver/whole"]
        add_node(nodes, "saver/values", "RestoreV2", inputs, dtypes=dtypes)
        reads = [f"saver/read/{index}" for index in indices]
        add_node(nodes, "saver/write", "SaveV2", [*inputs, *reads], dtypes=dtypes)
        written = ["^saver/write"]
    for number, (index, dtype) in enumerate(zip(indices, dtypes)):
        value = [_handle_name(index), f"saver/values:{number}"]
        add_node(nodes, f"saver/restore/{index}", "AssignVariableOp", value, dtype=dtype)
        add_node(nodes, f"saver/read/{index}", "ReadVariableOp", [_handle_name(index)], dtype=dtype)
    add_node(nodes, "saver/restore", "NoOp", [f"^saver/restore/{index}" for index in indices])
    add_node(nodes, "saver/save", "Identity", ["saver/file", *written], T=STRING)
    return {
        "filename_tensor_name": "saver/file:0",
        "save_tensor_name": "saver/save:0",
        "restore_op_name": "saver/restore",
        "version": messages.SAVER_VERSION,
    }


def _add_texts(nodes: list[Message], name: str, texts: list[str]) -> None:
    node = add_node(nodes, name, "Const", dtype=STRING)
    value = {"dtype": STRING, "tensor_shape": shape([len(texts)]), "string_val": texts}
    node["attr"]["value"] = {"tensor": value}
