"""The wheels that PyPI ships, and files out of them; no wheel is installed or kept.

The folder in ``PAX_EXPORT_ZOO`` has them, downloaded by name (`tox -e zoo` does it)::

    pip download --no-deps --dest FOLDER silero-vad==6.2.3 ...
"""

from __future__ import annotations

import functools
import os
import tempfile
import zipfile
from pathlib import Path

FOLDER = "PAX_EXPORT_ZOO"


def wheel(package: str, version: str) -> Path | None:
    """The file of a wheel, or None where it was not downloaded."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return None
    found = sorted(Path(folder).glob(f"{package.replace('-', '_')}-{version}-*.whl"))
    return found[0] if found else None


@functools.cache
def unpacked(package: str, version: str) -> Path:
    """A folder with what is in a wheel, for the time of this process."""
    file = wheel(package, version)
    if file is None:
        raise FileNotFoundError(f"{package} {version} is not in {os.environ.get(FOLDER)!r}")
    # The folder is removed with this object, which the function keeps.
    _FOLDERS.append(tempfile.TemporaryDirectory(prefix="zoo-"))
    folder = Path(_FOLDERS[-1].name)
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder)
    return folder


_FOLDERS: list[tempfile.TemporaryDirectory] = []
