"""Replaces the report of an export, and its card, without changing the model."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pax_export._files import checksums, directory, single_file
from pax_export._files.overwrite_guard import files, now_in
from pax_export._files.side_files import (
    CARD_NAME,
    all_data_of_file,
    card_of_file,
    card_of_folder,
    recognize_card,
)
from pax_export.export.artifact import embedded
from pax_export.export.artifact.card import drawing_in, write_card
from pax_export.export.artifact.ours import export_of_ours
from pax_export.export.artifact.report import REPORT_FILE, Report, report_text, write_report


def check_writable(path: Path) -> None:
    """Refuses, by an ExportPathError, an export that may not be written to."""
    written = path / REPORT_FILE if path.is_dir() else path
    if not os.access(written, os.W_OK):
        raise directory.unwritable_error(path, f"a file that may be read only: {written.name}")
    if path.is_dir():
        directory.check(path, now_in(path))
    else:
        single_file.check(path, export_of_ours)


def replace_report(path: Path, report: Report) -> None:
    """Replaces the report of an export, its card, and the hashes of a folder, atomically."""
    path = path.absolute()
    if path.is_dir():
        _in_folder(path, report)
    else:
        _in_file(path, report)


def _in_folder(path: Path, report: Report) -> None:
    anew = {REPORT_FILE, CARD_NAME, checksums.FILE}
    with directory.replace_path(path, now_in(path)) as place:
        for name in files(path):
            if name not in anew:
                _link_file(path / name, place / name)
        write_anew(path, place, report)


def write_anew(old: Path, place: Path, report: Report) -> None:
    """Writes a report into a copy of a folder; its card and hashes are made again."""
    listed, card = checksums.names(old), card_of_folder(old)
    write_report(report, place)
    if card.is_file():
        write_card(report, place, card_of_folder(place), _drawing_of(card))
    if listed is not None:
        checksums.write(place, files=(name for name in listed if (place / name).is_file()))


def _in_file(path: Path, report: Report) -> None:
    card = card_of_file(path)
    drawing, ours = _drawing_of(card), recognize_card(card) is not None
    with single_file.replace_path(path, export_of_ours, path.stat().st_size) as place:
        shutil.copyfile(path, place)
        embedded.replace(place, report_text(report))
        for each in all_data_of_file(path):
            _link_file(each, place.with_name(each.name))
        if ours:
            write_card(report, place, card_of_file(place), drawing)


def _drawing_of(card: Path) -> str:
    return drawing_in(card.read_bytes().decode("utf-8", "replace")) if card.is_file() else ""


def _link_file(file: Path, place: Path) -> None:
    """Links a file to another path, because weights may be large and are not modified."""
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(file, place)
    except OSError:  # of a file system without links
        shutil.copyfile(file, place)
