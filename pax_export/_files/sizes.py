"""Formats byte counts."""

from __future__ import annotations


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
