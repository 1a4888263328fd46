"""Files that belong to an export of one file: its card, and its external data."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pax_export._foundations.errors import ExportPathError
from pax_export._foundations.files.overwrite_guard import Belongs
from pax_export._foundations.files.paths import unusual_type

#: The name in a folder.
CARD_NAME = "pax_export.html"
#: The suffix after the name of the file.
_CARD_SUFFIX = ".html"
#: The mark in the second line.
CARD_MARK = "<!-- the card of an export of pax_export -->"
_LOOKED_AT = 200


def card_of_folder(path: Path) -> Path:
    return path / CARD_NAME


def card_of_file(path: Path) -> Path:
    """The path of the card of a file."""
    return path.with_name(path.name + _CARD_SUFFIX)


def recognize_card(path: Path) -> Belongs | None:
    """Returns the files of a card at a path, which are none but itself; None without a card."""
    if path.is_symlink() or not path.is_file():
        return None
    with path.open("rb") as file:
        return (lambda name: False) if CARD_MARK.encode() in file.read(_LOOKED_AT) else None


def check_card(path: Path) -> None:
    """Raises an ExportPathError if the card of a file would replace anything but an empty file."""
    card = card_of_file(path)
    if not os.path.lexists(card) or recognize_card(card) is not None:
        return
    if card.is_file() and not card.is_symlink() and not card.stat().st_size:
        return
    raise ExportPathError(
        "Another file is at the path of this export's card.",
        where=str(card),
        got=unusual_type(card) or "a file that is not a model card",
        write="card=False (--no-card), or another path",
    )


def remove_card(path: Path) -> None:
    """Removes the card of a file that no longer exists."""
    card = card_of_file(path)
    if recognize_card(card) is not None:
        card.unlink(missing_ok=True)


# --- the path of a file's external data; its hash keeps exports to one path apart -----


_DIGITS = 16


def data_of_file(path: Path, digest: str) -> Path:
    """The path of the external data of a file: its name, 16 digits of the hash, ``.data``."""
    return path.with_name(f"{path.name}.{digest[:_DIGITS]}.data")


def all_data_of_file(path: Path) -> list[Path]:
    """Returns all external data files of a path, current and old."""
    if not path.parent.is_dir():
        return []
    name = re.compile(rf"{re.escape(path.name)}\.[0-9a-f]{{{_DIGITS}}}\.data")
    return sorted(each for each in path.parent.iterdir() if name.fullmatch(each.name))
