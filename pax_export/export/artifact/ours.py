"""Recognizes exports of this package and their files by their reports, for overwriting."""

from __future__ import annotations

import functools
import os
from fnmatch import fnmatchcase
from pathlib import Path

from pax_export._files import checksums
from pax_export._files.overwrite_guard import Belongs
from pax_export._files.paths import read_small_file
from pax_export._files.side_files import CARD_NAME
from pax_export.export.artifact import embedded
from pax_export.export.artifact.formats import Format, find, own_formats

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


def saved_model(path: Path) -> Belongs | None:
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
