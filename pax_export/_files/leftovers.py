"""What a killed save leaves behind: told apart from the work of a living one, and removed.

Whoever writes into a hidden directory holds a lock on it, which the system
takes away when the process ends, however it ends.  A hidden directory that can
be locked is therefore nobody's.  Where the file system has no locks, nothing
is removed.
"""

from __future__ import annotations

import os
import secrets
import shutil
import string
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # a system without such locks
    fcntl = None

#: The end of the name of a directory that is being written, or being removed.
PART = ".part"
#: That of an old export which stands aside while the new one takes its place.
OLD = ".old"

_RANDOM = 6
_TRIES = 100


@contextmanager
def claimed(path: Path) -> Iterator[Path]:
    """Gives a new hidden directory beside a path, ours until the block ends.

    What has this name at the end is removed: unfinished work, or what the work
    has taken the place of.
    """
    temporary, lock = _claim(path)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        _release(lock)


def _claim(path: Path) -> tuple[Path, int | None]:
    for _ in range(_TRIES):
        temporary = path.parent / f".{path.name}.{secrets.token_hex(_RANDOM)}{PART}"
        temporary.mkdir()
        try:
            lock = _lock(temporary)
        except (FileNotFoundError, BlockingIOError):
            continue  # another save takes it for a leftover: it had no lock yet
        except OSError:
            return temporary, None  # no locks here
        if temporary.exists():
            return temporary, lock
        _release(lock)
    raise OSError(f"no directory can be kept beside {path}")


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Keeps other saves from taking a directory for a leftover."""
    lock = None
    with suppress(OSError):
        lock = _lock(directory)
    try:
        yield
    finally:
        _release(lock)


def _lock(directory: Path) -> int:
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


def _release(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)


def sweep(path: Path) -> None:
    """Removes what killed saves to this path left; an old export without heir comes back."""
    with suppress(OSError):  # of a parent that is not there, or may not be read
        names = os.listdir(path.parent)
        for suffix in (OLD, PART):
            for name in names:
                if _is_leftover(name, path.name, suffix):
                    with suppress(OSError):
                        _remove(path.parent / name, path)


def _is_leftover(name: str, of: str, suffix: str) -> bool:
    start = f".{of}."
    random = name[len(start) : -len(suffix)]
    is_ours = name.startswith(start) and name.endswith(suffix)
    return is_ours and len(random) == 2 * _RANDOM and set(random) <= set(string.hexdigits)


def _remove(leftover: Path, path: Path) -> None:
    lock = _lock(leftover)
    try:
        if leftover.suffix == OLD and not os.path.lexists(path):
            leftover.rename(path)
        else:
            shutil.rmtree(leftover, ignore_errors=True)
    finally:
        _release(lock)
