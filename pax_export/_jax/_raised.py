"""The operations that JAX was processing when it raised an error."""

from __future__ import annotations

import traceback
from typing import Any

#: As jax calls an operation of a program, and as we do; where neither does, nothing is found.
_NAMES = ("eqn", "equation")


def equations_of(error: BaseException) -> list[Any]:
    """The operations whose rules an error came through, from the outermost to the innermost."""
    found: list[Any] = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for equation in map(frame.f_locals.get, _NAMES):
            if hasattr(equation, "primitive") and not any(equation is old for old in found):
                found.append(equation)
    return found
