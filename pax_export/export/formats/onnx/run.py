"""Calls of an ONNX model with onnxruntime and numpy alone.

A fresh process that can import neither jax nor this package loads this file by its path.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]

#: The entry of the metadata that has the names of the model's outputs, where an input has the
#: same: a graph has each name once.
OUTPUT_NAMES = "pax_export.outputs"


def opened(file: str) -> tuple[Any, Callable[[str, Arrays], Arrays]]:
    """Onnxruntime's session of a file, and what calls its only function."""
    onnxruntime = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors; warnings are about what conversion left over
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    found = session.get_modelmeta().custom_metadata_map.get(OUTPUT_NAMES)
    meant = json.loads(found) if found else {}
    names = [output.name for output in session.get_outputs()]
    taken = {entry.name for entry in session.get_inputs()}

    def call(key: str, inputs: Arrays) -> Arrays:
        # A model that does not read an input has no such input.
        given = {name: value for name, value in inputs.items() if name in taken}
        results = session.run(names, given)
        return {meant.get(name, name): value for name, value in zip(names, results)}

    return session, call


def run(file: str, cases: Sequence[Mapping[str, Any]]) -> list[Arrays]:
    _, call = opened(file)
    return [call(case["signature"], case["inputs"]) for case in cases]
