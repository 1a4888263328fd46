"""Writing a directory whole or not at all.

Everything is written into a sibling with a name of its own, which then takes
the place of the old directory in one step.  A process that dies at any moment
leaves the old directory, or the new one, and perhaps a hidden sibling.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pax_export._errors import ExportPathError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def replaced(path: Path, overwrite: bool) -> Iterator[Path]:
    """Gives an empty directory that becomes ``path`` if the block succeeds.

    Raises:
        ExportPathError: ``path`` is there already, or cannot be written to.
    """
    path = path.absolute()
    check(path, overwrite)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f".{path.name}.{secrets.token_hex(6)}.part"
        temporary.mkdir()
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        yield temporary
        _move(temporary, path, overwrite)
    finally:
        # What is still under this name now is unfinished, or the old export.
        shutil.rmtree(temporary, ignore_errors=True)


def check(path: Path, overwrite: bool) -> None:
    """Refuses a place that cannot take an export, before any work is done.

    Raises:
        ExportPathError: as for `replaced`.
    """
    path = path.absolute()
    if path.exists() or path.is_symlink():
        if not overwrite:
            raise _exists(path)
        if not path.is_dir() or path.is_symlink():
            raise ExportPathError(
                "This is no directory, so it is not overwritten.",
                where=path.name,
                write="the path of a directory",
            )
    parent = next(parent for parent in path.parents if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise _unwritable(path, f"{parent.name or parent} is not a directory that can be written")


def _exists(path: Path) -> ExportPathError:
    return ExportPathError(
        "There is something at this place already.",
        where=str(path),
        write="another path, or overwrite=True to replace it",
    )


def _unwritable(path: Path, reason: object) -> ExportPathError:
    return ExportPathError(
        "The export cannot be written here.",
        where=str(path),
        got=reason,
        write="a path in a directory that you may write to",
    )


def _move(temporary: Path, path: Path, overwrite: bool) -> None:
    try:
        # Takes the place of nothing, or of an empty directory.
        temporary.rename(path)
    except OSError as error:
        if not (path.is_dir() and overwrite):
            raise (_exists(path) if path.exists() else _unwritable(path, error)) from error
        if not _exchange(temporary, path):
            _replace_in_two_steps(temporary, path)


def _exchange(one: Path, other: Path) -> bool:
    """Lets two directories change places in one step, where the system can."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    names = (os.fsencode(one), os.fsencode(other))
    return renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0


def _replace_in_two_steps(temporary: Path, path: Path) -> None:
    """Where directories cannot be exchanged, the old one stands aside for a moment."""
    old = temporary.with_suffix(".old")
    path.rename(old)
    try:
        temporary.rename(path)
    except OSError:
        old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)
