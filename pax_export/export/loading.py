"""`load`: an export in, of whatever format, and a callable like the model out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pax_export._errors import ExportPathError
from pax_export._optional import require
from pax_export.export.artifact import formats
from pax_export.export.artifact.report import read_report


def load(path: str | os.PathLike[str]) -> Any:
    """Loads what `to_saved_model` or one of its sisters wrote.

    Args:
        path: of the export: a directory, or a file.

    Returns:
        A callable like the exported model: a `LoadedModel` of a SavedModel, a
        `LoadedBundle` of a StableHLO bundle, a `LoadedFile` of a TFLite or ONNX
        model.  No code of the export is run.

    Raises:
        ExportPathError: there is no export, or it cannot be read.
        MissingPackageError: what runs the export is not installed.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> from pax_export.export import load, spec, to_saved_model
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     double = ({"w": jnp.full(3, 2.0)}, lambda params, x: params["w"] * x)
        ...     report = to_saved_model(double, folder + "/double", spec("batch, 3"))
        ...     doubled = load(folder + "/double")
        >>> doubled([[1, 2, 3]]).tolist()
        [[2.0, 4.0, 6.0]]
    """
    report = read_report(path)
    format = formats.find(report.target)
    if format is None:
        raise ExportPathError(
            "This export was written by a newer pax_export, for a target that is not known here.",
            where=str(path),
            got=report.target,
        )
    if not format.loads_without_jax:
        require("jax", "all", f"load of {report.target}")
    return formats.imported(format.load)(Path(path), report)
