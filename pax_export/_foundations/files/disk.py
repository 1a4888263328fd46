"""What is brought to the disk, and numbers of bytes as text."""

from __future__ import annotations

import os
from pathlib import Path

from pax_export._foundations.files import system


def sync(directory: Path) -> None:
    """Brings all files of a directory to the disk, and then their names."""
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            system.sync(Path(folder, name))
        system.sync(Path(folder))


def bytes_text(count: float) -> str:
    """A number of bytes with its unit.

    Example:
        >>> bytes_text(5), bytes_text(36 * 2**20)
        ('5 B', '36.0 MiB')
    """
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"
