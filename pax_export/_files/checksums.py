"""Whether a folder holds what was written: a hash of every file, in a file.

`sha256sum --check SHA256SUMS` reads the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from pax_export._errors import ExportPathError
from pax_export._files import file_types

FILE = "SHA256SUMS"


def write(directory: Path, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Writes the hashes of all files of a folder, those that are known without reading.

    Returns:
        The hashes, by the names of the files.
    """
    names = sorted(file.name for file in directory.iterdir() if file.name != FILE)
    sums = {name: (known or {}).get(name) or _hash(directory / name) for name in names}
    lines = [f"{digest}  {name}\n" for name, digest in sums.items()]
    (directory / FILE).write_text("".join(lines), encoding="utf-8")
    return sums


def names(directory: Path) -> set[str] | None:
    """The names of the files whose hashes a folder holds; None if it holds none."""
    try:
        return set(_parsed(_read(directory)))
    except (OSError, ValueError):
        return None


def _read(directory: Path) -> str:
    file = directory / FILE
    if (kind := file_types.unusual(file)) is not None:
        raise ValueError(f"it is {kind}")
    return file.read_text(encoding="utf-8")


def _parsed(text: str) -> dict[str, str]:
    pairs = (line.split("  ", 1) for line in text.splitlines())
    return {name: digest for digest, name in pairs}


def check(directory: Path) -> str:
    """Compares all files with their hashes; returns one hash for the whole folder."""
    try:
        text = _read(directory)
        expected = _parsed(text)
    except (OSError, ValueError) as error:
        raise ExportPathError(
            "The hashes of this bundle cannot be read.",
            where=str(directory / FILE),
            got=f"{type(error).__name__}: {error}",
            write="the folder as to_stablehlo wrote it, with all of its files",
        ) from error
    for name, digest in expected.items():
        _check_file(directory / name, digest)
    return hashlib.sha256(text.encode()).hexdigest()


def _check_file(file: Path, digest: str) -> None:
    if not file.is_file():
        problem = "A file of this bundle is missing."
    elif _hash(file) != digest:
        problem = "A file of this bundle is not as it was written: damaged, cut short or changed."
    else:
        return
    raise ExportPathError(
        problem,
        where=str(file),
        got=f"{file.stat().st_size} bytes" if file.is_file() else "no such file",
        write="a copy of the whole folder as to_stablehlo wrote it",
    )


def _hash(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
