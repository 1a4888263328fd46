"""Recognizes exports of this package and their files by their reports, for overwriting."""

from __future__ import annotations

import functools
import os
import shutil
from fnmatch import fnmatchcase
from pathlib import Path

from pax_export._foundations.files import atomic, checksums
from pax_export._foundations.files.own_files import (
    CARD_NAME,
    Belongs,
    all_data_of_file,
    card_of_file,
    card_of_folder,
    files,
    now_in,
    recognize_card,
)
from pax_export._foundations.files.system import read_small_file
from pax_export.export.artifact import embedded
from pax_export.export.artifact.card import drawing_in, write_card
from pax_export.export.artifact.formats import Format, find, own_formats
from pax_export.export.artifact.report import REPORT_FILE, Report, report_text, write_report

_SAVED, _GRAPH, _ASSETS = "saved_model", "saved_model.pb", "assets/"
#: Files in a folder of any format that no list of its files has: the report, its
#: card, and the list itself.
_ALWAYS = (embedded.NAME, CARD_NAME, checksums.FILE)


def export_of_ours(path: Path) -> Belongs | None:
    """Returns the files of an export that `pax_export` wrote, in any format; otherwise None."""
    if path.is_file():
        return (lambda name: False) if _is_file_of_ours(path) else None
    try:
        format = _format_of(read_small_file(path / embedded.NAME, embedded.BYTES).decode())
    except (OSError, ValueError):
        return None
    return None if format is None or format.suffix else _belongs_to(path, format)


def saved_model_files(path: Path) -> Belongs | None:
    """Returns the files of a SavedModel, whoever wrote it; otherwise None."""
    return _belongs_to(path, own_formats()[_SAVED]) if (path / _GRAPH).is_file() else None


def _is_file_of_ours(path: Path) -> bool:
    try:
        format = _format_of(embedded.read(path))
    except (OSError, ValueError):
        return False
    return format is not None and bool(format.suffix)  # not a folder of ours in a zip archive


def _format_of(report: str | None) -> Format | None:
    try:
        data = embedded.parse_json(report or "")
        return find(data["target"]) if isinstance(data["format"], int) else None
    except (ValueError, KeyError, TypeError):
        return None


def _belongs_to(folder: Path, format: Format) -> Belongs:
    listed = checksums.names(folder)

    @functools.cache  # read for assets only, once for all of them
    def graph() -> bytes:
        file = folder / _GRAPH
        return file.read_bytes() if file.is_file() else b""

    def belongs(name: str) -> bool:
        if name in _ALWAYS:
            return True
        if format.name == _SAVED and name.startswith(_ASSETS):
            return _is_asset(graph(), name.removeprefix(_ASSETS))
        patterns = (each for each in format.files if each.count("/") == name.count("/"))
        if not any(fnmatchcase(name, each) for each in patterns):
            return False
        # The names in a SavedModel are fixed, and TensorFlow itself checks the arrays.
        return format.name == _SAVED or listed is None or name in listed

    return belongs


def _is_asset(graph: bytes, name: str) -> bool:
    """Returns whether the graph names this asset: tensorflow.AssetFileDef.filename, field 2."""
    encoded = os.fsencode(name)
    return len(encoded) < 128 and b"\x12%c%b" % (len(encoded), encoded) in graph


# --- Replaces the report of an export, and its card, without changing the model ------------------


def check_writable(path: Path) -> None:
    """Refuses, by an ExportPathError, an export that may not be written to."""
    written = path / REPORT_FILE if path.is_dir() else path
    if not os.access(written, os.W_OK):
        raise atomic.unwritable_error(path, f"a file that may be read only: {written.name}")
    if path.is_dir():
        atomic.check_directory(path, now_in(path))
    else:
        atomic.check_file(path, export_of_ours)


def replace_report(path: Path, report: Report) -> None:
    """Replaces the report of an export, its card, and the hashes of a folder, atomically."""
    path = path.absolute()
    if path.is_dir():
        _in_folder(path, report)
    else:
        _in_file(path, report)


def _in_folder(path: Path, report: Report) -> None:
    anew = {REPORT_FILE, CARD_NAME, checksums.FILE}
    with atomic.replace_directory(path, now_in(path)) as new:
        for name in files(path):
            if name not in anew:
                _link_file(path / name, new / name)
        write_anew(path, new, report)


def write_anew(old: Path, new: Path, report: Report) -> None:
    """Writes a report into a copy of a folder; its card and hashes are made again."""
    listed, card = checksums.names(old), card_of_folder(old)
    write_report(report, new)
    if card.is_file():
        write_card(report, new, card_of_folder(new), _drawing_of(card))
    if listed is not None:
        checksums.write(new, files=(name for name in listed if (new / name).is_file()))


def _in_file(path: Path, report: Report) -> None:
    card = card_of_file(path)
    drawing, ours = _drawing_of(card), recognize_card(card) is not None
    with atomic.replace_file(path, export_of_ours) as new:
        shutil.copyfile(path, new)
        embedded.replace(new, report_text(report))
        for each in all_data_of_file(path):
            _link_file(each, new.with_name(each.name))
        if ours:
            write_card(report, new, card_of_file(new), drawing)


def _drawing_of(card: Path) -> str:
    return drawing_in(card.read_bytes().decode("utf-8", "replace")) if card.is_file() else ""


def _link_file(file: Path, new: Path) -> None:
    """Links a file to another path, because weights may be large and are not modified."""
    new.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(file, new)
    except OSError:  # of a file system without links
        shutil.copyfile(file, new)
