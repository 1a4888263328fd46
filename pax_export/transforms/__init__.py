"""Transforms of functions that take modules."""

from pax_export.transforms._grad import grad, value_and_grad
from pax_export.transforms._scan import scan

__all__ = ["grad", "scan", "value_and_grad"]
