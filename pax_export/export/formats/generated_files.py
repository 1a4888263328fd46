"""The files that TensorFlow generates while it saves a model.

It rewrites them, loads them from the temporary folder, and removes them when the process ends:
of one that is killed they stay indefinitely.  Nobody reads them once they are loaded.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import cache_from_source
from pathlib import Path

from pax_export._foundations.files import system

_PREFIX = "__autograph_generated_file"
#: A file that is older is loaded, or its process is dead.
_LOADED = 60.0


@contextmanager
def generated_files_removed() -> Iterator[None]:
    """Removes those that the block makes, and those that killed processes have left."""
    before = set(sys.modules)
    try:
        yield
    finally:
        for name in set(sys.modules) - before:
            if name.startswith(_PREFIX):
                _remove_file(Path(tempfile.gettempdir(), f"{name}.py"))
        _sweep_folder(Path(tempfile.gettempdir()))


def _sweep_folder(folder: Path) -> None:
    with suppress(OSError):
        for entry in list(os.scandir(folder)):
            if entry.name.startswith(_PREFIX) and entry.name.endswith(".py"):
                with suppress(OSError):
                    found = entry.stat(follow_symlinks=False)
                    if system.is_mine(found) and time.time() - found.st_mtime > _LOADED:
                        _remove_file(Path(entry.path))


def _remove_file(file: Path) -> None:
    compiled = Path(cache_from_source(file))
    for each in (file, compiled):
        with suppress(OSError):
            each.unlink()
    with suppress(OSError):
        compiled.parent.rmdir()  # if nothing else is in it
