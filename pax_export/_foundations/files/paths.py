"""Paths that users give, and what is there: only regular files are read or replaced."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pax_export._foundations.errors import InvalidArgumentTypeError
from pax_export._foundations.files import system


def as_path(path: object, argument: str = "path") -> Path:
    """The argument as a Path; an InvalidArgumentTypeError if it is neither text nor a path."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if isinstance(text, str):
        return Path(text)
    raise InvalidArgumentTypeError(
        "A path must be a string or an os.PathLike of one.",
        where=argument,
        got=f"{type(path).__name__}: {path!r}"[:120],
        write=f'{argument}="path/to/it"',
    )


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
        return file_kind(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return None


def file_kind(mode: int) -> str | None:
    """Describes the type of a file by its mode; None for a regular file."""
    return next((name for is_such, name in _KINDS if is_such(mode)), None)


def first_unusual(folder: Path) -> Path | None:
    """The first entry below a folder that is neither a regular file nor a folder; follows links."""
    linked = [each for each in folder.iterdir() if each.is_symlink() and each.is_dir()]
    walks = (os.walk(top) for top in (folder, *linked))
    paths = (Path(parent, name) for walk in walks for parent, _, names in walk for name in names)
    return next((path for path in paths if unusual_type(path)), None)


def read_small_file(file: Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes; an OSError otherwise."""
    with open(system.open_to_read(file), "rb") as content:
        about = os.fstat(content.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise OSError(f"not a regular file, but {file_kind(about.st_mode)}")
        if about.st_size > most:
            raise OSError(f"it has {about.st_size} bytes, and {most} are the most that is read")
        return content.read(most)
