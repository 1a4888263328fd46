"""Removes temporary files of killed saves; a lock marks those of running ones.

Without locks in the file system, they stay.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pax_export._foundations.files import system

#: The end of the name of a directory that is being written, or being removed.
PART = ".part"
#: An old export, set aside until the new one has its name.
OLD = ".old"

_RANDOM = 6
_TRIES = 100
#: ``.NAME.RANDOM.part``, where NAME is the file or folder being written.
_NAME = re.compile(
    rf"\.(?P<of>.+)\.[0-9a-f]{{{2 * _RANDOM}}}(?P<suffix>{re.escape(PART)}|{re.escape(OLD)})",
    re.DOTALL,
)
#: Temporary files of computations, in the system's directory for them.
_SCRATCH = "pax_export"


@contextmanager
def claim_temporary(path: Path, mode: int = 0o777) -> Iterator[Path]:
    """Yields a new hidden directory next to a path, removed at the end of the block."""
    temporary, lock = _claim_directory(path, mode)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        _release_lock(lock)


@contextmanager
def scratch() -> Iterator[Path]:
    """Yields a private temporary directory; removes those of killed processes first."""
    folder = Path(tempfile.gettempdir())
    sweep(folder)
    with claim_temporary(folder / _SCRATCH, mode=0o700) as temporary:
        yield temporary


def _claim_directory(path: Path, mode: int) -> tuple[Path, int | None]:
    for _ in range(_TRIES):
        temporary = path.parent / f".{path.name}.{secrets.token_hex(_RANDOM)}{PART}"
        temporary.mkdir(mode)
        try:
            lock = system.lock(temporary)
        except (FileNotFoundError, BlockingIOError):
            continue  # another save takes it for a leftover: it had no lock yet
        except OSError:
            return temporary, None  # no locks here
        if temporary.exists():
            return temporary, lock
        _release_lock(lock)
    raise OSError(f"cannot create a directory next to {path}")


def set_aside(path: Path) -> Path:
    """Gives an old export the name under which it waits for its successor."""
    return path.rename(path.parent / f".{path.name}.{secrets.token_hex(_RANDOM)}{OLD}")


def discard(old: Path) -> None:
    """Removes what was set aside, under a name from which nobody restores it half removed."""
    with suppress(OSError):  # another save has restored it
        shutil.rmtree(old.rename(old.with_suffix(PART)), ignore_errors=True)


def _release_lock(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)


def sweep(folder: Path) -> None:
    """Removes temporaries of killed saves; restores an old export without a successor."""
    with suppress(OSError):  # of a folder that is not there, or may not be read
        found = [match for name in os.listdir(folder) if (match := _NAME.fullmatch(name))]
        for match in sorted(found, key=lambda each: each["suffix"]):  # the old ones come first
            with suppress(OSError):
                _remove_leftover(folder / match[0], folder / match["of"])


def _remove_leftover(leftover: Path, path: Path) -> None:
    if not system.is_mine(leftover.lstat()):
        return  # anyone may have put it into a world-writable folder
    if leftover.suffix == PART:
        lock = system.lock(leftover)
        shutil.rmtree(leftover, ignore_errors=True)
        _release_lock(lock)
    elif os.path.lexists(path):
        discard(leftover)
    else:
        leftover.rename(path)  # a save that is between its two steps begins again
