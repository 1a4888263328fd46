"""Writes a SavedModel: variables, and one concrete function per signature.

A checkpoint is an index, which is a sorted table of names, and a data file. Arrays are written one
by one and compared in pieces, because a model may fill half of the memory.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from pax_export._foundations import wire
from pax_export._foundations.errors import InvalidArgumentError, ValidationError
from pax_export._foundations.optional import require
from pax_export._foundations.tensorflow_log import quiet_save
from pax_export._foundations.wire import (
    Memory,
    SavedTensor,
    encode_varint,
    masked_crc32c,
    table_entries,
    write_table,
)
from pax_export.export.formats.generated_files import generated_files_removed
from pax_export.export.formats.saved_model.proto import schemas
from pax_export.export.formats.saved_model.proto.functions import SignatureWriter, write_initializer
from pax_export.export.formats.saved_model.proto.nodes import STRING, Message, Spec, shape
from pax_export.export.formats.saved_model.proto.objects import (
    checkpoint_key,
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

_PIECE = 1 << 20
_OBJECTS = "_CHECKPOINTABLE_OBJECT_GRAPH"


def write_checkpoint(directory: Path, variables: Sequence[Variable], objects: bytes) -> None:
    """Writes a checkpoint named ``variables``; `objects` is the result of `tracked_objects`."""
    header = {"num_shards": 1, "version": {"producer": 1}}
    entries = {b"": schemas.BUNDLE_HEADER.encode(header)}
    with (directory / "variables.data-00000-of-00001").open("wb") as file:

        def add(key: str, spec: Spec, content: Any, crc: int | None = None) -> None:
            crc = masked_crc32c(content) if crc is None else crc
            about = {"offset": file.tell(), "size": file.write(content), "crc32c": crc}
            entries[key.encode()] = schemas.BUNDLE_ENTRY.encode({**spec._asdict(), **about})

        for each in variables:
            add(checkpoint_key(each.name), Spec.of(each.value), _raw_bytes(each.value).data)
        # Strings are stored as their lengths, a checksum of these, and their bytes.
        length = len(objects).to_bytes(4, "little")
        begin = masked_crc32c(length).to_bytes(4, "little")
        crc = masked_crc32c(length + begin + objects)
        add(_OBJECTS, Spec(STRING, shape([])), encode_varint(len(objects)) + begin + objects, crc)
    (directory / "variables.index").write_bytes(write_table(entries))


def _raw_bytes(value: object) -> np.ndarray:
    """The bytes of an array: a view if it is contiguous, as those of jax are."""
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def compare(directory: Path, expected: Mapping[str, Any]) -> None:
    """Compares the variables under ``leaves`` of a SavedModel with arrays by name, bit by bit."""
    prefix = directory / "variables" / "variables"
    try:
        index = Memory(prefix.with_name("variables.index").read_bytes())
        entries = {key.decode(): wire.Message(Memory(value)) for key, value in table_entries(index)}
        wrong = [
            name
            for name, array in expected.items()
            if _variable_differs(prefix, SavedTensor(entries[checkpoint_key(name)]), array)
        ]
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ValidationError(
            "The variables that were written cannot be read.",
            where=str(prefix),
            got=f"{type(error).__name__}: {error}"[:500],
        ) from error
    if wrong:
        raise ValidationError(
            "A variable of the exported model differs from the model's.", where=", ".join(wrong)
        )


def _variable_differs(prefix: Path, saved: SavedTensor, expected: object) -> bool:
    array = np.asarray(expected)
    if (saved.size, saved.shape) != (array.nbytes, list(array.shape)):
        return True
    flat = _raw_bytes(array)
    shards = len(list(prefix.parent.glob(f"{prefix.name}.data-*")))
    name = f"{prefix.name}.data-{saved.shard:05d}-of-{shards:05d}"
    with prefix.with_name(name).open("rb") as file:
        file.seek(saved.offset)
        for start in range(0, len(flat), _PIECE):
            piece = flat[start : start + _PIECE]
            if file.read(len(piece)) != piece.tobytes():
                return True
    return False


# --- Writes a SavedModel: variables, and one concrete function per signature ---


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
    functions = {each.key: _make_signature(tf, root, each, variables) for each in signatures}
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
    rename_tables(directory)


def _make_signature(
    tf: ModuleType, root: Any, signature: Signature, variables: Sequence[Any]
) -> Any:
    """The function to serve; its processors are attributes of the root, so that they are kept."""
    gradient = make_gradient(signature)
    if gradient is not None:
        root.gradients[signature.key] = gradient
    if signature.processing is None:
        return make_function(signature, variables, gradient).get_concrete_function()
    stages = make_stages(signature, variables, gradient)
    root.stages[signature.key] = stages
    for each in signature.processing.trackables:
        # A variable of Keras saves a copy, and a session would not restore the one it reads.
        values = (getattr(variable, "value", None) for variable in getattr(each, "variables", ()))
        root.resources += [each, *(value for value in values if isinstance(value, tf.Variable))]
    return make_whole(signature, stages).get_concrete_function()


def _make_root(tf: ModuleType, stored: Sequence[Variable], variables: Sequence[Any]) -> Any:
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


def rename_tables(directory: Path) -> None:
    """Renames tables of a SavedModel by TensorFlow that are named after the paths of their files.

    A process shares tables of one name among all its models, so a model of another file that was
    at the same path would look up words of the first. The name gets a hash of the files instead.
    """
    protobuf = require("tensorflow.core.protobuf.saved_model_pb2", "tensorflow", "to_saved_model")
    file = directory / "saved_model.pb"
    model = protobuf.SavedModel()
    model.ParseFromString(file.read_bytes())
    digest, names = _folder_digest(directory / "assets"), dict[bytes, bytes]()
    graphs = [each.graph_def for each in model.meta_graphs]
    functions = (function.node_def for each in graphs for function in each.library.function)
    for node in itertools.chain(*(each.node for each in graphs), *functions):
        shared = node.attr["shared_name"].s if "shared_name" in node.attr else b""
        if b"/" in shared:
            head, tail = shared.rsplit(b"/", 1)
            kind = b"hash_table_" if head.startswith(b"hash_table_") else b""
            names.setdefault(shared, b"_".join((kind + digest, b"%d" % len(names), tail)))
            node.attr["shared_name"].s = names[shared]
    if names:
        file.write_bytes(model.SerializeToString())
        (directory / "fingerprint.pb").unlink(missing_ok=True)  # hashes of the old bytes


def _folder_digest(folder: Path) -> bytes:
    found = hashlib.sha256()
    for file in sorted(folder.glob("*")):
        found.update(file.name.encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:16].encode()
