"""The names of ``pax.utils``; the objects live in `optim` and `transforms`."""

from pax_export.optim import build_update_fn
from pax_export.transforms import grad
from pax_export.transforms import scan_over_time as scan

__all__ = ["build_update_fn", "grad", "scan"]
