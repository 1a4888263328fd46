"""What writes a model in each format, and the real runtimes that then serve it.

A writer takes a `Subject` and a path; it gives servers, by name: each takes the arrays of all calls
and gives for each all outputs as arrays, in jax's order.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np

import pax_export as pax
from pax_export.errors import MissingPackageError
from pax_export.export import load, spec
from pax_export.export.artifact.report import DEFAULT, Report
from pax_export.export.formats.onnx import runtimes
from pax_export.export.formats.torch import TORCH
from pax_export.export.validation.validate import in_process
from tests.models.registry import Model

Outputs = list[np.ndarray]
_ONNX_BFLOAT16 = 16  # onnx.TensorProto.BFLOAT16
_SECONDS = 110.0  # for all calls of a model elsewhere; with fixed sizes too, less than a trial has
Call = Callable[[Sequence[np.ndarray]], Outputs]
Server = Callable[[Sequence[Sequence[np.ndarray]]], Iterable[Outputs]]


@dataclass(frozen=True)
class Served:
    """What a writer wrote: what serves it, and pax_export's report."""

    servers: Mapping[str, Server]
    report: Report | None = None


class Subject:
    """A model that is built, with symbolic sizes or those of its first call."""

    def __init__(
        self,
        model: Model,
        static: bool = False,
        validate: bool = True,
        kept: Path | None = None,
    ):
        self.model, self.static = model, static
        self.kept = kept  # a folder for what another trial of the model needs, too
        self.validate = validate  # by the exporter itself, as it does for users
        self.written = False
        self.given = model.build()

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The specs for an exporter of ours."""
        if self.static:
            return self.structs
        return tuple(spec(each.shape, each.dtype) for each in self.model.inputs)

    @property
    def constraints(self) -> tuple[str, ...]:
        return () if self.static else self.model.constraints

    @property
    def options(self) -> dict[str, Any]:
        """What every exporter of ours is told."""
        return {"constraints": self.constraints, "validate": self.validate}

    @property
    def structs(self) -> tuple[Any, ...]:
        """The specs for others: structs of jax, with symbolic sizes or numbers."""
        if self.static:
            return tuple(each.struct(self.model.sizes[0]) for each in self.model.inputs)
        scope = jax.export.SymbolicScope(self.constraints)
        shapes = [jax.export.symbolic_shape(each.shape, scope=scope) for each in self.model.inputs]
        return tuple(
            jax.ShapeDtypeStruct(shape, np.dtype(each.dtype))
            for shape, each in zip(shapes, self.model.inputs)
        )

    def calls(self) -> list[tuple[str, tuple[np.ndarray, ...]]]:
        return self.model.calls(self.static)

    @cached_property
    def _parts(self) -> tuple[list[Any], Callable[..., Any]]:
        """The arrays of the model, and a function of these and the inputs."""
        params, function = self.given if isinstance(self.given, tuple) else (self.given, None)
        leaves, tree = jax.tree.flatten(params)
        is_array = [isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves]
        rest = [None if known else leaf for known, leaf in zip(is_array, leaves)]

        def call(arrays: Sequence[Any], *inputs: Any) -> Any:
            given = iter(arrays)
            filled = [next(given) if known else leaf for known, leaf in zip(is_array, rest)]
            whole = jax.tree.unflatten(tree, filled)
            return whole(*inputs) if function is None else function(whole, *inputs)

        return [leaf for known, leaf in zip(is_array, leaves) if known], call

    @property
    def arrays(self) -> list[Any]:
        return self._parts[0]

    @property
    def function(self) -> Callable[..., Any]:
        """A function of `arrays` and the inputs."""
        return self._parts[1]

    def alone(self, *inputs: Any) -> Any:
        """The model as a function of its inputs: what somebody hands to another converter."""
        return self.function(self.arrays, *inputs)

    @cached_property
    def _jitted(self) -> Callable[..., Any]:
        return jax.jit(self.function)

    def expected(self, inputs: Sequence[np.ndarray]) -> Outputs:
        return [np.asarray(leaf) for leaf in jax.tree.leaves(self._jitted(self.arrays, *inputs))]

    def nothing(self, inputs: Sequence[np.ndarray]) -> Outputs | None:
        """What a call with no examples gives, if nothing is left of any output."""
        try:
            shapes = jax.tree.leaves(jax.eval_shape(self.function, self.arrays, *inputs))
        except Exception:  # jax itself has no answer: the maximum of nothing
            return None
        empty = all(not all(each.shape) for each in shapes)
        return [np.zeros(each.shape, each.dtype) for each in shapes] if empty else None

    @cached_property
    def trained(self) -> list[bool]:
        """Which arrays an export may train: floats, and of a module its parameters."""
        known = None
        if not isinstance(self.given, tuple):
            known = {id(leaf) for leaf in jax.tree.leaves(self.given.parameters())}
        return [_is_float(a) and (known is None or id(a) in known) for a in self.arrays]

    @cached_property
    def slopes(self) -> Callable[..., Any]:
        """Slopes of the `weighed` outputs of a call: for trained arrays, then float inputs."""

        def loss(moved: list[Any], *operands: Any) -> Any:
            given = iter(moved)
            which = [*self.trained, *map(_is_float, operands[len(self.trained) :])]
            every = [next(given) if moves else each for moves, each in zip(which, operands)]
            outputs = self.function(every[: len(self.trained)], *every[len(self.trained) :])
            return weighed(jax.tree.leaves(outputs), jax.numpy)

        gradient = jax.jit(jax.grad(loss))

        def slopes(inputs: Sequence[np.ndarray]) -> Outputs:
            floats = [each for each in inputs if _is_float(each)]
            moved = [a for a, trains in zip(self.arrays, self.trained) if trains] + floats
            return [np.asarray(s) for s in gradient(moved, *self.arrays, *inputs)]

        return slopes


def _is_float(value: Any) -> bool:
    return jax.numpy.issubdtype(value.dtype, jax.numpy.floating)


def weighed(outputs: Sequence[Any], library: Any) -> Any:
    """One number out of all outputs of floats: each with a weight of its own."""
    total: Any = 0.0
    for leaf in outputs:
        shape = tuple(leaf.shape)
        name = getattr(leaf.dtype, "name", str(leaf.dtype))
        if "float" not in name or not all(shape):
            continue
        weight = np.cos(np.arange(int(np.prod(shape, dtype=int)))).reshape(shape)
        weight = weight.astype(np.float32)
        if library is jax.numpy:
            total = total + (leaf.astype("float32") * weight).sum()
        else:
            total = total + library.reduce_sum(library.cast(leaf, "float32") * weight)
    return total


def saved_model(subject: Subject, path: Path) -> Served:
    """Served by TensorFlow alone, and by `load`."""
    import tensorflow as tf

    report = pax.export.to_saved_model(subject.given, path, subject.inputs, **subject.options)
    subject.written = True
    root = tf.saved_model.load(str(path))
    info = report.signatures[DEFAULT]

    def tensorflow(inputs: Sequence[np.ndarray]) -> Outputs:
        named = {each.name: tf.constant(array) for each, array in zip(info.inputs, inputs)}
        found = root.signatures[DEFAULT](**named)
        return [found[each.name].numpy() for each in info.outputs]

    return Served({"TensorFlow": _each(tensorflow), "load": _through_load(path)}, report)


def gradients(subject: Subject, path: Path) -> Served:
    """Slopes by `tf.GradientTape` with respect to variables and inputs."""
    import tensorflow as tf

    report = pax.export.to_saved_model(
        subject.given, path, subject.inputs, **subject.options, trainable=True, vjp_order=1
    )
    subject.written = True
    root = tf.saved_model.load(str(path))
    info = report.signatures[DEFAULT]
    variables = [root.leaves[each.name] for each in report.variables if each.trainable]

    def tape(inputs: Sequence[np.ndarray]) -> Outputs:
        tensors = [tf.constant(array) for array in inputs]
        floats = [each for each in tensors if each.dtype.is_floating]
        with tf.GradientTape() as recorded:
            recorded.watch(floats)
            named = {each.name: tensor for each, tensor in zip(info.inputs, tensors)}
            found = root.signatures[DEFAULT](**named)
            loss = weighed([found[each.name] for each in info.outputs], tf)
        slopes = recorded.gradient(loss, [*variables, *floats], unconnected_gradients="zero")
        return [tf.convert_to_tensor(slope).numpy() for slope in slopes]

    return Served({"tf.GradientTape": _each(tape)}, report)


def bundle(subject: Subject, path: Path) -> Served:
    """Served by jax, through `load`."""
    report = pax.export.to_stablehlo(subject.given, path, subject.inputs, **subject.options)
    subject.written = True
    return Served({"load": _through_load(path)}, report)


def tflite(subject: Subject, path: Path) -> Served:
    """Served by `tf.lite` alone, and by `load` with LiteRT."""
    import tensorflow as tf

    path = path.with_suffix(".tflite")
    report = pax.export.to_tflite(subject.given, path, subject.inputs, **subject.options)
    subject.written = True
    with warnings.catch_warnings():  # that LiteRT, which `load` uses, takes its place one day
        warnings.simplefilter("ignore", UserWarning)
        interpreter = tf.lite.Interpreter(model_path=str(path))
    runner = interpreter.get_signature_runner(DEFAULT)
    info = report.signatures[DEFAULT]

    def lite(inputs: Sequence[np.ndarray]) -> Outputs:
        named = {each.name: array for each, array in zip(info.inputs, inputs)}
        taken = runner.get_input_details()
        found = runner(**{name: array for name, array in named.items() if name in taken})
        return [np.array(found[each.name]) for each in info.outputs]

    return Served({"tf.lite": _each(lite), "load": _through_load(path)}, report)


def onnx(subject: Subject, path: Path) -> Served:
    """Served by onnxruntime alone, and by `load`."""
    path = path.with_suffix(".onnx")
    report = _onnx_file(subject, path, validate=subject.validate)
    subject.written = True
    names = [each.name for each in report.signatures[DEFAULT].inputs]
    wanted = [each.name for each in report.signatures[DEFAULT].outputs]
    return Served(
        {"onnxruntime": _onnxruntime(str(path), names, wanted), "load": _through_load(path)}, report
    )


def _elsewhere(runtime: str, subject: Subject, path: Path) -> Served:
    """The ONNX file, served by another runtime than onnxruntime, in a process of its own."""
    path = path.with_suffix(".onnx")
    # Kernels of OpenVINO and IREE lose NaN, around which exact files go.
    exact = runtime != "web" and "nan" in subject.model.odd
    report = _onnx_file(subject, path, exact=exact)
    if runtime == "iree" and b"Gelu" in path.read_bytes():  # whose results are apart
        report = _onnx_file(subject, path, exact=True)
    info = report.signatures[DEFAULT]

    def serve(calls: Sequence[Sequence[np.ndarray]]) -> Iterable[Outputs]:
        named = [{each.name: a for each, a in zip(info.inputs, inputs)} for inputs in calls]
        cases = [{"inputs": each} for each in named]
        for found in runtimes.run(runtime, str(path), cases, _SECONDS):
            yield [found[each.name] for each in info.outputs]

    return Served({runtime: serve}, report)


def _onnx_file(subject: Subject, path: Path, exact: bool = False, validate: bool = False) -> Report:
    """Writes the file, or copies the one that another runtime had."""
    name = f"{subject.model.name}.{subject.static}.{exact}.{validate}.onnx"
    kept = subject.kept / name if subject.kept else None
    if kept and kept.exists():
        shutil.copyfile(kept, path)
        return Report.read(path)
    options = {"constraints": subject.constraints, "validate": validate, "exact": exact}
    report = pax.export.to_onnx(subject.given, path, subject.inputs, overwrite=True, **options)
    if kept:  # which another process may read at any time
        shutil.copyfile(path, new := kept.with_suffix(f".{os.getpid()}"))
        new.replace(kept)
    return report


def pytorch(subject: Subject, path: Path) -> Served:
    """Served by torch alone: `torch.export.load`, in a process that can't import jax or us."""
    path, report = _torch_file(subject, path)
    names = [each.name for each in report.signatures[DEFAULT].inputs]
    alone = replace(TORCH, run="tests.models.run_torch:run")

    def serve(calls: Sequence[Sequence[np.ndarray]]) -> Iterable[Outputs]:
        cases = [{"signature": DEFAULT, "inputs": dict(zip(names, x))} for x in calls]
        for found in in_process(alone, path, cases, "all", _SECONDS):
            yield list(found["results"].values())

    return Served({"torch": serve}, report)


