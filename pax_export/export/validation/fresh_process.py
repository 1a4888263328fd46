"""Calls of an export in a fresh process, which can import no jax."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pax_export.export.validation import serve


def in_process(
    runtime: str, place: Path, calls: Sequence[Mapping[str, Any]], mode: str
) -> list[dict[str, Any]]:
    """Makes calls in a fresh process that cannot import jax.

    Args:
        runtime: the key of what runs them, in `_served.RUNTIMES`.
        place: of the export.
        calls: see `_served.run`.
        mode: ``"all"``, or ``"each"`` to go on after one that fails.

    Returns:
        For each call ``{"results": arrays by name}``, or ``{"error": message}``.

    Raises:
        RuntimeError: the process failed; with the end of what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        cases, results = Path(folder, "cases.npz"), Path(folder, "results.npz")
        serve.save(cases, calls)
        program = [sys.executable, serve.__file__, runtime, str(place), str(cases), str(results)]
        # For the one runtime that needs this package, wherever it was imported from.
        paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        done = subprocess.run([*program, mode], capture_output=True, text=True, env=env)
        if done.returncode:
            raise RuntimeError(done.stderr[-1500:])
        return serve.load(results)
