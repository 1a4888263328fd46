"""What operating systems do differently: elsewhere, only what all of them have is called.

`tests/foundations/files/test_systems.py` writes everything without the names that Windows and
macOS lack.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import stat
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where an open file would keep its directory from being renamed
    fcntl = None

# Opening a FIFO blocks until there is a writer, unless it is opened non-blocking. Windows has
# no such files, and changes the ends of lines unless told not to.
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
#: Errors of file systems that do not support fsync.
_NOT_DONE_HERE = (errno.EINVAL, errno.ENOTSUP, errno.EROFS)
_seeking = threading.Lock()
_PIECE = 1 << 26
_AT_FDCWD = -100
NOREPLACE, EXCHANGE = 1, 2


def open_to_read(path: str | os.PathLike[str]) -> int:
    """The number of an open file, of whatever type."""
    return os.open(path, _READ)


def read_at(number: int, content: memoryview, offset: int) -> int:
    """Fills memory from a place of an open file, as far as it likes; returns how far."""
    if hasattr(os, "preadv"):
        return os.preadv(number, [content], offset)  # pyright: ignore
    with _seeking:
        os.lseek(number, offset, os.SEEK_SET)
        found = os.read(number, min(len(content), _PIECE))
    content[: len(found)] = found
    return len(found)


def is_mine(about: os.stat_result) -> bool:
    """Whether a file belongs to this user; where files have no such owner, True."""
    return about.st_uid == getattr(os, "geteuid", lambda: about.st_uid)()


def sync(path: Path) -> None:
    """Brings a file to the disk, or the names in a directory where directories can be opened."""
    directory = stat.S_ISDIR(path.stat().st_mode)
    try:
        # Windows needs the permission to write.
        handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    except PermissionError:
        if directory:
            return
        raise
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NOT_DONE_HERE:
            raise
    finally:
        os.close(handle)


def lock(directory: Path) -> int:
    """An open lock on a directory; a BlockingIOError if another process has it."""
    if fcntl is None:
        raise OSError("this system has no locks on directories")
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # pyright: ignore
    except OSError:
        os.close(handle)
        raise
    return handle


def rename2(one: Path, other: Path, flag: int) -> bool:
    """Renames in the ways that only Linux has; False if it cannot, or this did not work."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):
        return False
    names = (os.fsencode(one), os.fsencode(other))
    return renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], flag) == 0


def kill_session(process: subprocess.Popen) -> None:
    """Kills a process and, where it leads a session, those that it has started."""
    with suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)  # pyright: ignore
        else:
            process.kill()


def sync_all(directory: Path) -> None:
    """Brings all files of a directory to the disk, and then their names."""
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            sync(Path(folder, name))
        sync(Path(folder))


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
