"""One published net: adopted, compared with its reference, exported, served, compared again."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import pax_export as pax
from tests.closeness import assert_close
from tests.zoo.collection import Export, Trained

#: Every output is a chance from 0 to 1, or the corner of a box in about that size.
ALLOWED = 1e-4
FORMATS = {"SavedModel": pax.export.to_saved_model, "ONNX": pax.export.to_onnx}


def attempt(trained: Trained, folder: Path) -> dict[str, Any]:
    """What became of it: the numbers of the page; raises where anything is off."""
    net, report = trained.load(trained.path)
    export, found = trained.export, _arrays(report)
    wanted = {
        name: make(trained.folder)(*export.inputs) for name, make in trained.references.items()
    }
    found["jax"] = {
        name: apart(_call(net, export), outputs, name) for name, outputs in wanted.items()
    }
    for form, write in FORMATS.items():
        served = _served(net, form, write, export, folder / f"{form}_0")
        found[form] = max(apart(served, outputs, form) for outputs in wanted.values())
        for i, other in enumerate(trained.others, start=1):
            served = _served(net, form, write, other, folder / f"{form}_{i}")
            apart(served, _call(net, other), f"{form} {other.shapes}")
    return found


def apart(actual: Sequence[Any], expected: Sequence[Any], where: str) -> float:
    """The largest difference; raises if it is too large."""
    assert len(actual) == len(expected), where
    for one, other in zip(actual, expected):
        assert_close(one, other, rtol=0, atol=ALLOWED, where=where)
    return max(float(np.abs(np.asarray(a) - b).max()) for a, b in zip(actual, expected))


def _call(net: Any, export: Export) -> list[Any]:
    return jax.tree_util.tree_leaves(net(*export.inputs))


def _served(net: Any, form: str, write: Any, export: Export, path: Path) -> list[np.ndarray]:
    """The outputs of an export, from the runtime of its format and without this library."""
    write(net, path, export.specs, constraints=export.constraints)
    return {"SavedModel": _by_tensorflow, "ONNX": _by_onnxruntime}[form](path, export)


def _by_tensorflow(path: Path, export: Export) -> list[np.ndarray]:
    import tensorflow as tf

    serve = tf.saved_model.load(str(path)).signatures["serving_default"]
    # The nets here have their parameters in the order of the alphabet.
    names = sorted(serve.structured_input_signature[1])
    outputs = serve(**{name: tf.constant(x) for name, x in zip(names, export.inputs)})
    return [outputs[name].numpy() for name in sorted(outputs)]


def _by_onnxruntime(path: Path, export: Export) -> list[np.ndarray]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    return session.run(None, dict(zip(names, export.inputs)))


def _arrays(report: Any) -> dict[str, Any]:
    """What the report lists, in short."""
    said = report.to_dict()
    arrays = {name for row in said["rows"] for name in row["arrays"]}
    return {
        "arrays": len(arrays),
        "leaves": len(said["rows"]),
        "numbers": sum(math.prod(row["shape"]) for row in said["rows"]),
        "origin": said["origin"],
        "how": dict(sorted(Counter(row["how"] or "as they are" for row in said["rows"]).items())),
        "tried": said["tried"],
    }
