"""Runs a TFLite model with LiteRT and numpy only.

A fresh process that can import neither jax nor this package loads this file by its path.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


def opened(
    file: str, keys: Iterable[str] | None = None
) -> tuple[Any, Callable[[str, Arrays], Arrays]]:
    """Returns LiteRT's interpreter of a file, and a function that calls its signatures.

    It is thread-safe; calls are serialized.
    """
    litert = importlib.import_module("ai_edge_litert.interpreter")
    interpreter = litert.Interpreter(model_path=file)
    chosen = interpreter.get_signature_list() if keys is None else keys
    runners = {key: interpreter.get_signature_runner(key) for key in chosen}

    # All signatures keep their inputs and outputs in one interpreter.
    one_at_a_time = threading.Lock()

    def call(key: str, inputs: Arrays) -> Arrays:
        with one_at_a_time:
            # LiteRT owns the returned arrays, and overwrites them in the next call.
            return {name: np.array(value) for name, value in runners[key](**inputs).items()}

    return interpreter, call


def run(file: str, cases: Iterable[Mapping[str, Any]]) -> list[Arrays]:
    _, call = opened(file)
    return [call(case["signature"], case["inputs"]) for case in cases]