def torch_gradients(subject: Subject, path: Path) -> Served:
    """Slopes by `torch.autograd` with respect to parameters and inputs."""
    from tests.models.run_torch import program_slopes

    path, report = _torch_file(subject, path)
    slopes = program_slopes(str(path), [v.name for v in report.variables if v.trainable])
    return Served({"torch.autograd": _each(slopes)}, report)


def _torch_file(subject: Subject, path: Path) -> tuple[Path, Report]:
    path = path.with_suffix(".pt2")
    report = pax.export.to_torch(subject.given, path, subject.inputs, **subject.options)
    subject.written = True
    return path, report


def jax2tf(subject: Subject, path: Path) -> Served:
    """Plain jax2tf, as its guide says: a SavedModel with gradients, served by TensorFlow."""
    import tensorflow as tf
    from jax.experimental import jax2tf as library

    shapes = None if subject.static else [each.shape for each in subject.model.inputs]
    module = tf.Module()
    converted = library.convert(
        lambda *inputs: jax.tree.leaves(subject.alone(*inputs)),
        polymorphic_shapes=shapes,
        polymorphic_constraints=subject.constraints,
        with_gradient=True,
    )

    def call(*tensors: Any) -> dict[str, Any]:
        return {f"y{index}": leaf for index, leaf in enumerate(converted(*tensors))}

    signature = [
        tf.TensorSpec(
            [size if isinstance(size, int) else None for size in struct.shape],
            tf.dtypes.as_dtype(struct.dtype),
            name=f"x{index}",
        )
        for index, struct in enumerate(subject.structs)
    ]
    module.call = tf.function(call, input_signature=signature, autograph=False)
    tf.saved_model.save(module, str(path), signatures=module.call)
    subject.written = True
    serve = tf.saved_model.load(str(path)).signatures[DEFAULT]

    def tensorflow(inputs: Sequence[np.ndarray]) -> Outputs:
        found = serve(**{f"x{index}": tf.constant(array) for index, array in enumerate(inputs)})
        return [found[f"y{index}"].numpy() for index in range(len(found))]

    return Served({"TensorFlow": _each(tensorflow)})


