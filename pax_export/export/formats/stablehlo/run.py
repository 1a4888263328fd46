"""Calls of a StableHLO bundle with jax, by name, as a test makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pax_export.export.artifact.report import read_report
from pax_export.export.formats.stablehlo.bundle import LoadedBundle, load

Arrays = dict[str, np.ndarray]


def run(directory: str, cases: Sequence[Mapping[str, Any]]) -> list[Arrays]:
    """Makes calls of the signatures of a StableHLO bundle with jax."""
    model = load(Path(directory), read_report(directory))
    return [_call(model, case) for case in cases]


def _call(model: LoadedBundle, case: Mapping[str, Any]) -> Arrays:
    inputs, cotangents = case["inputs"], case.get("cotangents") or {}
    outputs, new = model.signatures[case["signature"]].run(inputs)
    results = {name: np.asarray(value) for name, value in outputs.items()}
    for name, value in new.items():
        if not np.array_equal(value, model.weights[name]):
            results[f"variable:{name}"] = np.asarray(value)
    if cotangents:

        def run(weights: Arrays, given: Arrays) -> list[Any]:
            bundle = model.replace_weights(weights)
            outputs, _ = bundle.signatures[case["signature"]].run({**inputs, **given})
            return [outputs[name] for name in cotangents]

        taken = dict(model.weights), dict(inputs)
        floating = [
            {k: v for k, v in each.items() if jax.numpy.issubdtype(v.dtype, jax.numpy.inexact)}
            for each in taken
        ]
        gradients = jax.vjp(run, *floating)[1](list(map(jax.numpy.asarray, cotangents.values())))
        for name, value in {**gradients[0], **gradients[1]}.items():
            results[f"gradient:{name}"] = np.asarray(value)
    return results
