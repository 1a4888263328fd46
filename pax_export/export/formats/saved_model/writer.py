"""Writes a SavedModel: variables, and one concrete function per signature."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from pax_export._errors import InvalidArgumentError
from pax_export._optional import require
from pax_export._tensorflow_log import quiet_save
from pax_export.export.formats.generated_files import generated_files_removed
from pax_export.export.formats.saved_model.checkpoint import write_checkpoint
from pax_export.export.formats.saved_model.proto import schemas
from pax_export.export.formats.saved_model.proto.functions import SignatureWriter, write_initializer
from pax_export.export.formats.saved_model.proto.nodes import Message
from pax_export.export.formats.saved_model.proto.objects import (
    meta_graph,
    saved_objects,
    tracked_objects,
)
from pax_export.export.formats.tf_functions import (
    make_function,
    make_gradient,
    make_stages,
    make_variables,
    make_whole,
    tensorflow,
)
from pax_export.export.lowering.lower import Call, Signature
from pax_export.export.lowering.variables import Store, Variable


def write(
    directory: Path, store: Store, signatures: Sequence[Signature], initializer: Call | None
) -> None:
    if any(each.processing for each in signatures):
        return _save_with_tensorflow(directory, store, signatures)
    library: Message = {"function": [], "registered_gradients": []}
    functions = {each.key: SignatureWriter(library, each, store).write() for each in signatures}
    first = () if initializer is None else write_initializer(library, initializer, store)
    objects = saved_objects(store.variables, functions, first)
    graph = meta_graph(library, store.variables, functions, first) | {"object_graph_def": objects}
    folder = directory / "variables"
    folder.mkdir()
    write_checkpoint(folder, store.stored, tracked_objects(store.variables, objects))
    model = {"saved_model_schema_version": 1, "meta_graphs": [graph]}
    with (directory / "saved_model.pb").open("wb") as file:
        file.writelines(schemas.SAVED_MODEL.pieces(model))
    return None


def _save_with_tensorflow(directory: Path, store: Store, signatures: Sequence[Signature]) -> None:
    """Saves by TensorFlow, because its functions may have tables, files and variables."""
    tf = tensorflow("to_saved_model")
    variables = make_variables(store)
    root = _make_root(tf, store.variables, variables)
    functions = {each.key: _make_signature(root, each, variables) for each in signatures}
    options = tf.saved_model.SaveOptions(
        experimental_custom_gradients=any(each.gradient for each in signatures)
    )
    try:
        with generated_files_removed(), quiet_save():
            tf.saved_model.save(root, str(directory), signatures=functions, options=options)
    except AssertionError as error:
        if "untracked" not in str(error):
            raise
        raise InvalidArgumentError(
            "A preprocessor or postprocessor uses a variable or a table that cannot be found in "
            "it.",
            got=str(error).splitlines()[0],
            write="a tf.Module with the variable or table as an attribute, and a method __call__",
        ) from error
    canonicalize(directory)


def _make_signature(root: Any, signature: Signature, variables: Sequence[Any]) -> Any:
    """The function to serve; its processors are attributes of the root, so that they are kept."""
    gradient = make_gradient(signature)
    if gradient is not None:
        root.gradients[signature.key] = gradient
    if signature.processing is None:
        return make_function(signature, variables, gradient).get_concrete_function()
    stages = make_stages(signature, variables, gradient)
    root.stages[signature.key] = stages
    root.resources.extend(signature.processing.trackables)
    return make_whole(signature, stages).get_concrete_function()


def _make_root(tf: Any, stored: Sequence[Variable], variables: Sequence[Any]) -> Any:
    """Returns the root to save, with the attributes of reusable SavedModels, and the names.

    `variables` and `trainable_variables` are properties of `tf.Module`, which a SavedModel would
    lose; as lists they exist after loading.
    """

    class Root(tf.Module):
        variables: Sequence[Any] = ()
        trainable_variables: Sequence[Any] = ()

    root = Root()
    root.leaves = {each.name: variable for each, variable in zip(stored, variables)}
    root.variables = list(variables)
    root.stages, root.gradients, root.resources = {}, {}, []
    root.trainable_variables = [variable for variable in variables if variable.trainable]
    return root


_KIND = "_gradient_op_type"
_NUMBERED = re.compile(r"(.*_)(\d+)")
_GRADIENT = re.compile(r"(CustomGradient-)(\d+)")


def canonicalize(directory: Path) -> None:
    """Makes ``saved_model.pb``, written by TensorFlow, deterministic.

    TensorFlow numbers its functions by a global counter, and writes maps in hash order. Functions
    are renumbered in the order of their creation, and maps are sorted.
    """
    protobuf = require("tensorflow.core.protobuf.saved_model_pb2", "tensorflow", "to_saved_model")
    file = directory / "saved_model.pb"
    model = protobuf.SavedModel()
    model.ParseFromString(file.read_bytes())
    for graph in model.meta_graphs:
        _renumber_functions(graph)
        _forget_paths(graph, _folder_digest(directory / "assets"))
    file.write_bytes(model.SerializeToString(deterministic=True))
    # It has hashes of the old bytes, and a random number.
    (directory / "fingerprint.pb").unlink(missing_ok=True)


def _folder_digest(folder: Path) -> bytes:
    found = hashlib.sha256()
    for file in sorted(folder.glob("*")):
        found.update(file.name.encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:16].encode()


def _forget_paths(graph: Any, digest: bytes) -> None:
    """Renames tables that are named after the paths of their files.

    Tables with the same name are shared by all models of a process, so the name gets a hash of the
    files instead.
    """
    names: dict[bytes, bytes] = {}
    graphs = [graph.graph_def.node, *(each.node_def for each in graph.graph_def.library.function)]
    for node in (node for nodes in graphs for node in nodes):
        shared = node.attr["shared_name"].s if "shared_name" in node.attr else b""
        if b"/" in shared:
            head, tail = shared.rsplit(b"/", 1)
            kind = b"hash_table_" if head.startswith(b"hash_table_") else b""
            number = str(list(names).index(shared) if shared in names else len(names)).encode()
            names.setdefault(shared, b"_".join((kind + digest, number, tail)))
            node.attr["shared_name"].s = names[shared]


def _renumber_functions(graph: Any) -> None:
    library = graph.graph_def.library
    old = [function.signature.name for function in library.function]
    names = {name: name for name in old} | _renumbered_names(_NUMBERED, old)
    nodes = [node for function in library.function for node in function.node_def]
    kinds = {node.attr[_KIND].s.decode() for node in nodes if _KIND in node.attr}
    gradients = _renumbered_names(_GRADIENT, kinds)
    for function in library.function:
        function.signature.name = names[function.signature.name]
        _rename_nodes(function.node_def, names, gradients)
        _number_captures(function)
    functions = sorted(library.function, key=lambda function: function.signature.name)
    del library.function[:]
    library.function.extend(functions)
    _rename_nodes(graph.graph_def.node, names, gradients)
    for registered in library.registered_gradients:
        registered.gradient_func = names[registered.gradient_func]
        kind = registered.registered_op_type
        registered.registered_op_type = gradients.get(kind, kind)
    _rename_objects(graph.object_graph_def, names)
    aliases = graph.meta_info_def.function_aliases
    # TensorFlow also counts traces that it did not save; those go.
    kept = {names[name]: alias for name, alias in aliases.items() if name in names}
    aliases.clear()
    aliases.update(kept)


def _renumbered_names(pattern: re.Pattern, names: Iterable[str]) -> dict[str, str]:
    """Old name -> new name: the same words, numbered in the order of the old numbers."""
    matches = [match for match in map(pattern.fullmatch, names) if match]
    matches.sort(key=lambda match: int(match[2]))
    return {match[0]: f"{match[1]}{index}" for index, match in enumerate(matches)}


def _rename_nodes(
    nodes: Iterable[Any], names: Mapping[str, str], gradients: Mapping[str, str]
) -> None:
    for node in nodes:
        node.op = names.get(node.op, node.op)
        for key, value in node.attr.items():
            if key == _KIND:
                kind = value.s.decode()
                value.s = gradients.get(kind, kind).encode()
            elif value.HasField("func"):
                value.func.name = names.get(value.func.name, value.func.name)
            for function in value.list.func:
                function.name = names.get(function.name, function.name)


def _number_captures(function: Any) -> None:
    """Captured tensors are named by Python ids; their place identifies them as well."""
    for place, attributes in function.arg_attr.items():
        name = attributes.attr.get("_user_specified_name")
        if name is not None and name.s.isdigit():
            name.s = str(place).encode()


def _rename_objects(objects: Any, names: Mapping[str, str]) -> None:
    copies = {names[name]: deepcopy(each) for name, each in objects.concrete_functions.items()}
    objects.concrete_functions.clear()
    for name, value in copies.items():
        objects.concrete_functions[name].CopyFrom(value)
    for node in objects.nodes:
        if node.HasField("function"):
            renamed = [names[name] for name in node.function.concrete_functions]
            node.function.concrete_functions[:] = renamed
        elif node.HasField("bare_concrete_function"):
            bare = node.bare_concrete_function
            bare.concrete_function_name = names[bare.concrete_function_name]
        elif node.HasField("captured_tensor"):
            captured = node.captured_tensor
            captured.concrete_function = names[captured.concrete_function]