def jax2onnx(subject: Subject, path: Path) -> Served:
    """Plain jax2onnx, as its guide says, served by onnxruntime."""
    from jax2onnx import to_onnx

    path = path.with_suffix(".onnx")
    names = [f"x{index}" for index in range(len(subject.structs))]
    model = to_onnx(
        lambda *inputs: jax.tree.leaves(subject.alone(*inputs)),
        list(subject.structs),
        input_names=names,
    )
    path.write_bytes(model.SerializeToString())
    subject.written = True
    return Served({"onnxruntime": _onnxruntime(str(path), names, None)})


def _onnxruntime(path: str, names: Sequence[str], wanted: Sequence[str] | None) -> Server:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    taken = {each.name for each in session.get_inputs()}
    outputs = wanted or [each.name for each in session.get_outputs()]

    def value(array: np.ndarray) -> Any:
        array = np.asarray(array, order="C")
        if array.dtype.name != "bfloat16":  # which onnxruntime takes by its bits
            return onnxruntime.OrtValue.ortvalue_from_numpy(array)
        make = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type
        return make(array.view(np.uint16), _ONNX_BFLOAT16)

    def array(value: Any) -> np.ndarray:
        if value.element_type() != _ONNX_BFLOAT16:
            return value.numpy()
        content = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
        return np.frombuffer(content, jax.numpy.bfloat16).reshape(value.shape())

    def run(inputs: Sequence[np.ndarray]) -> Outputs:
        given = {name: value(a) for name, a in zip(names, inputs) if name in taken}
        return [array(each) for each in session.run_with_ort_values(outputs, given)]

    return _each(run)


