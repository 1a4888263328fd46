"""Becomes `pax_export` when it is imported as ``pax``."""

from pax_export.compat import take_over

if __name__ == "pax":
    take_over(__name__)
