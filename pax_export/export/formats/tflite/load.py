"""A TFLite model as a callable again, by LiteRT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pax_export._errors import ExportPathError
from pax_export._optional import require
from pax_export.export.artifact.report import Report
from pax_export.export.formats.loaded_file import LoadedFile


def litert(purpose: str) -> Any:
    """The runtime of TFLite models."""
    return require("ai_edge_litert.interpreter", "tflite", purpose)


def load(path: Path, report: Report) -> LoadedFile:
    """Reads a TFLite model.

    Raises:
        ExportPathError: it is none, or damaged.
    """
    try:
        interpreter = litert("load").Interpreter(model_path=str(path))
        runners = {key: interpreter.get_signature_runner(key) for key in report.signatures}
    except (ValueError, RuntimeError) as error:
        raise ExportPathError(
            "LiteRT cannot read this file.", where=str(path), got=str(error)[:500]
        ) from error

    def run(key: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        # The arrays that it gives are its own, and change with the next call.
        return {name: np.array(value) for name, value in runners[key](**inputs).items()}

    return LoadedFile(report, interpreter, run)
