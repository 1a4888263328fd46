"""Checks an export before it is opened: hashes and allowed operations, by `Format.check`."""

from __future__ import annotations

import os
from pathlib import Path

from pax_export._foundations.errors import ExportPathError
from pax_export._foundations.files import checksums
from pax_export._foundations.files.paths import first_unusual, unusual_type
from pax_export._foundations.files.side_files import CARD_NAME
from pax_export.export.artifact import embedded, formats
from pax_export.export.artifact.inspect import GRAPH_FILE
from pax_export.export.artifact.report import DATA, DATA_SHA256, REPORT_FILE, SHA256, Report
from pax_export.export.artifact.screening import screen

#: TensorFlow looks at every byte of the arrays itself: the index has a checksum of each.
_INDEX, _ASSETS = "variables/variables.index", "assets"
_WARMUP = "assets.extra/tf_serving_warmup_requests"
_COPY = "a copy of it, as it was written"


def check(path: Path, report: Report, trusted: bool) -> None:
    """Refuses an export that is corrupted or, unless trusted, may do harm."""
    format = formats.find(report.target)
    if format is not None and format.check:
        formats.import_function(format.check)(path, report, trusted)


def saved_model(path: Path, report: Report | None = None, trusted: bool = False) -> None:
    """Checks any SavedModel before TensorFlow opens it."""
    _check_regular(path)
    check_sums(path)
    if not trusted:
        screen(path)


def _check_regular(path: Path) -> None:
    """Refuses special files, for which TensorFlow would wait; see `_foundations.files.paths`."""
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
    more = [name for name in (CARD_NAME, _WARMUP) if (directory / name).is_file()]
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
