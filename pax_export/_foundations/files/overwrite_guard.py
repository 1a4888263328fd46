"""Checks that a save replaces only exports of this package, or empty paths."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from pax_export._foundations.errors import ExportPathError
from pax_export._foundations.files.paths import unusual_type

#: Whether a file, by its path in the folder, with ``/``, belongs to the export there.
Belongs = Callable[[str], bool]
#: Recognizes the files of the export at a path; None if it is not ours.
Recognize = Callable[[Path], "Belongs | None"]

_SHOWN = 5
_LOOKS = 100


def now_in(folder: Path) -> Recognize:
    """Returns the current files of a folder, for a folder that is copied into its successor."""
    there = frozenset(files(folder)) if folder.is_dir() else frozenset()
    return lambda _: there.__contains__


def check_folder(path: Path, ours: Recognize) -> None:
    """Refuses, by an ExportPathError, a folder in which anything would be lost."""
    problem = None
    for _ in range(_LOOKS):  # another save may exchange it while we look
        before = _identity_of(path)
        try:
            problem = _find_problem(path, ours)
        except FileNotFoundError:
            problem = None
        if _identity_of(path) == before:
            break
    if problem is not None:
        raise problem


def _identity_of(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _find_problem(path: Path, ours: Recognize) -> ExportPathError | None:
    entries = sorted(os.listdir(path))
    if not entries:
        return None
    belongs = ours(path)
    if belongs is None:
        return ExportPathError(
            "The path is not an export of pax_export, so it is not replaced.",
            where=str(path),
            got=f"a directory with {format_names(entries)}",
            write="another path, or an empty directory",
        )
    strange = list(islice((name for name in files(path) if not belongs(name)), _SHOWN + 1))
    if not strange:
        return None
    return ExportPathError(
        "This export holds files that do not belong to it, so it is not replaced.",
        where=str(path),
        got=format_names(strange),
        write="another path, or move these files out of the export",
    )


def files(folder: Path, below: str = "") -> Iterator[str]:
    """The paths of all files in a folder, links and the like among them."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            name = f"{below}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                yield from files(folder / entry.name, f"{name}/")
            else:
                yield name


def some_names(folder: Path) -> str:
    """The first names in a folder."""
    with suppress(OSError):
        return format_names(sorted(os.listdir(folder))) or "nothing in it"
    return "nothing that can be read"


def format_names(names: Collection[str]) -> str:
    """Formats up to five names, such as ``a, b, c, d, e and more``."""
    shown = ", ".join(islice(names, _SHOWN))
    return f"{shown} and more" if len(names) > _SHOWN else shown


def check_file(path: Path, ours: Recognize) -> None:
    """Refuses, by an ExportPathError, a file that is neither empty nor ours."""
    kind = unusual_type(path)
    if kind is not None:
        raise unusual_file_error(path, kind)
    dangling = path.is_symlink() and not path.exists()
    if dangling or (path.stat().st_size and ours(path) is None):
        raise ExportPathError(
            "The path is not an export of pax_export, so it is not replaced.",
            where=str(path),
            got=f"a link to {os.readlink(path)}"
            if dangling
            else f"a file that {read_beginning(path)}",
            write="another path, or remove it yourself",
        )


def unusual_file_error(path: Path, kind: str) -> ExportPathError:
    """There is something that is no regular file."""
    return ExportPathError(
        "The path is not a regular file, so it is not replaced.",
        where=str(path),
        got=kind,
        write="the path of a file",
    )


def read_beginning(path: Path) -> str:
    """Returns the beginning of a file, for messages."""
    with path.open("rb") as file:
        return f"begins with {file.read(16)!r}"
