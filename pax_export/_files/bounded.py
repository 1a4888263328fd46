"""Reads a small untrusted file: regular, and limited in size."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pax_export._files import file_types, system


def read_bytes(file: Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes; an OSError otherwise."""
    with open(system.open_to_read(file), "rb") as content:
        about = os.fstat(content.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise OSError(f"not a regular file, but {file_types.kind(about.st_mode)}")
        if about.st_size > most:
            raise OSError(f"it has {about.st_size} bytes, and {most} are the most that is read")
        return content.read(most)
