"""Writing one file whole or not at all, as `directory` does with folders.

The file is written in a hidden sibling directory, which the next save removes
if this one is killed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pax_export._errors import ExportPathError
from pax_export._files import directory, disk, leftovers


def check(path: Path, overwrite: bool) -> None:
    """Refuses, by an ExportPathError, a place that cannot take a file, before any work is done."""
    if path.is_dir() or path.name in ("", ".."):
        raise ExportPathError(
            "This export is one file, and there is a directory.",
            where=str(path),
            write=f"the path of a file, e.g. {path / 'model'}",
        )
    if os.path.lexists(path) and not overwrite:
        raise directory.taken(path)
    parent = next(parent for parent in path.absolute().parents if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise directory.unwritable(path, f"{parent} is not a directory that can be written to")


@contextmanager
def replaced(path: Path, overwrite: bool, needed: int = 0) -> Iterator[Path]:
    """Gives the path of a file that becomes ``path`` if the block succeeds."""
    check(path, overwrite)
    with written(path, overwrite, needed) as temporary:
        yield temporary


@contextmanager
def written(path: Path, overwrite: bool = True, needed: int = 0) -> Iterator[Path]:
    """As `replaced`, for a place that has been looked at before, or may be anything."""
    path = path.absolute()
    leftovers.sweep(path)
    with directory.begun(path, needed) as folder:
        temporary = folder / path.name  # in a directory, with whatever a runtime leaves beside
        yield temporary
        disk.sync(folder)
        _move(temporary, path, overwrite)
        disk.sync_one(path.parent)


def _move(temporary: Path, path: Path, overwrite: bool) -> None:
    try:
        if overwrite:
            temporary.replace(path)
        else:
            directory.rename_to_nothing(temporary, path)  # fails if somebody else was faster
    except FileExistsError as error:
        raise directory.taken(path) from error
    except OSError as error:
        raise directory.unwritable(path, error) from error
