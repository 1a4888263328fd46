"""The check of arguments that are paths."""

from __future__ import annotations

import os
from pathlib import Path

from pax_export._errors import InvalidArgumentTypeError


def as_path(path: object, argument: str = "path") -> Path:
    """The argument as a Path; an InvalidArgumentTypeError if it is neither text nor a path."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if isinstance(text, str):
        return Path(text)
    raise InvalidArgumentTypeError(
        "A path must be a string or an os.PathLike of one.",
        where=argument,
        got=f"{type(path).__name__}: {path!r}"[:120],
        write=f'{argument}="path/to/it"',
    )
