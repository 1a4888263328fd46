"""Weights of any framework into a module, and home again.

`adopt` reads what `sources` opens.  A file and a module go through five steps: names taken
apart (`_words`), arrays and leaves of one layer together (`_groups`, `_layers`), the ways in which
a group can fill a layer (`_readings`, `_recurrent`, made of `_moves`), who gets whom (`_assign`),
and that for each hypothesis about who wrote the file (`_plan`).
"""

from pax_export.weights.adoption._adopt import adopt
from pax_export.weights.adoption._report import AdoptionReport, Row
from pax_export.weights.adoption._save_as import save_as

__all__ = ["AdoptionReport", "Row", "adopt", "save_as"]
