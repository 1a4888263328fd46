"""Weights on disk: names of leaves, and safetensors files of them."""

from pax_export.weights._load import load_weights
from pax_export.weights._report import LoadReport
from pax_export.weights._save import save_weights

__all__ = ["LoadReport", "load_weights", "save_weights"]
