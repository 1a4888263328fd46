"""Writes a directory or a file atomically: into a hidden sibling, which then takes its name.

A killed process may leave the sibling; the next save removes it. A lock marks those of running
saves; in a file system without locks they stay.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from pax_export._foundations.errors import ExportPathError, PaxError
from pax_export._foundations.files import own_files, system
from pax_export._foundations.files.own_files import Recognize, all_data_of_file, card_of_file
from pax_export._foundations.files.system import as_path, unusual_type

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
def replace_directory(path: str | os.PathLike[str], ours: Recognize | None) -> Iterator[Path]:
    """Yields an empty directory that becomes ``path``, or replaces `ours`, after the block."""
    path = absolute(path)
    sweep(path.parent)
    check_directory(path, ours)
    with temporary_sibling(path) as temporary:
        yield temporary
        system.sync_all(temporary)
        move_into_place(temporary, path, ours, own_files.check_folder, _exchange_directory)
        system.sync(path.parent)


@contextmanager
def temporary_sibling(path: Path) -> Iterator[Path]:
    """Yields a hidden directory next to a path, removed with the parents created for it."""
    created: list[Path] = []
    try:
        with ExitStack() as until_moved:
            with _refusals_of_system(path):
                _make_parents(path, created)
                temporary = until_moved.enter_context(claim_temporary(path))
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


def check_directory(path: str | os.PathLike[str], ours: Recognize | None) -> None:
    """Refuses, by an ExportPathError, a place that cannot take an export, before any work."""
    path = absolute(path)
    with _refusals_of_system(path):
        if os.path.lexists(path):
            if ours is None:
                raise existing_path_error(path)
            _check_replaceable(path, ours)
        _require_writable_parent(path)


@contextmanager
def _refusals_of_system(path: Path) -> Iterator[None]:
    """Context manager in which an OSError is one of a path that cannot be written."""
    try:
        yield
    except ExportPathError:
        raise
    except OSError as error:
        raise unwritable_error(path, error) from error


def _require_writable_parent(path: Path) -> None:
    parent = next(parent for parent in path.absolute().parents if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise unwritable_error(path, f"no directory that can be written to: {parent}")


def _check_replaceable(path: Path, ours: Recognize) -> None:
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
    own_files.check_folder(path, ours)


def _make_parents(path: Path, created: list[Path]) -> None:
    for parent in reversed([parent for parent in path.parents if not parent.exists()]):
        with suppress(FileExistsError):  # another process was faster
            parent.mkdir()
            created.append(parent)


def move_into_place(
    temporary: Path,
    path: Path,
    ours: Recognize | None,
    check_place: Callable[[Path, Recognize], None],
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


def _exchange_directory(temporary: Path, path: Path) -> None:
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
    old = set_aside(path)
    try:
        temporary.rename(path)
    except OSError:
        if not os.path.lexists(path):
            old.rename(path)
        raise
    finally:
        discard(old)


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


# --- one file, with its card and external data --------------------------------------------


def check_file(path: Path, ours: Recognize | None) -> None:
    """Refuses, by an ExportPathError, a place that cannot take a file, before any work is done."""
    require_local(path)
    with _refusals_of_system(path):
        if path.is_dir() or path.name in ("", ".."):
            raise ExportPathError(
                "This export is one file, but the path is a directory.",
                where=str(path),
                write=f"the path of a file, e.g. {path / 'model'}",
            )
        if os.path.lexists(path):
            if ours is None:
                raise existing_path_error(path)
            own_files.check_file(path, ours)
        _require_writable_parent(path)


@contextmanager
def replace_file(path: Path, ours: Recognize | None) -> Iterator[Path]:
    """Yields the path of a file that becomes ``path``, or replaces `ours`, if the block succeeds.

    Its card and external data are replaced, too.
    """
    check_file(path, ours)
    path = path.absolute()
    sweep(path.parent)
    old = set(all_data_of_file(path))
    with temporary_sibling(path) as folder:
        temporary = folder / path.name  # in a directory, together with side files of a runtime
        yield temporary
        system.sync_all(folder)
        # Under their own names: until the file exists, they are not read.
        new = {each.replace(path.with_name(each.name)) for each in all_data_of_file(temporary)}
        try:
            _move_file(temporary, path, ours)
        except BaseException:
            _remove_files(new - old)
            raise
        card = card_of_file(temporary)
        if card.exists():
            _move_file(card, card_of_file(path), own_files.recognize_card)
        _remove_files(old - new)
        system.sync(path.parent)


def _remove_files(files: Iterable[Path]) -> None:
    for each in files:
        each.unlink(missing_ok=True)


def _move_file(temporary: Path, path: Path, ours: Recognize | None) -> None:
    move_into_place(temporary, path, ours, own_files.check_file, Path.replace)


class Writing(NamedTuple):
    """How an export is written: as a file or as a directory."""

    check: Callable[[Path, Recognize | None], None]
    replace: Callable[[Path, Recognize | None], AbstractContextManager[Path]]


DIRECTORY, FILE = Writing(check_directory, replace_directory), Writing(check_file, replace_file)


# --- hidden siblings ----------------------------------------------------------------------

#: The end of the name of a directory that is being written, or being removed.
PART = ".part"
#: An old export, set aside until the new one has its name.
OLD = ".old"

_RANDOM = 6
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
