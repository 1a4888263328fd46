"""Weights on disk: names of leaves, and safetensors files of them."""

from pax_export.weights._dtypes import Description, describe, is_key
from pax_export.weights._load import chosen_sharding, load_weights, refuse_narrowing
from pax_export.weights._names import leaves_by_name
from pax_export.weights._report import LoadReport, compare, mismatch
from pax_export.weights._save import save_weights

# What is imported and not listed is for other rooms of the package.
__all__ = ["LoadReport", "load_weights", "save_weights"]
