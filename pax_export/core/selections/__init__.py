"""Selections of parts of a net, and edits of these parts.

`_path_patterns` parses paths, `_filters` selects leaves, `_finding` finds places, and `_selection`
has the edits. It imports all of `core` but `_module`, whose `at` uses it.
"""

# Rooms above import names that are not public.
# pyright: reportUnusedImport=false

from pax_export.core.selections._filters import (
    All,
    AnyOf,
    FilteredLeaf,
    Not,
    Param,
    PathContains,
    PathIn,
    RngState,
    Selector,
    State,
    as_filter,
    as_rule,
    has_names,
    is_random_key,
    leaves_of,
    require_names,
    require_names_among,
)
from pax_export.core.selections._finding import matcher
from pax_export.core.selections._paths import (
    Chosen,
    better_path,
    escape_step,
    path_pattern,
)
from pax_export.core.selections._selection import Selection
from pax_export.core.selections._verbs import freeze_at
