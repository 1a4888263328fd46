"""TensorFlow preprocessing and postprocessing around signatures.

The output of a preprocessor must match the inputs of the model; the output of a postprocessor
becomes that of the signature. Both are traced before anything is written. They may have tables,
files and variables, so TensorFlow saves the model that our writer has written again, around it.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import hashlib
import inspect
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import cache_from_source
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import jax

from pax_export._foundations.errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export._foundations.files import system
from pax_export._foundations.optional import require
from pax_export._foundations.types import PyTree
from pax_export.export.artifact.dimensions import ANY_RANK, UNKNOWN
from pax_export.export.artifact.options import by_signature
from pax_export.export.artifact.report import ArrayInfo
from pax_export.export.artifact.structure import rebuild
from pax_export.export.lowering.lower import Processing, Signature
from pax_export.export.lowering.lowered_model import LoweredModel, array_info, output_infos
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.inputs import Inputs, bind_inputs, resolve_inputs
from pax_export.export.tracing.names import describe_structure, tree_names
from pax_export.export.tracing.programs import Program

Function = Callable[..., Any]


def tensorflow(purpose: str) -> Any:
    """TensorFlow, or an error that names the extra which brings it."""
    return require("tensorflow", "tensorflow", purpose)


@dataclasses.dataclass(frozen=True)
class Processors:
    """The user's processors of each signature."""

    preprocess: Mapping[str, Any]
    postprocess: Mapping[str, Any]
    inputs: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        keys: Sequence[str],
        several: bool,
        preprocess: Function | Mapping[str, Function] | None,
        postprocess: Function | Mapping[str, Function] | None,
        inputs: PyTree,
    ) -> Processors:
        """Reads the arguments; with several signatures they are dicts over their keys."""
        arguments = {
            "preprocess": preprocess,
            "postprocess": postprocess,
            "preprocess_inputs": inputs,
        }
        read = {name: by_signature(name, value, keys, several) for name, value in arguments.items()}
        for name in ("preprocess", "postprocess"):
            for key, function in read[name].items():
                if function is not None and not callable(function):
                    raise InvalidArgumentTypeError(
                        "A processor must be a TensorFlow function.",
                        where=f"{name} of {key}",
                        got=repr(function),
                        write=f"{name}=lambda x: tf.cast(x, tf.float32)",
                    )
        for key in set(read["preprocess_inputs"]) - set(read["preprocess"]):
            raise InvalidArgumentError(
                "preprocess_inputs requires preprocess.", where=key, write="preprocess="
            )
        return cls(*read.values())

    def around(self, model: LoweredModel, constraints: Sequence[str]) -> LoweredModel:
        """The model with these functions around its signatures."""
        signatures = tuple(
            self._process_signature(program, signature, constraints)
            for program, signature in zip(model.programs, model.signatures)
        )
        return dataclasses.replace(model, signatures=signatures)

    def _process_signature(
        self, program: Program, signature: Signature, constraints: Sequence[str]
    ) -> Signature:
        key = signature.key
        before, after = self.preprocess.get(key), self.postprocess.get(key)
        if before is None and after is None:
            return signature
        inputs, outputs = program.inputs, output_infos(program)
        first, last, structure = None, None, program.output_structure
        if before is not None:
            inputs = _processor_inputs(before, self.inputs.get(key), key, constraints)
            first = _preprocess(before, inputs, program, signature)
        if after is not None:
            last, outputs, structure = _trace_postprocess(after, program, signature)
        tracked = tuple(trackables(before, after))
        around = Processing(inputs, outputs, structure, first, last, tracked)
        return dataclasses.replace(signature, processing=around)


def _processor_inputs(
    processor: Function, specs: Any, key: str, constraints: Sequence[str]
) -> Inputs:
    """The inputs of the preprocessor: given by the user, or by its input_signature."""
    if specs is None:
        specs = input_signature(processor)
    if specs is None:
        raise InvalidArgumentError(
            "The inputs of the preprocessor are unknown.",
            where=key,
            write='preprocess_inputs=spec("batch", "string"), or a tf.function with an '
            "input_signature",
        )
    return resolve_inputs(python_function(processor), 0, specs, None, constraints, text=True)


