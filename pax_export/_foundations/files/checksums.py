"""SHA256SUMS: hashes of every file of a directory, as ``sha256sum --check`` reads them."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pax_export._foundations.errors import ExportPathError
from pax_export._foundations.files.own_files import CARD_NAME, card_of_folder
from pax_export._foundations.files.system import read_small_file, unusual_type

FILE = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")
#: More is not a list of the files of an export.
_LARGEST = 1 << 24
_PIECE = 1 << 20


@dataclass(frozen=True)
class Checked:
    """A folder whose listed files are unchanged; other files in it may not be read."""

    directory: Path
    digest: str  # of the list, and so of all that it lists
    names: frozenset[str]

    def path(self, name: str) -> Path:
        """The path of a listed file."""
        if name not in self.names:
            raise ExportPathError(
                f"{FILE} does not list a required file, so its content is not verified.",
                where=str(self.directory),
                got=name,
                write=_COPY,
            )
        return self.directory / name


_COPY = "a copy of the whole folder, as it was written"


def write(
    directory: Path, known: Mapping[str, str] | None = None, files: Iterable[str] | None = None
) -> dict[str, str]:
    """Writes and returns the hashes of all or some files of a folder; reads only unknown ones."""
    if files is None:
        files = [file.name for file in directory.iterdir() if file.name != FILE]
    sums = {name: (known or {}).get(name) or digest(directory / name) for name in sorted(files)}
    lines = [f"{each}  {name}\n" for name, each in sums.items()]
    (directory / FILE).write_text("".join(lines), encoding="utf-8")
    return sums


def names(directory: Path) -> set[str] | None:
    """Returns the names of the listed files; None without a list."""
    try:
        return set(_parse_list(_read_list(directory)))
    except (OSError, ValueError):
        return None


def _read_list(directory: Path) -> str:
    return read_small_file(directory / FILE, _LARGEST).decode()


def check(directory: Path) -> Checked:
    """Compares all listed files with their hashes; the card may be missing."""
    try:
        text = _read_list(directory)
        expected = _parse_list(text)
    except (OSError, ValueError) as error:
        raise ExportPathError(
            "The hashes of this bundle cannot be read.",
            where=str(directory / FILE),
            got=f"{type(error).__name__}: {error}",
            write=_COPY,
        ) from error
    if not os.path.lexists(card_of_folder(directory)):
        expected.pop(CARD_NAME, None)
    for name, each in expected.items():
        _check_file(directory, name, each)
    return Checked(directory, hashlib.sha256(text.encode()).hexdigest(), frozenset(expected))


def _parse_list(text: str) -> dict[str, str]:
    """Parses the hashes, by names of files in the folder."""
    lines = text.split("\n")
    if lines.pop():
        raise ValueError("it does not end with a line")
    matches = [_LINE.fullmatch(line) for line in lines]
    found = {match[2]: match[1] for match in matches if match}
    if not found or len(found) != len(lines):
        raise ValueError("it is not a list of hashes with each file once")
    for name in found:
        if not is_inside(name):
            raise ValueError(f"it lists a file of another folder: {name!r}")
    return found


def is_inside(name: str) -> bool:
    """Whether a relative name stays in its folder.

    Example:
        >>> [is_inside(name) for name in ("a/b", "../a", "/a", "a/../../b", "")]
        [True, False, False, False, False]
    """
    parts = PurePosixPath(name).parts
    leads_away = name.startswith("/") or ".." in parts or "\\" in name or "\0" in name
    return bool(parts) and not leads_away


def _check_file(directory: Path, name: str, expected: str) -> None:
    file = directory / name
    kind = unusual_type(file)
    if kind is not None:
        problem = "A file of the bundle is not a regular file."
    elif not file.is_file():
        problem = "A file of the bundle is missing."
    elif not file.resolve().is_relative_to(directory.resolve()):
        problem = "A file of the bundle is a link to a file outside of it."
    elif digest(file) != expected:
        problem = "A file of the bundle is corrupted: its hash does not match."
    else:
        return
    raise ExportPathError(
        problem,
        where=str(file),
        got=kind or (f"{file.stat().st_size} bytes" if file.is_file() else "no such file"),
        write=_COPY,
    )


def digest(file: Path, size: int | None = None) -> str:
    """The hash of a file, or of its first `size` bytes."""
    with file.open("rb") as content:
        if size is None:
            return hashlib.file_digest(content, "sha256").hexdigest()
        found = hashlib.sha256()
        while piece := content.read(min(_PIECE, size)):
            found.update(piece)
            size -= len(piece)
        return found.hexdigest()
