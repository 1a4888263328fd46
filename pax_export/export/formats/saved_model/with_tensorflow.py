"""What TensorFlow adds to SavedModels that our writer has written.

TensorFlow saves its own functions around a model, which may have tables, files and variables; and a
`JaxModule` calls signatures over variables of its own.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import jax

from pax_export._foundations.errors import InvalidArgumentError
from pax_export._foundations.files import atomic, system
from pax_export._foundations.optional import require
from pax_export.export.formats.saved_model import writer
from pax_export.export.lowering.lower import Call, Signature
from pax_export.export.lowering.variables import Store
from pax_export.export.tracing import dtypes

#: The arrays of a call by the places of their variables, and its inputs, to its results.
SignatureFunction = Callable[[Sequence[Any], Sequence[Any]], dict[str, Any]]


def tensorflow(purpose: str) -> Any:
    """TensorFlow, or an error that names the extra which brings it."""
    return require("tensorflow", "tensorflow", purpose)


def input_specs(signature: Signature) -> list[Any]:
    return list(map(tensor_spec, signature.input_names, signature.input_structs))


def output_specs(signature: Signature) -> list[Any]:
    return list(map(tensor_spec, signature.output_names, signature.forward.lowered.results))


def tensor_spec(name: str, struct: jax.ShapeDtypeStruct) -> Any:
    tf = tensorflow("to_saved_model")
    shape = [size if isinstance(size, int) else None for size in struct.shape]
    return tf.TensorSpec(shape, tf.as_dtype(dtypes.name_of(struct.dtype)), name=name)


# --- Processors around signatures ----------------------------------------------------------------


def add_processors(directory: Path, signatures: Sequence[Signature]) -> None:
    """Lets TensorFlow save a model that was written here again, with the processors around it."""
    tf = tensorflow("to_saved_model")
    root = tf.saved_model.load(str(directory))
    root.stages, root.resources = {}, []
    functions = {each.key: _processed(root, each) for each in signatures}
    options = tf.saved_model.SaveOptions(
        experimental_custom_gradients=any(each.gradient for each in signatures)
    )
    try:
        with generated_files_removed():
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


def _processed(root: Any, signature: Signature) -> Any:
    """The function to serve; its parts are attributes of the root, so that they are kept."""
    tf, around, model = tensorflow("to_saved_model"), signature.processing, root.signatures
    if around is None:
        return model[signature.key]
    before, after = around.preprocess, around.postprocess

    def call_model(*inputs: Any) -> dict[str, Any]:
        return model[signature.key](**dict(zip(signature.input_names, inputs)))

    specs = input_specs(signature)
    stages = {
        "preprocess": before,
        "model": tf.function(call_model, input_signature=specs, autograph=False),
        "postprocess": after,
    }
    root.stages[signature.key] = {name: each for name, each in stages.items() if each is not None}
    for each in around.trackables:
        # A variable of Keras saves a copy, and a session would not restore the one it reads.
        values = (getattr(variable, "value", None) for variable in getattr(each, "variables", ()))
        root.resources += [each, *(value for value in values if isinstance(value, tf.Variable))]

    def serve(*inputs: Any) -> dict[str, Any]:
        outputs = stages["model"](*(inputs if before is None else before(*inputs)))
        return outputs if after is None else after(*map(outputs.get, signature.output_names))

    specs = specs if before is None else list(before.input_signature)
    return tf.function(serve, input_signature=specs, autograph=False).get_concrete_function()


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


# --- Signatures over variables of a `JaxModule` --------------------------------------------------


def signature_function(signature: Signature, store: Store) -> SignatureFunction:
    """Returns a signature without gradients of gradients as a function of TensorFlow.

    It takes the arrays of all variables as arguments, and can be differentiated by them.
    """
    tf, forward, gradient = tensorflow("JaxModule"), signature.forward, signature.gradient
    constants = [*forward.constants, *(gradient.call.constants if gradient else ())]
    indices = [*forward.variables, *constants]
    first, inputs = len(forward.variables), signature.input_structs
    structs = [dtypes.struct_of(store.variables[index].value) for index in indices]
    structs[first:first] = inputs
    names = [f"operand_{index}" for index in range(len(structs))]
    if gradient is not None:
        # Cotangents stand before the constants of a gradient; here, all of these come first.
        count, more = len(structs) - len(gradient.call.constants), len(gradient.call.constants)
        end = count + len(gradient.of)
        used = tuple(
            index if index < count else index + more if index < end else index - len(gradient.of)
            for index in gradient.call.lowered.used
        )
        call = Call(replace(gradient.call.lowered, used=used), (), ())
        gradient = replace(gradient, call=call)
    stateless = replace(
        signature,
        input_names=tuple(names),
        input_structs=tuple(structs),
        forward=Call(forward.lowered, (), ()),
        gradient=gradient,
    )
    with atomic.scratch() as folder, tf.init_scope():
        writer.write(folder, Store((), (), False), [stateless], None)
        loaded = tf.saved_model.load(str(folder))

    def call_signature(variables: Sequence[Any], tensors: Sequence[Any]) -> dict[str, Any]:
        operands = [tf.convert_to_tensor(variables[index]) for index in indices]
        operands[first:first] = tensors
        return loaded.signatures[signature.key](**dict(zip(names, operands)))

    return call_signature


# --- The files that TensorFlow generates while it saves a model ----------------------------------
# It rewrites them, loads them from the temporary folder, and removes them when the process ends:
# of one that is killed they stay indefinitely. Nobody reads them once they are loaded.


_PREFIX = "__autograph_generated_file"
#: A file that is older is loaded, or its process is dead.
_LOADED = 60.0


@contextmanager
def generated_files_removed() -> Iterator[None]:
    """Removes those that the block makes, and those that killed processes have left."""
    before = set(sys.modules)
    try:
        yield
    finally:
        for name in set(sys.modules) - before:
            if name.startswith(_PREFIX):
                _remove_file(Path(tempfile.gettempdir(), f"{name}.py"))
        _sweep_folder(Path(tempfile.gettempdir()))


def _sweep_folder(folder: Path) -> None:
    with suppress(OSError):
        for entry in list(os.scandir(folder)):
            if entry.name.startswith(_PREFIX) and entry.name.endswith(".py"):
                with suppress(OSError):
                    found = entry.stat(follow_symlinks=False)
                    if system.is_mine(found) and time.time() - found.st_mtime > _LOADED:
                        _remove_file(Path(entry.path))


def _remove_file(file: Path) -> None:
    compiled = Path(cache_from_source(file))
    for each in (file, compiled):
        with suppress(OSError):
            each.unlink()
    with suppress(OSError):
        compiled.parent.rmdir()  # if nothing else is in it
