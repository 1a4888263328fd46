"""The filters of `pax_export.core`, by the name that pickles of transforms know them by."""

from pax_export.core import (
    All,
    AnyOf,
    Leaf,
    Not,
    Param,
    PathContains,
    PathIn,
    RngState,
    State,
    as_filter,
    as_rule,
    is_random_key,
    leaves_of,
)

Any_ = AnyOf

__all__ = [
    "All",
    "AnyOf",
    "Any_",
    "Leaf",
    "Not",
    "Param",
    "PathContains",
    "PathIn",
    "RngState",
    "State",
    "as_filter",
    "as_rule",
    "is_random_key",
    "leaves_of",
]
