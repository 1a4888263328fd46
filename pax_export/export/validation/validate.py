"""Calls of what was written, beside what was meant."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pax_export._errors import ValidationError
from pax_export.export.artifact.formats import Format, imported
from pax_export.export.validation import serve
from pax_export.export.validation.compare import Case, compare_either
from pax_export.export.validation.serve import Arrays, Run


def validate(
    format: Format,
    place: Path,
    cases: Sequence[Case],
    separate: bool,
    factor: float = 1.0,
    here: Run | None = None,
) -> dict[str, float]:
    """Makes all calls of an export and compares their results.

    Args:
        format: what was written.
        place: where, a directory or a file.
        cases: the calls with the results that jax gives.
        separate: run the export in a fresh process that cannot import jax.
        factor: how much more than rounding a result may differ, where numbers
            are stored with fewer bits.
        here: what makes the calls in this process, if it is not the format's own way.

    Returns:
        The largest absolute difference for each result of each signature.
    """
    try:
        results = call(format, place, cases, separate, here)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"[-2000:]
        if any(case.cotangents for case in cases):
            # What is wrong with the results themselves comes first.
            plain = [case.without_gradients() for case in cases]
            validate(format, place, plain, separate, factor, here)
            raise ValidationError(
                "The gradient of the exported model cannot be computed.",
                got=message,
                write="vjp_order=0, if nobody needs gradients, and please report it",
            ) from error
        processed = any(case.stage == "all" for case in cases)
        raise ValidationError(
            "The exported model cannot be called.",
            got=message,
            write="examples=[...], arguments that the preprocessor can read" if processed else None,
        ) from error
    errors: dict[str, float] = {}
    for case, got in zip(cases, results):
        if case.expect is not None:  # what is right depends on what a preprocessor gave
            case.expected = case.expect(got)
        for name, difference in compare_either(case, got, factor).items():
            key = f"{case.signature}: {name}"
            errors[key] = max(difference, errors.get(key, 0.0))
    return errors


def call(
    format: Format,
    place: Path,
    cases: Sequence[Case],
    separate: bool,
    here: Run | None = None,
) -> list[Arrays]:
    """The results of all calls, made here or in a fresh process without jax."""
    calls = [case.call() for case in cases]
    if separate:
        return [entry["results"] for entry in in_process(format, place, calls, "all")]
    return (here or imported(format.run))(str(place), calls)


def in_process(
    format: Format, place: Path, calls: serve.Cases, mode: Literal["all", "each"]
) -> list[dict[str, Any]]:
    """Makes calls in a fresh process that can import only what its format needs of ours.

    Args:
        format: what is called.
        place: of the export.
        calls: see `serve`.
        mode: ``"each"`` goes on after one that fails.

    Returns:
        For each call ``{"results": arrays by name}``, or ``{"error": message}``.
    """
    module, _, function = format.run.partition(":")
    spec: Any = importlib.util.find_spec(module)
    with tempfile.TemporaryDirectory() as folder:
        cases, results = Path(folder, "cases.npz"), Path(folder, "results.npz")
        serve.save(cases, calls)
        program = [sys.executable, serve.__file__, f"{spec.origin}:{function}", str(place)]
        # For a format that needs this package, wherever it was imported from.
        paths = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
        done = subprocess.run(
            [*program, str(cases), str(results), mode, *format.run_imports],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-1500:])
        return serve.load(results)
