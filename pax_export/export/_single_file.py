"""Writing an export that is one file whole or not at all, as `_directory` does with others."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pax_export._errors import ExportPathError
from pax_export.export import _place


def check(path: Path, overwrite: bool) -> None:
    """Refuses a place that cannot take a file, before any work is done.

    Raises:
        ExportPathError: there is a directory, or a file that may not be
            replaced, or nothing can be written there.
    """
    if path.is_dir() or path.name in ("", ".."):
        raise ExportPathError(
            "This export is one file, and there is a directory.",
            where=str(path),
            write=f"the path of a file, e.g. {path / 'model'}",
        )
    if os.path.lexists(path) and not overwrite:
        raise _place.taken(path)
    parent = next(parent for parent in path.absolute().parents if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise _place.unwritable(path, f"{parent} is not a directory that can be written to")


@contextmanager
def replaced(path: Path, overwrite: bool) -> Iterator[Path]:
    """Gives the path of a file that becomes ``path`` if the block succeeds.

    Raises:
        ExportPathError: as for `check`.
    """
    check(path, overwrite)
    path = path.absolute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A sibling, so that it is on the same disk; in it, whatever a runtime leaves beside.
        folder = tempfile.TemporaryDirectory(
            prefix=f".{path.name}.", suffix=".part", dir=path.parent, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise _place.unwritable(path, error) from error
    with folder as name:
        temporary = Path(name, path.name)
        yield temporary
        try:
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            if overwrite:
                temporary.replace(path)
            else:
                path.hardlink_to(temporary)  # fails if somebody else was faster
        except FileExistsError as error:
            raise _place.taken(path) from error
        except OSError as error:
            raise _place.unwritable(path, error) from error
