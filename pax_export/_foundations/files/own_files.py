"""Which files are this package's own: a save replaces only these, or what is empty."""

from __future__ import annotations

import os
import re
import struct
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import IO

import numpy as np

from pax_export._foundations.errors import ExportPathError
from pax_export._foundations.files.system import unusual_type

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
    """Returns the error for a path that is a device, a socket or a pipe, not a regular file."""
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


# --- the card of an export of one file ----------------------------------------------------


#: The name in a folder.
CARD_NAME = "pax_export.html"
#: The suffix after the name of the file.
_CARD_SUFFIX = ".html"
#: The mark in the second line.
CARD_MARK = "<!-- the card of an export of pax_export -->"
_LOOKED_AT = 200


def card_of_folder(path: Path) -> Path:
    return path / CARD_NAME


def card_of_file(path: Path) -> Path:
    """The path of the card of a file."""
    return path.with_name(path.name + _CARD_SUFFIX)


def recognize_card(path: Path) -> Belongs | None:
    """Returns the files of a card at a path, which are none but itself; None without a card."""
    if path.is_symlink() or not path.is_file():
        return None
    with path.open("rb") as file:
        return (lambda name: False) if CARD_MARK.encode() in file.read(_LOOKED_AT) else None


def check_card(path: Path) -> None:
    """Raises an ExportPathError if the card of a file would replace anything but an empty file."""
    card = card_of_file(path)
    if not os.path.lexists(card) or recognize_card(card) is not None:
        return
    if card.is_file() and not card.is_symlink() and not card.stat().st_size:
        return
    raise ExportPathError(
        "Another file is at the path of this export's card.",
        where=str(card),
        got=unusual_type(card) or "a file that is not a model card",
        write="card=False (--no-card), or another path",
    )


def remove_card(path: Path) -> None:
    """Removes the card of a file that no longer exists."""
    card = card_of_file(path)
    if recognize_card(card) is not None:
        card.unlink(missing_ok=True)


# --- the path of a file's external data; its hash keeps exports to one path apart -----


_DIGITS = 16


def data_of_file(path: Path, digest: str) -> Path:
    """The path of the external data of a file: its name, 16 digits of the hash, ``.data``."""
    return path.with_name(f"{path.name}.{digest[:_DIGITS]}.data")


def all_data_of_file(path: Path) -> list[Path]:
    """Returns all external data files of a path, current and old."""
    if not path.parent.is_dir():
        return []
    name = re.compile(rf"{re.escape(path.name)}\.[0-9a-f]{{{_DIGITS}}}\.data")
    return sorted(each for each in path.parent.iterdir() if name.fullmatch(each.name))


# --- archives of arrays -------------------------------------------------------------------


_DATE = (1980, 1, 1, 0, 0, 0)  # the same bytes whenever it is written
#: The comment of each member: one of the archive as a whole would stop some readers.
_MARK = b"pax_export"
#: Exceptions of zipfile for damaged or other files.
UNREADABLE_NPZ = (
    zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, struct.error,
)  # fmt: skip


def write_npz(file: Path | IO[bytes], arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays of numbers under their names, as `numpy.load` reads them."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            info = zipfile.ZipInfo(f"{name}.npy", _DATE)
            info.comment = _MARK
            with archive.open(info, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)


def recognize_npz(path: Path) -> Belongs | None:
    """Recognizes archives that `write_npz` made, and empty files.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.savez(Path(folder, "data.npz"), x=np.ones(2))
        ...     write_npz(Path(folder, "ours.npz"), {"x": np.ones(2)})
        ...     [recognize_npz(Path(folder, name)) is not None for name in ("data.npz", "ours.npz")]
        [False, True]
    """
    try:
        with zipfile.ZipFile(path) as archive:
            ours = all(info.comment == _MARK for info in archive.infolist())
    except UNREADABLE_NPZ:
        ours = path.stat().st_size == 0
    return (lambda name: False) if ours else None
