"""Runs a SavedModel with TensorFlow and numpy only.

A fresh process that can import neither jax nor this package loads this file by its path.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
#: The key of the error of a call that failed, where the others go on.
FAILED = "!"
_PIECE = 1 << 20


def run(
    directory: str, cases: Iterable[Mapping[str, Any]], weights: Mapping[str, Any] | None = None
) -> list[Arrays]:
    """Loads an export and makes calls of its signatures; one is asked for after the other.

    A case has ``signature``, ``inputs`` (arrays by name), and perhaps ``cotangents`` (arrays by
    the name of an output), for which gradients are wanted.  Of each come the outputs by name; the
    variables that it changed, as ``variable:NAME``; and gradients, as ``gradient:NAME`` of an
    input or a trainable variable.

    With `weights`, all variables by name, their memory is shared instead of reading them.
    """
    tf = importlib.import_module("tensorflow")
    model = _load_model(tf, directory, weights)
    before = {name: tf.identity(variable) for name, variable in model.leaves.items()}
    results = []
    for case in cases:
        outputs = _call_stages(tf, model, case) if case.get("stage") else _call_one(tf, model, case)
        results.append({**outputs, **_restore_changed(model, before)})
    return results


def _load_model(tf: Any, directory: str, weights: Mapping[str, Any] | None) -> Any:
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


def _call_stages(tf: Any, model: Any, case: Mapping[str, Any]) -> Arrays:
    """Calls a signature with TensorFlow functions around it.

    The stage ``"model"`` omits these. ``"all"`` calls the whole, and then each part, so that a test
    sees the model's inputs, as ``input:NUMBER``.
    """
    stages = model.stages[case["signature"]]
    if case["stage"] == "model":
        names = list(case["inputs"])
        return _call_one(tf, model, case, lambda **given: stages["model"](*map(given.get, names)))
    before = {name: tf.identity(variable) for name, variable in model.leaves.items()}
    whole = _call_one(tf, model, case)
    _restore_changed(model, before)
    given = [tf.constant(value) for value in case["inputs"].values()]
    if "preprocess" in stages:
        given = stages["preprocess"](*given)
    outputs = stages["model"](*given)
    arrays = {name: value.numpy() for name, value in outputs.items()}
    arrays |= {f"input:{place}": value.numpy() for place, value in enumerate(given)}
    if "postprocess" not in stages and sorted(whole) != sorted(outputs):
        raise ValueError(f"the whole returns {sorted(whole)}, and the model {sorted(outputs)}")
    return arrays


def _call_one(tf: Any, model: Any, case: Mapping[str, Any], function: Any = None) -> Arrays:
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
    given = [tf.constant(value) for value in cotangents.values()]
    gradients = tape.gradient(
        targets, sources, given, unconnected_gradients=tf.UnconnectedGradients.ZERO
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


def _call_any(tf: Any, model: Any, case: Mapping[str, Any]) -> Arrays:
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
    except Exception:  # it was saved without gradients; TensorFlow has no class for that
        return results
    found = {name: value for name, value in gradients.items() if value is not None}
    return results | {
        f"gradient:{name}": tf.convert_to_tensor(value).numpy() for name, value in found.items()
    }


def _failed_result(error: Exception) -> Arrays:
    text = f"{type(error).__name__}: {error}"
    return {FAILED: np.frombuffer(text.encode(), np.uint8)}
