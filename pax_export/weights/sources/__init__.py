"""Weights of any framework: a path or a mapping in; names, and arrays when asked for, out."""

from pax_export.weights.sources._open import open_source
from pax_export.weights.sources._source import Entry, Source

__all__ = ["Entry", "Source", "open_source"]
