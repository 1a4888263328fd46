"""The names of ``pax.utils``; the objects live in `optim` and `transforms`."""

from pax_export.optim import build_update_fn
from pax_export.transforms import grad
from pax_export.transforms._loop import scan

__all__ = ["build_update_fn", "grad", "scan"]