def input_specs(signature: Signature) -> list[Any]:
    return list(map(tensor_spec, signature.input_names, signature.input_structs))


def tensor_spec(name: str, struct: jax.ShapeDtypeStruct) -> Any:
    tf = tensorflow("to_saved_model")
    shape = [size if isinstance(size, int) else None for size in struct.shape]
    return tf.TensorSpec(shape, tf.as_dtype(dtypes.name_of(struct.dtype)), name=name)


def _preprocess(processor: Function, inputs: Inputs, program: Program, signature: Signature) -> Any:
    tf = tensorflow("preprocess")
    call = as_function(processor)
    wanted = dict(zip(signature.input_names, input_specs(signature)))

    def preprocess(*flat: object) -> list[Any]:
        args, kwargs = inputs.call(flat)
        output = call(*args, **kwargs)
        named = bind_inputs(program.inputs, output, f"{program.key}: what the preprocessor gives")
        return [_fitting_tensor(tf, named[name], wanted[name], name, program) for name in wanted]

    specs = [tensor_spec(entry.name, dtypes.stored(entry.struct)) for entry in inputs.flat]
    return _trace_now(tf, preprocess, specs)


def _trace_now(tf: ModuleType, function: Callable, specs: Sequence[Any]) -> Any:
    traced = tf.function(function, input_signature=specs, autograph=False)
    traced.get_concrete_function()  # now, so that mistakes come to light before anything is written
    return traced


def _fitting_tensor(tf: ModuleType, value: Any, wanted: Any, name: str, program: Program) -> Any:
    tensor = value
    if not isinstance(value, tf.Tensor):
        with suppress(TypeError, ValueError):
            tensor = tf.convert_to_tensor(value, wanted.dtype)
    is_tensor = isinstance(tensor, tf.Tensor)
    same = is_tensor and tensor.dtype == wanted.dtype
    if not (same and tensor.shape.is_compatible_with(wanted.shape)):
        entry = next(entry for entry in program.inputs.flat if entry.name == name)
        raise InvalidArgumentError(
            "The outputs of the preprocessor do not match the inputs of the model.",
            where=f"{program.key}: {name}",
            got=f"{tensor.dtype.name}{tensor.shape}" if is_tensor else type(tensor).__name__,
            write=str(array_info(name, name, dtypes.stored(entry.struct))),
        )
    return tf.ensure_shape(tensor, wanted.shape)


def _trace_postprocess(
    processor: Function, program: Program, signature: Signature
) -> tuple[Any, tuple[ArrayInfo, ...], dict[str, Any]]:
    tf = tensorflow("postprocess")
    call = as_function(processor)
    traced: dict[str, Any] = {}

    def postprocess(*flat: object) -> dict[str, Any]:
        named = dict(zip(program.output_names, flat))
        output = _plain_value(call(rebuild(program.output_structure, named.__getitem__)))
        names = tree_names(output, "output")
        traced["structure"] = describe_structure(output, names)
        tensors = [_to_tensor(tf, value) for value in jax.tree_util.tree_leaves(output)]
        traced["outputs"] = tuple(map(_tensor_info, names, tensors))
        return dict(zip(names, tensors))

    results = signature.forward.lowered.results
    specs = list(map(tensor_spec, signature.output_names, results))
    function = _trace_now(tf, postprocess, specs)
    if not traced["outputs"]:
        raise InvalidArgumentError(
            "The postprocessor returns no tensor.",
            where=program.key,
            write="a function that returns at least one tensor",
        )
    return function, traced["outputs"], traced["structure"]


def _to_tensor(tf: ModuleType, value: Any) -> Any:
    try:
        return value if isinstance(value, tf.Tensor) else tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            "The postprocessor returns a value that is not a tensor.",
            got=type(value).__name__,
            write="tensors; of a ragged one, .to_tensor() or .flat_values and .row_splits",
        ) from error


