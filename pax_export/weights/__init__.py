"""Weights on disk: names of leaves, safetensors files of them, and files of other frameworks."""

from pax_export.weights._dtypes import Description, describe, is_key
from pax_export.weights._file import opened
from pax_export.weights._leaves import LoadReport, compare, leaves_by_name, mismatch
from pax_export.weights._save_load import (
    absence,
    chosen_sharding,
    load_weights,
    refuse_narrowing,
    require_shape,
    save_weights,
)
from pax_export.weights.sources import Entry, Source, open_source

# What is imported and not listed is for other rooms of the package.
__all__ = ["LoadReport", "Entry", "Source", "load_weights", "open_source", "save_weights"]
