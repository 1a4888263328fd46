"""What must be in a wheel and in a source distribution, and what must not.

Each function returns its complaints; nothing to complain about is an empty list.
"""

from __future__ import annotations

import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

from release.sources import FILES, PACKAGE

COMPILED = (f"{PACKAGE}/core/_round_trip.",)
#: A wheel for Python 3.11 and all later ones.
STABLE = "-cp311-abi3-"

_METADATA = {
    "Name": "pax-export",
    "License-Expression": "Apache-2.0",
    "Requires-Python": ">=3.11",
}
_COMMAND = "pax-export = pax_export.cli:main"
_LARGEST = 10  # names in one complaint
#: Of Python, and of the pages of folders for browsers.
_KINDS = ("py", "js", "d.ts", "html", "css")


def python_files(root: Path) -> set[str]:
    """The files of the package that a wheel must hold."""
    found = {each for kind in _KINDS for each in (root / PACKAGE).rglob(f"*.{kind}")}
    return {path.relative_to(root).as_posix() for path in found} | {f"{PACKAGE}/py.typed"}


def c_files(root: Path) -> set[str]:
    """The files of the package that a wheel is compiled from."""
    found = {path.relative_to(root).as_posix() for path in (root / PACKAGE).rglob("*.c")}
    return found | {f"{each}c" for each in COMPILED}


def wheel_faults(path: Path, root: Path, version: str) -> list[str]:
    """What is wrong with a wheel of the sources at `root`."""
    with zipfile.ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if not name.endswith("/")}
        compiled = {name for name in names if is_compiled(name)}
        about = {name for name in names if name.split("/")[0].endswith(".dist-info")}
        return [
            *_missing(path, python_files(root) - names),
            *_strays(path, names - python_files(root) - compiled - about),
            *compiled_faults(path),
            *_places(wheel, compiled),
            *_metadata_faults(wheel, version),
        ]


def sdist_faults(path: Path, root: Path, version: str) -> list[str]:
    """What is wrong with a source distribution of the sources at `root`."""
    top = f"{PACKAGE}-{version}"
    with tarfile.open(path) as archive:
        names = {each.name for each in archive if each.isfile()}
    inner = {name.removeprefix(f"{top}/") for name in names}
    sources = python_files(root) | c_files(root) | set(FILES)
    made = {name for name in inner if name == "PKG-INFO" or ".egg-info/" in name}
    return [
        *([] if names and inner.isdisjoint(names) else [f"{path.name}: not all is in {top}/"]),
        *_missing(path, sources - inner),
        *_strays(path, inner - sources - made),
    ]


def is_compiled(name: str) -> bool:
    """Whether a file of a wheel was compiled."""
    return name.endswith((".so", ".pyd"))


def compiled_faults(path: Path) -> list[str]:
    """What is wrong with the compiled files of a wheel, and with what its name says of them."""
    with zipfile.ZipFile(path) as wheel:
        compiled = {name for name in wheel.namelist() if is_compiled(name)}
    found = [
        f"{path.name}: {each}c was not compiled; a compiler and Python's headers do it "
        "(gcc and python3-dev on Debian)"
        for each in COMPILED
        if not any(name.startswith(each) for name in compiled)
    ]
    found += _strays(path, {name for name in compiled if not name.startswith(COMPILED)})
    if STABLE not in path.name:
        found.append(f"{path.name}: not for the stable interface, which would be {STABLE}")
    return found


def platform_faults(path: Path) -> list[str]:
    """Whether PyPI takes a wheel: one for Linux must say for which."""
    if path.stem.split("-")[-1].startswith("linux_"):
        return [f"{path.name}: PyPI takes manylinux wheels, as auditwheel makes them"]
    return []


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


def _places(wheel: zipfile.ZipFile, compiled: set[str]) -> list[str]:
    """Compiled files that name a folder of who compiled them."""
    home = f"{Path.home()}/".encode()
    named = [name for name in sorted(compiled) if home != b"//" and home in wheel.read(name)]
    return [f"{name} names the home folder of this machine" for name in named]


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
