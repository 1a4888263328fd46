"""`load`: loads an export of any format as a callable."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pax_export._foundations.errors import ExportPathError
from pax_export._foundations.optional import require
from pax_export.export.artifact import checking, formats
from pax_export.export.artifact.inspect import damage_as_error
from pax_export.export.artifact.report import read_report


def load(path: str | os.PathLike[str], *, trusted: bool = False) -> Any:
    """Loads an export as a callable.

    The graph of a SavedModel is parsed first, and refused if an operation is not on the allowlist
    of operations that only compute; so are the custom calls of a StableHLO bundle. This is not a
    sandbox: run exports of untrusted sources in one.

    Args:
        path: the path of the export, a directory or a file.
        trusted: load a SavedModel or bundle regardless of its operations. Corrupted files are still
            refused.

    Returns:
        A callable like the exported model: a `LoadedModel` of a SavedModel, a
        `LoadedBundle` of a StableHLO bundle, a `LoadedFile` of a TFLite or ONNX
        model, or of a folder for browsers.

    Raises:
        ExportPathError: the export is missing, unreadable or corrupted.
        UntrustedExportError: it has operations that are not allowed, and is not trusted.
        MissingPackageError: the runtime is not installed.

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
    runtime = report.details.get("runs_in")
    if runtime and "files" in report.details:  # which only language models list
        raise ExportPathError(
            f"The export is a language model for {runtime}, which runs it without `load`.",
            where=str(path),
            got=f"format={report.target!r}",
            write=f"{runtime} with this path; or load of an export of functions, "
            "format='saved_model', 'stablehlo', 'onnx' or 'tflite'",
        )
    format = formats.find(report.target)
    if format is None:
        raise ExportPathError(
            "This export was written by a newer pax_export or by another package, for a target "
            "that is not known here.",
            where=str(path),
            got=report.target,
            write="the package that wrote it, installed here",
        )
    if not format.loads_without_jax:
        require("jax", "all", f"load of {report.target}")
    checking.check(Path(path), report, trusted)
    what = "This export cannot be loaded: it is damaged, or was not written by pax_export."
    write = "a copy of it, as it was written"
    with damage_as_error(what, Path(path), write, ImportError):  # of a broken runtime
        return formats.import_function(format.load)(Path(path), report)
