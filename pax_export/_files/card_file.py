"""The path of an export's HTML card: inside a folder, or next to a file."""

from __future__ import annotations

import os
from pathlib import Path

from pax_export._errors import ExportPathError
from pax_export._files import file_types
from pax_export._files.overwrite_guard import Belongs

#: The name in a folder.
NAME = "pax_export.html"
#: The suffix after the name of the file.
SUFFIX = ".html"
#: The mark in the second line.
MARK = "<!-- the card of an export of pax_export -->"
_LOOKED_AT = 200


def of_folder(path: Path) -> Path:
    return path / NAME


def of_file(path: Path) -> Path:
    """The path of the card of a file."""
    return path.with_name(path.name + SUFFIX)


def recognize_card(path: Path) -> Belongs | None:
    """Returns the files of a card at a path, which are none but itself; None without a card."""
    if path.is_symlink() or not path.is_file():
        return None
    with path.open("rb") as file:
        return (lambda name: False) if MARK.encode() in file.read(_LOOKED_AT) else None


def check(path: Path) -> None:
    """Raises an ExportPathError if the card of a file would replace anything but an empty file."""
    place = of_file(path)
    if not os.path.lexists(place) or recognize_card(place) is not None:
        return
    if place.is_file() and not place.is_symlink() and not place.stat().st_size:
        return
    raise ExportPathError(
        "Another file is at the path of this export's card.",
        where=str(place),
        got=file_types.unusual_type(place) or "a file that is not a model card",
        write="card=False (--no-card), or another path",
    )


def remove(path: Path) -> None:
    """Removes the card of a file that no longer exists."""
    place = of_file(path)
    if recognize_card(place) is not None:
        place.unlink(missing_ok=True)
