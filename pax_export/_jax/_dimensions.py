"""Properties of symbolic dimensions that their text omits: see `artifact.dimensions`."""

from __future__ import annotations

import re

_CONSTRAINT = re.compile(r".+(==|>=|<=).+")


def scope_constraints(scope: object) -> tuple[str, ...]:
    """What may be assumed of the symbolic dimensions of a scope, as it was written."""
    found = getattr(scope, "_explicit_constraints", None)
    if found is not None:
        return tuple(each.debug_str for each in found)
    # After a line that says where it was made, its text has one line for each.
    lines = [line.strip() for line in str(scope).splitlines()[1:]]
    return tuple(line for line in lines if _CONSTRAINT.fullmatch(line))
