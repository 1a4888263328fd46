"""Calls of a ONNX model with onnxruntime and numpy alone.

A fresh process that can import neither jax nor this package loads this file by its path.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def run(file: str, cases: Sequence[Mapping[str, Any]]) -> list[dict[str, np.ndarray]]:
    """Makes calls of an ONNX model with onnxruntime."""
    onnxruntime = importlib.import_module("onnxruntime")
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    taken = {given.name for given in session.get_inputs()}
    results = []
    for case in cases:
        # A model that does not read an input has no such input.
        inputs = {name: value for name, value in case["inputs"].items() if name in taken}
        results.append(dict(zip(names, session.run(names, inputs))))
    return results
