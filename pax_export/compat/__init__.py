"""Runs programs written for `pax` unchanged."""

from pax_export.compat._install import install_as_pax, take_over
from pax_export.compat._run import run

__all__ = ["install_as_pax", "run", "take_over"]