def _plain_value(value: object) -> Any:
    """The value without the wrappers that TensorFlow puts around lists and dicts."""
    if isinstance(value, Mapping):
        return {key: _plain_value(item) for key, item in value.items()}
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(map(_plain_value, value))
    return list(map(_plain_value, value)) if isinstance(value, list) else value


def _tensor_info(name: str, tensor: Any) -> ArrayInfo:
    shape = tensor.shape
    sizes = [ANY_RANK] if shape.rank is None else shape.as_list()
    known = tuple(UNKNOWN if size is None else size for size in sizes)
    return ArrayInfo(name, name, known, tensor.dtype.name)


def as_function(processor: Function) -> Any:
    """The processor as a `tf.function`; Python's ``if`` and ``for`` on tensors work in it."""
    tf = tensorflow("processors of an export")
    if isinstance(processor, tf.types.experimental.PolymorphicFunction):
        return processor
    call = _called_method(processor)
    if isinstance(call, tf.types.experimental.PolymorphicFunction):
        return call
    if not inspect.isroutine(processor):  # a Keras layer does more in its call than `call`
        return tf.function(lambda *args, **kwargs: processor(*args, **kwargs), autograph=False)
    return tf.function(processor)


def _called_method(processor: Function) -> Any:
    """Returns the function that runs when an object is called; a function itself."""
    return processor if inspect.isroutine(processor) else getattr(processor, "__call__", processor)  # noqa: B004


def python_function(processor: Function) -> Function:
    """Returns the Python function with the parameters of the processor."""
    if hasattr(processor, "build"):  # a Keras layer
        return getattr(processor, "call", processor)
    call = _called_method(processor)
    return getattr(call, "python_function", call)


def input_signature(processor: Function) -> tuple | None:
    """The ``input_signature`` of a `tf.function`, or of an object's ``__call__``."""
    for function in (processor, _called_method(processor)):
        found = getattr(function, "input_signature", None)
        if found is not None:
            return tuple(found)
    return None


def trackables(*processors: object) -> list[Any]:
    """Returns the TensorFlow objects that functions use: variables, tables, modules.

    A SavedModel contains only objects reachable from its root, which excludes those in a function's
    closure, globals, defaults, and attributes of its object.
    """
    tf = tensorflow("processors of an export")
    kind = tf.__internal__.tracking.Trackable
    found: dict[int, Any] = {}
    seen: dict[int, Any] = {}
    waiting = list(processors)
    while waiting:
        value = waiting.pop(0)
        if id(value) in seen:
            continue
        seen[id(value)] = value  # keeps the id alive
        is_function = hasattr(value, "python_function")
        if isinstance(value, kind) and not is_function:
            found[id(value)] = value
        elif not isinstance(value, (str, bytes, int, float, type, tf.Tensor)):
            waiting.extend(_reachable_values(value))
    return list(found.values())


def _reachable_values(value: Any) -> Iterator[Any]:
    """Yields the values reachable from a value in one step."""
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif hasattr(value, "python_function"):
        yield value.python_function
    elif inspect.ismethod(value):
        yield from (value.__self__, value.__func__)
    elif inspect.isfunction(value):
        yield from _held_by_function(value)
    elif callable(value) and not inspect.isbuiltin(value):
        yield from getattr(value, "__dict__", {}).values()
        yield type(value).__call__


def _held_by_function(function: Callable[..., Any]) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for name in _global_names(function.__code__):
        value = function.__globals__.get(name)
        if not inspect.ismodule(value):
            yield value


def _global_names(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # a function inside of the function
            yield from _global_names(constant)


# --- writing: TensorFlow saves what was written here again -------------------


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


# --- the files that TensorFlow generates while it saves a model -------------
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
        for file in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*.py"):
            with suppress(OSError):
                found, is_new = file.lstat(), file.stem in sys.modules.keys() - before
                is_left = system.is_mine(found) and time.time() - found.st_mtime > _LOADED
                if is_new or is_left:
                    compiled = Path(cache_from_source(file))
                    for each in (file, compiled):
                        each.unlink(missing_ok=True)
                    compiled.parent.rmdir()  # if nothing else is in it
