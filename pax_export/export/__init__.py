"""Exports of models to where they are served; one call each.

Example:
    >>> import pax_export as pax
    >>> pax.export.spec("batch, 3").shape
    'batch, 3'
"""

from pax_export.export._api import to_saved_model
from pax_export.export._load import LoadedModel, load
from pax_export.export._manifest import Report
from pax_export.export._spec import spec

__all__ = ["LoadedModel", "Report", "load", "spec", "to_saved_model"]
