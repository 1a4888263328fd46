"""Weights on disk: safetensors files, and weights of other frameworks."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pax_export.weights._file import open_weights
from pax_export.weights._hub import local_path, push_to_hub
from pax_export.weights._metadata import Description, describe_array
from pax_export.weights._save_load import (
    LoadReport,
    chosen_sharding,
    compare_leaves,
    explain_absence,
    leaves_by_name,
    load_weights,
    mismatch_error,
    refuse_narrowing,
    require_shape,
    require_values,
    save_weights,
)

if TYPE_CHECKING:
    from pax_export.weights.adoption import AdoptionReport, Row, adopt, save_as
    from pax_export.weights.sources import Entry, Source, open_source

# Names that are imported but not in `__all__` are for other packages of pax_export.
__all__ = [
    "AdoptionReport",
    "Entry",
    "LoadReport",
    "Row",
    "Source",
    "adopt",
    "load_weights",
    "open_source",
    "push_to_hub",
    "save_as",
    "save_weights",
]

# Who saves and loads weights of this library needs no layers and no readers of other formats.
_LATER = {
    **dict.fromkeys(("AdoptionReport", "Row", "adopt", "save_as"), "adoption"),
    **dict.fromkeys(("Entry", "Source", "open_source"), "sources"),
}


def __getattr__(name: str) -> Any:
    """Imports the subpackages below on first use."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    value = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
