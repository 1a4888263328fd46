"""Readers of weights: a path or mapping in, lazy arrays by name out."""

from pax_export.weights.sources._open import open_source
from pax_export.weights.sources._source import Entry, Source
from pax_export.weights.sources._torch import STORAGES as TORCH_STORAGES

# Names that are not in `__all__` are for adoption.
__all__ = ["Entry", "Source", "open_source"]
