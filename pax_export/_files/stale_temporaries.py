"""Removes temporary files of killed saves; a lock marks those of running ones.

Without locks in the file system, nothing is removed.
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

try:
    import fcntl
except ImportError:  # a system without such locks
    fcntl = None

#: The end of the name of a directory that is being written, or being removed.
PART = ".part"
#: An old export, set aside while the new one replaces it.
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
            lock = _lock_directory(temporary)
        except (FileNotFoundError, BlockingIOError):
            continue  # another save takes it for a leftover: it had no lock yet
        except OSError:
            return temporary, None  # no locks here
        if temporary.exists():
            return temporary, lock
        _release_lock(lock)
    raise OSError(f"cannot create a directory next to {path}")


@contextmanager
def hold_temporary(directory: Path) -> Iterator[None]:
    """Keeps other saves from taking a directory for a leftover."""
    lock = None
    with suppress(OSError):
        lock = _lock_directory(directory)
    try:
        yield
    finally:
        _release_lock(lock)


def _lock_directory(directory: Path) -> int:
    """An open lock on a directory; a BlockingIOError if another process has it."""
    if fcntl is None:
        raise OSError("this system has no locks")
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


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
    if leftover.lstat().st_uid != os.geteuid():
        return  # anyone may have put it into a world-writable folder
    lock = _lock_directory(leftover)
    try:
        if leftover.suffix == OLD and not os.path.lexists(path):
            leftover.rename(path)
        else:
            shutil.rmtree(leftover, ignore_errors=True)
    finally:
        _release_lock(lock)
