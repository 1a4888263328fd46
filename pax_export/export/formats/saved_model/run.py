"""Runs a SavedModel with TensorFlow and numpy only.

A fresh process that can import neither jax nor this package loads this file by its path.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
#: The key of the error of a call that failed, where the others go on.
FAILED = "!"
_PIECE = 1 << 20
_INITIALIZE = "__saved_model_init_op"


def prepare_process(directory: str) -> None:
    """Turns XLA off in this process, as TensorFlow Serving starts, unless the export calls it."""
    if b"XlaCallModule" in Path(directory, "saved_model.pb").read_bytes():
        return
    folder = Path(str(importlib.import_module("tensorflow").__file__)).parent
    for library in folder.glob("libtensorflow_cc.*"):  # not on Windows
        ctypes.CDLL(str(library))["_ZN10tensorflow21DisableXlaCompilationEv"]()


def run(
    directory: str, cases: Iterable[Mapping[str, Any]], weights: Mapping[str, Any] | None = None
) -> list[Arrays]:
    """Loads an export and makes calls of its signatures; one is asked for after the other.

    A case has ``signature``, ``inputs`` (arrays by name), and perhaps ``cotangents`` (arrays by
    the name of an output), for which gradients are wanted.  Of each come the outputs by name; the
    variables that it changed, as ``variable:NAME``; and gradients, as ``gradient:NAME`` of an
    input or a trainable variable.  With the stage ``"session"``, only outputs come.

    With `weights`, all variables by name, their memory is shared instead of reading them.
    """
    tf = importlib.import_module("tensorflow")
    model = _load_model(tf, directory, weights)
    before = {name: tf.identity(variable) for name, variable in model.leaves.items()}
    results = []
    with closing(_Session(tf, directory)) as session:
        for case in cases:
            if case.get("stage") == "session":
                results.append(session.call(case))
                continue
            call = _call_stages if case.get("stage") else _call_one
            outputs = call(tf, model, case)
            results.append({**outputs, **_restore_changed(model, before)})
    return results


class _Session:
    """Calls an export by its graph alone, as C programs, Java and TensorFlow Serving do.

    It does what `LoadSavedModel` of TensorFlow's C++ does.
    """

    def __init__(self, tf: ModuleType, directory: str):
        self._folder = Path(directory)
        protos = importlib.import_module("tensorflow.core.protobuf.saved_model_pb2")
        model = protos.SavedModel.FromString((self._folder / "saved_model.pb").read_bytes())
        (graph,) = (each for each in model.meta_graphs if "serve" in each.meta_info_def.tags)
        functions = graph.graph_def.library.function
        self._assigns = any(x.op.startswith("Assign") for each in functions for x in each.node_def)
        self._graph, self._restored = graph, False
        self._session = tf.compat.v1.Session(graph=tf.Graph())
        try:
            with self._session.graph.as_default():
                tf.graph_util.import_graph_def(graph.graph_def, name="")
        except ValueError as error:
            raise ValueError(f"sessions and servers cannot import its graph: {error}") from error
        self.close = self._session.close

    def call(self, case: Mapping[str, Any]) -> Arrays:
        if self._assigns or not self._restored:
            self._restore()
        signature = self._graph.signature_def[case["signature"]]
        feeds = {signature.inputs[name].name: value for name, value in case["inputs"].items()}
        return self._session.run({k: each.name for k, each in signature.outputs.items()}, feeds)

    def _restore(self) -> None:
        saver, signatures = self._graph.saver_def, self._graph.signature_def
        values = str(self._folder / "variables" / "variables")
        self._session.run(saver.restore_op_name, {saver.filename_tensor_name: values})
        for each in signatures[_INITIALIZE].outputs.values() if _INITIALIZE in signatures else ():
            assets = {
                asset.tensor_info.name: str(self._folder / "assets" / asset.filename)
                for asset in self._graph.asset_file_def
            }
            self._session.run(each.name, assets)
        self._restored = True


def _load_model(tf: ModuleType, directory: str, weights: Mapping[str, Any] | None) -> Any:
    if weights is None:
        return tf.saved_model.load(directory)
    options = tf.saved_model.LoadOptions(experimental_skip_checkpoint=True)
    model = tf.saved_model.load(directory, options=options)
    for name, variable in model.leaves.items():
        # A tensor over a jax array does not own its memory.
        variable.assign(weights[name], read_value=False)
    return model


def _restore_changed(model: Any, before: Mapping[str, Any]) -> Arrays:
    """The variables that calls have changed, which get their old values back."""
    changed = {}
    for name, variable in model.leaves.items():
        value = _to_array(variable.read_value())
        if not _same_bytes(value, _to_array(before[name])):
            changed[f"variable:{name}"] = value.copy()
            variable.assign(before[name])
    return changed


def _to_array(value: Any) -> np.ndarray:
    """Returns a tensor or array as numpy array.

    `asarray` does not copy, unlike the method `numpy` of a tensor, but it does not support a
    bfloat16 scalar.
    """
    is_scalar = not len(value.shape)
    return np.asarray(value.numpy() if is_scalar and hasattr(value, "numpy") else value)


def _has_gradient(dtype: Any) -> bool:
    return (dtype.is_floating and dtype.size > 1) or dtype.is_complex


def _same_bytes(one: np.ndarray, other: np.ndarray) -> bool:
    """Returns whether two arrays have the same bytes, without a copy if they share them."""
    if one.ctypes.data == other.ctypes.data:
        return True
    flat, as_flat = (each.reshape(-1).view(np.uint8) for each in (one, other))
    pieces = range(0, flat.size, _PIECE)
    return all(np.array_equal(flat[i : i + _PIECE], as_flat[i : i + _PIECE]) for i in pieces)


def _call_stages(tf: ModuleType, model: Any, case: Mapping[str, Any]) -> Arrays:
    """Calls a signature with TensorFlow functions around it.

    The stage ``"model"`` omits these. ``"all"`` calls the whole, and then each part, so that a test
    sees the model's inputs, as ``input:NUMBER``.
    """
    stages = model.stages[case["signature"]]
    if case["stage"] == "model":
        names = list(case["inputs"])
        return _call_one(tf, model, case, lambda **inputs: stages["model"](*map(inputs.get, names)))
    before = {name: tf.identity(variable) for name, variable in model.leaves.items()}
    whole = _call_one(tf, model, case)
    _restore_changed(model, before)
    inputs = [tf.constant(value) for value in case["inputs"].values()]
    if "preprocess" in stages:
        inputs = stages["preprocess"](*inputs)
    outputs = stages["model"](*inputs)
    arrays = {name: value.numpy() for name, value in outputs.items()}
    arrays |= {f"input:{index}": value.numpy() for index, value in enumerate(inputs)}
    if "postprocess" not in stages and sorted(whole) != sorted(outputs):
        raise ValueError(f"the whole returns {sorted(whole)}, and the model {sorted(outputs)}")
    return arrays


def _call_one(
    tf: ModuleType, model: Any, case: Mapping[str, Any], function: Callable[..., Any] | None = None
) -> Arrays:
    signature = function or model.signatures[case["signature"]]
    inputs = {name: tf.constant(value) for name, value in case["inputs"].items()}
    cotangents = case.get("cotangents")
    if not cotangents:
        return {name: value.numpy() for name, value in signature(**inputs).items()}
    floating = {name: value for name, value in inputs.items() if _has_gradient(value.dtype)}
    weights = {name: v for name, v in model.leaves.items() if v.trainable}
    sources = {**floating, **weights}
    with tf.GradientTape() as tape:
        tape.watch(list(floating.values()))
        outputs = signature(**inputs)
        targets = [outputs[name] for name in cotangents]
    output_gradients = [tf.constant(value) for value in cotangents.values()]
    gradients = tape.gradient(
        targets, sources, output_gradients, unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    results = {name: value.numpy() for name, value in outputs.items()}
    for name, value in gradients.items():
        results[f"gradient:{name}"] = _to_array(tf.convert_to_tensor(value))
    return results


def run_any(directory: str, cases: Sequence[Mapping[str, Any]]) -> list[Arrays]:
    """Makes calls of any SavedModel, as `run` does, without variables.

    A failure does not stop the others: its error is the text, as bytes, under `FAILED`.
    """
    tf = importlib.import_module("tensorflow")
    try:
        model = tf.saved_model.load(directory)
    except Exception as error:  # of TensorFlow; the caller reports it
        return [_failed_result(error) for _ in cases]
    results = []
    for case in cases:
        try:
            results.append(_call_any(tf, model, case))
        except Exception as error:  # the same, of one call
            results.append(_failed_result(error))
    return results


def _call_any(tf: ModuleType, model: Any, case: Mapping[str, Any]) -> Arrays:
    """Returns outputs, and gradients of the sum of all floating-point ones if there are any."""
    signature = model.signatures[case["signature"]]
    inputs = {name: tf.constant(value) for name, value in case["inputs"].items()}
    results = {name: value.numpy() for name, value in signature(**inputs).items()}
    sources = {name: value for name, value in inputs.items() if _has_gradient(value.dtype)}
    try:
        with tf.GradientTape() as tape:
            tape.watch(list(sources.values()))
            values = signature(**inputs).values()
            total = tf.add_n([tf.reduce_sum(v) for v in values if v.dtype.is_floating])
        sources.update((f"{i} {v.name}", v) for i, v in enumerate(tape.watched_variables()))
        gradients = tape.gradient(total, sources)
    except Exception:  # saved without gradients, or these fail: outputs alone are compared
        return results
    found = {name: value for name, value in gradients.items() if value is not None}
    return results | {
        f"gradient:{name}": tf.convert_to_tensor(value).numpy() for name, value in found.items()
    }


def _failed_result(error: Exception) -> Arrays:
    text = f"{type(error).__name__}: {error}"
    return {FAILED: np.frombuffer(text.encode(), np.uint8)}
