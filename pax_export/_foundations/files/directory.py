"""Writes a directory atomically: into a hidden sibling, which then replaces the old directory.

A killed process may leave the sibling; the next save removes it (`stale_temporaries`).
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from pax_export._foundations.errors import ExportPathError, PaxError
from pax_export._foundations.files import overwrite_guard, stale_temporaries, system
from pax_export._foundations.files.paths import as_path, unusual_type

#: The place is not as it was a moment ago: another process saves to it, too.
_CHANGED = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT)
_TRIES = 100
#: Glob characters, because TensorFlow finds variables by patterns that begin with the path.
_PATTERN = re.compile(r"[*?\\]|\[[^/]*\]")


def absolute(path: str | os.PathLike[str]) -> Path:
    """The absolute path of an export, without ``..`` at its end or links before it."""
    local = require_local(path)
    try:
        if local.name in ("", ".."):
            return local.resolve()
        return local.parent.resolve() / local.name
    except (OSError, RuntimeError) as error:  # a loop of links, in Python before 3.13
        raise unwritable_error(local, str(error)) from error


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is remote, such as ``gs://bucket/net``.

    Example:
        >>> [is_remote(path) for path in ("gs://bucket/net", Path("s3://net"), "a:/b", "/a")]
        [True, True, False, False]
    """
    # Of a Path one of the two strokes is gone.
    return re.match(r"\w+://|(gs|s3|hf|https?|hdfs|file):/", os.fspath(path)) is not None


def require_local(path: str | os.PathLike[str]) -> Path:
    """The path, which must be one of this machine; an ExportPathError otherwise."""
    as_path(path)
    text = os.fspath(path)
    if is_remote(path):
        raise ExportPathError(
            "An export is written to a directory of this machine.",
            where=text,
            write="a local path, and copy the directory when it is there",
        )
    if "\0" in text:
        raise unwritable_error(Path(text.replace("\0", "\\0")), "a path with a null character")
    return Path(text)


def check_plain(path: Path) -> None:
    """Refuses, by an ExportPathError, a path that TensorFlow takes for a pattern."""
    if found := _PATTERN.search(path.as_posix()):
        raise ExportPathError(
            "TensorFlow takes the path of a SavedModel for a pattern, and could not load it here.",
            where=str(path),
            got=f"a path with {found[0]}",
            write="a path without * ? \\ and [...], in any of its directories",
        )


@contextmanager
def replace_path(
    path: str | os.PathLike[str], ours: overwrite_guard.Recognize | None
) -> Iterator[Path]:
    """Yields an empty directory that becomes ``path``, or replaces `ours`, after the block."""
    path = absolute(path)
    stale_temporaries.sweep(path.parent)
    check(path, ours)
    with temporary_sibling(path) as temporary:
        yield temporary
        system.sync_all(temporary)
        move_into_place(temporary, path, ours, overwrite_guard.check_folder, _replace_directory)
        system.sync(path.parent)


@contextmanager
def temporary_sibling(path: Path) -> Iterator[Path]:
    """Yields a hidden directory next to a path, removed with the parents created for it."""
    created: list[Path] = []
    try:
        with ExitStack() as until_moved:
            try:
                _make_parents(path, created)
                temporary = until_moved.enter_context(stale_temporaries.claim_temporary(path))
            except OSError as error:
                raise unwritable_error(path, error) from error
            with _named_by_path(temporary, path):
                yield temporary
    except BaseException:
        for parent in reversed(created):
            with suppress(OSError):  # another program has put something there
                parent.rmdir()
        raise


@contextmanager
def _named_by_path(temporary: Path, path: Path) -> Iterator[None]:
    """Context manager whose errors name the path of the export, not that of a temporary."""
    try:
        yield
    except PaxError as error:
        for each in (temporary / path.name, temporary):
            error.where = error.where and str(error.where).replace(str(each), str(path))
        raise


