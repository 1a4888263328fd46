"""Calls of an export in a fresh process, which can import no jax."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

from pax_export.export.artifact.formats import Format
from pax_export.export.validation import serve


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
