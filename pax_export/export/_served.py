"""Runs an export as a server does: with TensorFlow and numpy, without jax.

This file is also a program of its own, for a fresh process that can import
neither jax nor this package:

    python _served.py DIRECTORY CASES.npz RESULTS.npz

A case is one call of one signature.  Arrays stand in files as they are; those
of dtypes that numpy does not know, as their bytes.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


def run(directory: str, cases: Sequence[Mapping[str, Any]]) -> list[Arrays]:
    """Loads an export and makes calls of its signatures.

    Args:
        directory: of the export.
        cases: for each call ``signature``, ``inputs`` (arrays by name), and
            perhaps ``cotangents`` (arrays by the name of an output), for which
            gradients are wanted.

    Returns:
        For each call its outputs by name; the variables that it changed, as
        ``variable:NAME``; and gradients, as ``gradient:NAME`` of an input or a
        trainable variable.
    """
    tf = importlib.import_module("tensorflow")
    model = tf.saved_model.load(directory)
    before = {name: tf.identity(variable) for name, variable in model.leaves.items()}
    results = []
    for case in cases:
        results.append(_call(tf, model, case))
        for name, variable in model.leaves.items():
            value = variable.numpy()
            if value.tobytes() != before[name].numpy().tobytes():
                results[-1][f"variable:{name}"] = value
                variable.assign(before[name])
    return results


def _call(tf: Any, model: Any, case: Mapping[str, Any]) -> Arrays:
    signature = model.signatures[case["signature"]]
    inputs = {name: tf.constant(value) for name, value in case["inputs"].items()}
    cotangents = case.get("cotangents")
    if not cotangents:
        return {name: value.numpy() for name, value in signature(**inputs).items()}
    floating = {name: value for name, value in inputs.items() if value.dtype.is_floating}
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
        results[f"gradient:{name}"] = tf.convert_to_tensor(value).numpy()
    return results


def save(file: Any, arrays: Sequence[Mapping[str, Arrays]]) -> None:
    """Writes a list of groups of arrays, of any dtype, to one npz file."""
    index, flat = [], {}
    for groups in arrays:
        entry: dict[str, Any] = {}
        for group, members in groups.items():
            if isinstance(members, str):
                entry[group] = members
                continue
            entry[group] = {}
            for name, value in members.items():
                key = str(len(flat))
                value = np.asarray(value)
                flat[key] = np.frombuffer(value.tobytes(), np.uint8)
                entry[group][name] = [key, value.dtype.name, list(value.shape)]
        index.append(entry)
    np.savez(file, index=np.frombuffer(json.dumps(index).encode(), np.uint8), **flat)


def load(file: Any) -> list[dict[str, Any]]:
    """Reads what `save` wrote."""
    dtypes = importlib.import_module("ml_dtypes")  # numpy's names are its own
    with np.load(file) as stored:

        def array(key: str, dtype: str, shape: list[int]) -> np.ndarray:
            kind = np.dtype(getattr(dtypes, dtype, dtype))
            return np.frombuffer(stored[key].tobytes(), kind).reshape(shape)

        return [
            {
                group: members
                if isinstance(members, str)
                else {name: array(*place) for name, place in members.items()}
                for group, members in entry.items()
            }
            for entry in json.loads(stored["index"].tobytes())
        ]


def main(directory: str, cases: str, results: str) -> None:
    """Makes the calls in one file, and writes their results to another."""
    for name in ("jax", "jaxlib", "pax_export"):
        sys.modules[name] = None  # type: ignore[assignment]  # importing them fails now
    save(results, [{"results": each} for each in run(directory, load(cases))])


if __name__ == "__main__":
    main(*sys.argv[1:])
