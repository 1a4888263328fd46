"""Tools for debugging nets: captured values, statistics, NaNs, retracing."""

from pax_export.debug._capture import Capture, Statistics, capture, statistics
from pax_export.debug._nans import nans
from pax_export.debug._retraced import why_retraced

__all__ = ["Capture", "Statistics", "capture", "nans", "statistics", "why_retraced"]
