"""Inspection of models and exports: tables, drawings and diffs."""

from pax_export.inspection._diff import Change, Diff, diff
from pax_export.inspection._drawing import Drawing, draw
from pax_export.inspection._inspect import inspect
from pax_export.inspection._table import Inspection, Row

__all__ = ["Change", "Diff", "Drawing", "Inspection", "Row", "diff", "draw", "inspect"]
