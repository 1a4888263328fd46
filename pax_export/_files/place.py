"""Why an export cannot be written where it was to be."""

from __future__ import annotations

from pathlib import Path

from pax_export._errors import ExportPathError


def taken(path: Path) -> ExportPathError:
    """There is something, and nobody said that it may be replaced."""
    return ExportPathError(
        "There is something at this place already.",
        where=str(path),
        write="another path, or overwrite=True to replace it",
    )


def unwritable(path: Path, reason: object) -> ExportPathError:
    """The operating system does not let us."""
    return ExportPathError(
        "The export cannot be written here.",
        where=str(path),
        got=reason,
        write="a path in a directory that you may write to",
    )
