"""Looking into a running net: in flow a net or a step, out flow its insides, or what went wrong."""

from pax_export.debug._capture import Capture, capture
from pax_export.debug._nans import nans
from pax_export.debug._retraced import why_retraced
from pax_export.debug._statistics import Statistics, statistics

__all__ = [
    "Capture",
    "Statistics",
    "capture",
    "nans",
    "statistics",
    "why_retraced",
]
