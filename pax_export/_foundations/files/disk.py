"""Free disk space, and what is brought to the disk."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pax_export._foundations.errors import ExportPathError
from pax_export._foundations.files import system

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_room(path: Path, needed: int) -> None:
    """Refuses, by an ExportPathError, to begin a write that cannot end well."""
    room = shutil.disk_usage(path.parent)
    # A file system that does not count blocks reports none at all.
    if room.total and room.free < needed:
        raise _full_disk_error(path, needed, f"{bytes_text(room.free)} free")


@contextmanager
def full_disk_explained(path: Path, needed: int) -> Iterator[None]:
    """Says in our words that the disk is full, whoever was the first to notice."""
    try:
        yield
    except ExportPathError:
        raise
    except Exception as error:  # of any writer; all but a full disk is raised again
        if _is_full(error):
            got = getattr(error, "got", None) or f"{type(error).__name__}: {error}"
            raise _full_disk_error(path, needed, str(got)[:300]) from error
        raise


def _is_full(error: Exception) -> bool:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _FULL
    # TensorFlow wraps the system's error in its own class.
    return any(os.strerror(number) in str(error) for number in _FULL)


def _full_disk_error(path: Path, needed: int, got: str) -> ExportPathError:
    return ExportPathError(
        "There is not enough room on the disk for the export.",
        where=str(path),
        got=f"{got}; about {bytes_text(needed)} ({needed} bytes) needed" if needed else got,
        write="a path on another disk, or free some room; an old export is removed only after "
        "the new one is written",
    )


def sync(directory: Path) -> None:
    """Brings all files of a directory to the disk, and then their names."""
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            system.sync(Path(folder, name))
        system.sync(Path(folder))


def bytes_text(count: float) -> str:
    """A number of bytes with its unit.

    Example:
        >>> bytes_text(5), bytes_text(36 * 2**20)
        ('5 B', '36.0 MiB')
    """
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"
