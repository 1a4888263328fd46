"""An ONNX model as a callable again, by onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pax_export._errors import ExportPathError
from pax_export._optional import require
from pax_export.export.artifact.report import Report
from pax_export.export.formats.loaded_file import LoadedFile


def onnxruntime(purpose: str) -> Any:
    """The runtime of ONNX models."""
    return require("onnxruntime", "onnx", purpose)


def load(path: Path, report: Report) -> LoadedFile:
    """Reads an ONNX model.

    Raises:
        ExportPathError: it is none, or damaged.
    """
    runtime = onnxruntime("load")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors; warnings are about what conversion left over
    try:
        session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no common class
        raise ExportPathError(
            "onnxruntime cannot read this file.", where=str(path), got=str(error)[:500]
        ) from error
    names = [output.name for output in session.get_outputs()]
    taken = {entry.name for entry in session.get_inputs()}

    def run(key: str, inputs: dict[str, np.ndarray]) -> dict[str, Any]:
        given = {name: value for name, value in inputs.items() if name in taken}
        return dict(zip(names, session.run(names, given)))

    return LoadedFile(report, session, run)
