"""Calls of a TFLite model with LiteRT and numpy alone.

A fresh process that can import neither jax nor this package loads this file by its path.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def run(file: str, cases: Sequence[Mapping[str, Any]]) -> list[dict[str, np.ndarray]]:
    """Makes calls of the signatures of a TFLite model with LiteRT."""
    litert = importlib.import_module("ai_edge_litert.interpreter")
    interpreter = litert.Interpreter(model_path=file)
    results = []
    for case in cases:
        call = interpreter.get_signature_runner(case["signature"])
        results.append({name: np.array(value) for name, value in call(**case["inputs"]).items()})
    return results