def check(path: str | os.PathLike[str], ours: overwrite_guard.Recognize | None) -> None:
    """Refuses, by an ExportPathError, a place that cannot take an export, before any work."""
    path = absolute(path)
    try:
        is_there = os.path.lexists(path)
        parent = next(parent for parent in (path, *path.parents) if parent.exists())
    except OSError as error:
        raise unwritable_error(path, error) from error
    if is_there:
        if ours is None:
            raise existing_path_error(path)
        _check_replaceable(path, ours)
        parent = path.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise unwritable_error(path, f"no directory that can be written to: {parent}")


def _check_replaceable(path: Path, ours: overwrite_guard.Recognize) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return  # another process is replacing it
    if stat.S_ISLNK(mode):
        raise ExportPathError(
            "This is a link, so it is not replaced.",
            where=str(path),
            got=f"a link to {os.readlink(path)}",
            write="the path that it leads to, or another one",
        )
    if not stat.S_ISDIR(mode):
        raise ExportPathError(
            "The path is not a directory, so it is not overwritten.",
            where=str(path),
            got=unusual_type(path) or "a file",
            write="the path of a directory",
        )
    if Path.cwd().is_relative_to(path) or os.path.ismount(path):
        raise ExportPathError(
            "This directory cannot be replaced: it is the current one, or holds it, or is the "
            "root of a file system.",
            where=str(path),
            write="a directory in it",
        )
    try:
        overwrite_guard.check_folder(path, ours)
    except ExportPathError:
        raise
    except OSError as error:
        raise unwritable_error(path, error) from error


def _make_parents(path: Path, created: list[Path]) -> None:
    for parent in reversed([parent for parent in path.parents if not parent.exists()]):
        with suppress(FileExistsError):  # another process was faster
            parent.mkdir()
            created.append(parent)


def move_into_place(
    temporary: Path,
    path: Path,
    ours: overwrite_guard.Recognize | None,
    check_place: Callable[[Path, overwrite_guard.Recognize], None],
    replace: Callable[[Path, Path], object],
) -> None:
    """Gives a file or directory its name; of several processes that do so, the last one wins."""
    error: OSError | None = None
    for _ in range(_TRIES):  # the path may change between two checks
        try:
            if not os.path.lexists(path):
                return rename_to_nothing(temporary, path)
            if ours is None:
                raise existing_path_error(path)
            check_place(path, ours)  # something else may have been put there meanwhile
            replace(temporary, path)
            return None
        except ExportPathError:
            raise
        except OSError as caught:
            if caught.errno not in _CHANGED:
                raise unwritable_error(path, caught) from caught
            error = caught
    raise unwritable_error(path, error) from error


def _replace_directory(temporary: Path, path: Path) -> None:
    if not path.exists():  # a link that leads nowhere
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    if not system.rename2(temporary, path, system.EXCHANGE):
        _replace_in_two_steps(temporary, path)


def rename_to_nothing(temporary: Path, path: Path) -> None:
    """Gives a file or directory its name; an OSError if something has that name."""
    if not system.rename2(temporary, path, system.NOREPLACE):
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        temporary.rename(path)


def _replace_in_two_steps(temporary: Path, path: Path) -> None:
    """Replaces a directory where two cannot be exchanged; the next save repairs interruptions."""
    old = stale_temporaries.set_aside(path)
    try:
        temporary.rename(path)
    except OSError:
        if not os.path.lexists(path):
            old.rename(path)
        raise
    finally:
        stale_temporaries.discard(old)


def existing_path_error(path: Path) -> ExportPathError:
    """Returns the error for an existing path without ``overwrite=True``."""
    return ExportPathError(
        "The path already exists.",
        where=str(path),
        write="another path, or overwrite=True to replace it",
    )


def unwritable_error(path: Path, reason: object) -> ExportPathError:
    """The operating system does not let us."""
    return ExportPathError(
        "The export cannot be written here.",
        where=str(path),
        got=reason,
        write="a path in a directory that you may write to",
    )
