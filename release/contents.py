"""What must be in a wheel and in a source distribution, and what must not.

Each function returns its complaints; nothing to complain about is an empty list.
"""

from __future__ import annotations

import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

from release.sources import FILES, PACKAGE

#: One wheel for every system.
TAG = "-py3-none-any.whl"

_METADATA = {
    "Name": "pax-export",
    "License-Expression": "Apache-2.0",
    "Requires-Python": ">=3.11",
}
_COMMAND = "pax-export = pax_export.cli:main"
_LARGEST = 10  # names in one complaint
#: Of Python, and of the pages of folders for browsers.
_KINDS = ("py", "js", "mjs", "d.ts", "html", "css")


def python_files(root: Path) -> set[str]:
    """The files of the package that a wheel must hold."""
    found = {each for kind in _KINDS for each in (root / PACKAGE).rglob(f"*.{kind}")}
    return {path.relative_to(root).as_posix() for path in found} | {f"{PACKAGE}/py.typed"}


def wheel_faults(path: Path, root: Path, version: str) -> list[str]:
    """What is wrong with a wheel of the sources at `root`."""
    with zipfile.ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if not name.endswith("/")}
        about = {name for name in names if name.split("/")[0].endswith(".dist-info")}
        return [
            *_missing(path, python_files(root) - names),
            *_strays(path, names - python_files(root) - about),
            *([] if path.name.endswith(TAG) else [f"{path.name}: not for every system"]),
            *_metadata_faults(wheel, version),
        ]


def sdist_faults(path: Path, root: Path, version: str) -> list[str]:
    """What is wrong with a source distribution of the sources at `root`."""
    top = f"{PACKAGE}-{version}"
    with tarfile.open(path) as archive:
        names = {each.name for each in archive if each.isfile()}
    inner = {name.removeprefix(f"{top}/") for name in names}
    sources = python_files(root) | set(FILES)
    made = {name for name in inner if name == "PKG-INFO" or ".egg-info/" in name}
    return [
        *([] if names and inner.isdisjoint(names) else [f"{path.name}: not all is in {top}/"]),
        *_missing(path, sources - inner),
        *_strays(path, inner - sources - made),
    ]


def read(wheel: zipfile.ZipFile, ending: str) -> str:
    """The one file of a wheel whose name ends so."""
    (name,) = (name for name in wheel.namelist() if name.endswith(ending))
    return wheel.read(name).decode()


def _missing(path: Path, names: set[str]) -> list[str]:
    return [f"{path.name} lacks {_few(names)}"] if names else []


def _strays(path: Path, names: set[str]) -> list[str]:
    return [f"{path.name} holds what it should not: {_few(names)}"] if names else []


def _few(names: set[str]) -> str:
    shown = sorted(names)[:_LARGEST]
    return ", ".join(shown + ["..."] * (len(names) > _LARGEST))


def _metadata_faults(wheel: zipfile.ZipFile, version: str) -> list[str]:
    found = Parser().parsestr(read(wheel, ".dist-info/METADATA"))
    wanted = {**_METADATA, "Version": version}
    wrong = [
        f"metadata: {key} is {found[key]!r}, not {value!r}"
        for key, value in wanted.items()
        if found[key] != value
    ]
    command = _COMMAND in read(wheel, ".dist-info/entry_points.txt")
    return wrong if command else [*wrong, "metadata: the command pax-export is missing"]
