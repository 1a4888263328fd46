"""Tools for debugging nets: captured values, statistics, NaNs, retracing."""

from pax_export.debug._capture import Capture, capture
from pax_export.debug._nans import nans
from pax_export.debug._retraced import why_retraced
from pax_export.debug._statistics import Statistics, statistics

__all__ = ["Capture", "Statistics", "capture", "nans", "statistics", "why_retraced"]
