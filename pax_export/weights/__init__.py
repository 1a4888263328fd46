"""Weights on disk: names of leaves, and safetensors files of them."""

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

# What is imported and not listed is for other rooms of the package.
__all__ = ["LoadReport", "load_weights", "save_weights"]
