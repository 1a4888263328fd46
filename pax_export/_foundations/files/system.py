"""Paths, what is there, and what operating systems do differently.

Elsewhere, only what all systems have is called.

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

from pax_export._foundations.errors import InvalidArgumentTypeError

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


# --- paths that users give, and what is there: only regular files are read or replaced --


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
    with open(open_to_read(file), "rb") as content:
        about = os.fstat(content.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise OSError(f"not a regular file, but {file_kind(about.st_mode)}")
        if about.st_size > most:
            raise OSError(f"it has {about.st_size} bytes, and {most} are the most that is read")
        return content.read(most)
