"""Loads weights of any framework into a module, and saves them back.

README.md in this folder has the idea, the data that flows through, and the order of the files.
"""

from pax_export.weights.adoption._adopt import adopt
from pax_export.weights.adoption._report import AdoptionReport, Row
from pax_export.weights.adoption._save_as import save_as

__all__ = ["AdoptionReport", "Row", "adopt", "save_as"]
