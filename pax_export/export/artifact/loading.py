"""`load`: opens an export of any format, after its hashes and operations are checked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pax_export._foundations.errors import ExportPathError
from pax_export._foundations.files import checksums
from pax_export._foundations.files.own_files import CARD_NAME
from pax_export._foundations.files.system import first_unusual, unusual_type
from pax_export._foundations.optional import require
from pax_export.export.artifact import embedded, formats
from pax_export.export.artifact.report import (
    DATA,
    DATA_SHA256,
    REPORT_FILE,
    SHA256,
    Report,
    read_report,
)
from pax_export.export.artifact.saved_models import GRAPH_FILE, damage_as_error
from pax_export.export.artifact.screening import screen

#: TensorFlow looks at every byte of the arrays itself: the index has a checksum of each.
_INDEX, _ASSETS = "variables/variables.index", "assets"
_COPY = "a copy of it, as it was written"


def check(path: Path, report: Report, trusted: bool) -> None:
    """Refuses an export that is corrupted or, unless trusted, may do harm."""
    format = formats.find(report.target)
    if format is not None and format.check:
        formats.import_function(format.check)(path, report, trusted)


def check_saved_model(path: Path, report: Report | None = None, trusted: bool = False) -> None:
    """Checks any SavedModel before TensorFlow opens it."""
    _check_regular(path)
    check_sums(path)
    if not trusted:
        screen(path)


def _check_regular(path: Path) -> None:
    """Refuses special files, for which TensorFlow would wait; see `_foundations.files.system`."""
    try:
        strange = first_unusual(path)
        kind = strange and unusual_type(strange)
    except OSError as error:
        raise ExportPathError(
            "The SavedModel cannot be read.", where=str(path), got=error.strerror
        ) from error
    if kind:
        raise ExportPathError(
            "A file of the SavedModel is not a regular file.",
            where=str(strange),
            got=kind,
            write=_COPY,
        )


def check_sums(path: Path) -> None:
    """Refuses a SavedModel that differs from the hashes that it contains, if any."""
    if os.path.lexists(path / checksums.FILE):
        checked = checksums.check(path)
        for name in _of_saved_model(path):
            checked.path(name)


def write_sums(directory: Path) -> None:
    """Writes the hashes of a SavedModel, of all that TensorFlow does not look at itself."""
    more = [name for name in (CARD_NAME, formats.WARMUP_REQUESTS) if (directory / name).is_file()]
    checksums.write(directory, files=_of_saved_model(directory) + more)


def _of_saved_model(path: Path) -> list[str]:
    assets = (each for each in sorted((path / _ASSETS).rglob("*")) if each.is_file())
    names = [GRAPH_FILE, REPORT_FILE, *(each.relative_to(path).as_posix() for each in assets)]
    return names + ([_INDEX] if (path / _INDEX).is_file() else [])


def check_file(path: Path, report: Report, trusted: bool) -> None:
    """Compares a file that contains its report with the hash in the report."""
    digest = report.details.get(SHA256)
    if digest is None:
        return
    cause = None
    try:
        whole = embedded.is_whole(path, embedded.read(path) or "", digest)
    except (OSError, ValueError) as error:
        whole, cause = False, error
    if not whole:
        raise ExportPathError(
            "The export is corrupted: its hash does not match.",
            where=str(path),
            got=f"{path.stat().st_size} bytes with another hash than the report in it has",
            write="a copy of the file, as it was written",
        ) from cause
    if DATA in report.details:
        _check_data(path.with_name(Path(report.details[DATA]).name), report)


def _check_data(data: Path, report: Report) -> None:
    try:
        kind = unusual_type(data)
        got = kind or "other bytes than were written"
        if not kind and checksums.digest(data) == report.details.get(DATA_SHA256):
            return
    except OSError as error:
        got = error.strerror or repr(error)
    raise ExportPathError(
        "The external data of the model are corrupted: their hash does not match.",
        where=str(data),
        got=got,
        write="a copy of both files, side by side",
    )


# --- `load`: loads an export of any format as a callable ---


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
    check(Path(path), report, trusted)
    what = "This export cannot be loaded: it is damaged, or was not written by pax_export."
    write = "a copy of it, as it was written"
    with damage_as_error(what, Path(path), write, ImportError):  # of a broken runtime
        return formats.import_function(format.load)(Path(path), report)
