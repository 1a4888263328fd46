"""The path of a file's external data; its hash keeps exports to one path apart."""

from __future__ import annotations

import re
from pathlib import Path

_DIGITS = 16


def of_file(path: Path, digest: str) -> Path:
    """The path of the external data of a file: its name, 16 digits of the hash, ``.data``."""
    return path.with_name(f"{path.name}.{digest[:_DIGITS]}.data")


def all_of_file(path: Path) -> list[Path]:
    """Returns all external data files of a path, current and old."""
    if not path.parent.is_dir():
        return []
    name = re.compile(rf"{re.escape(path.name)}\.[0-9a-f]{{{_DIGITS}}}\.data")
    return sorted(each for each in path.parent.iterdir() if name.fullmatch(each.name))