def _through_load(path: Path) -> Server:
    loaded = load(path)
    return _each(lambda inputs: [np.asarray(leaf) for leaf in jax.tree.leaves(loaded(*inputs))])


def _each(call: Call) -> Server:
    """A server that makes a call when its answer is asked for; after a failure, the next one."""
    return partial(map, call)


FORMATS: dict[str, Callable[[Subject, Path], Served]] = {
    "saved_model": saved_model,
    "gradients": gradients,
    "bundle": bundle,
    "tflite": tflite,
    "onnx": onnx,
    **{name: partial(_elsewhere, name) for name in runtimes.NAMES},
    "torch": pytorch,
    "torch_gradients": torch_gradients,
    "jax2tf": jax2tf,
    "jax2onnx": jax2onnx,
}
#: What each needs beside jax.
NEEDS = {
    "saved_model": ("tensorflow",),
    "gradients": ("tensorflow",),
    "bundle": ("safetensors",),
    "tflite": ("tensorflow", "ai_edge_litert"),
    "onnx": ("onnx", "onnxruntime"),
    **dict.fromkeys(runtimes.NAMES, ("onnx",)),
    "torch": ("torch",),
    "torch_gradients": ("torch",),
    "jax2tf": ("tensorflow",),
    "jax2onnx": ("jax2onnx", "onnxruntime"),
}
#: Those that compute slopes, of models that have them.
GRADIENTS = ("gradients", "torch_gradients")
#: Those that read the ONNX file in a process of their own; each may refuse a model, by name.
ELSEWHERE = runtimes.NAMES
#: Those of other projects, to compare with.
OTHERS = ("jax2tf", "jax2onnx")


def missing(form: str) -> str:
    """What a format needs and is not installed, as a sentence; empty if all is."""
    lacking = [need for need in NEEDS[form] if not find_spec(need)]
    if lacking:
        return f"no {', '.join(lacking)}"
    try:
        runtimes.check([form] if form in ELSEWHERE else [], form)
    except MissingPackageError as error:
        return error.what
    return ""
