"""Becomes `pax_export.opax` when it is imported as ``opax``."""

from pax_export.compat import take_over

if __name__ == "opax":
    take_over(__name__)
