"""The formats, and the interface for formats of other distributions.

Each format is one file or folder here, which writes a traced model and loads it as a callable.
Another distribution adds one by an entry point of the group ``pax_export.formats``, which names a
`Format`; `export_as` does the part that all formats share.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pax_export.export.artifact.formats import Format
    from pax_export.export.formats.custom_format import FormatProgram, export_as

# Loaded when first used: the formats here are loaded in processes without jax, too.
_HOMES = {
    "Format": "artifact.formats",
    "FormatProgram": "formats.custom_format",
    "export_as": "formats.custom_format",
}

__all__ = ["Format", "FormatProgram", "export_as"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"pax_export.export.{_HOMES[name]}"), name)
    globals()[name] = value  # so that this function is not called again
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
