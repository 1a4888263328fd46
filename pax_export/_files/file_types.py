"""File types of paths: only regular files are read or replaced, never FIFOs or devices."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO (a named pipe)"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISSOCK, "a socket"),
)


def unusual_type(path: Path) -> str | None:
    """The type of a path unless a regular file or missing; raises OSError for link loops."""
    try:
        return kind(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return None


def kind(mode: int) -> str | None:
    """Describes the type of a file by its mode; None for a regular file."""
    return next((name for is_such, name in _KINDS if is_such(mode)), None)


def first_unusual(folder: Path) -> Path | None:
    """The first entry below a folder that is neither a regular file nor a folder; follows links."""
    linked = [each for each in folder.iterdir() if each.is_symlink() and each.is_dir()]
    walks = (os.walk(top) for top in (folder, *linked))
    paths = (Path(parent, name) for walk in walks for parent, _, names in walk for name in names)
    return next((path for path in paths if unusual_type(path)), None)
