"""Arguments that take one string, several, or a mapping with strings as keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pax_export._errors import InvalidArgumentTypeError


def as_strings(argument: str, given: Any, write: str) -> tuple[str, ...]:
    """Returns a tuple of strings, for one string or several; raises for anything else."""
    try:
        found = (given,) if isinstance(given, str) else tuple(given)
    except TypeError:
        found = (given,)
    if all(isinstance(each, str) for each in found):
        return found
    raise InvalidArgumentTypeError(
        f"`{argument}` must be a string, or several.", where=argument, got=repr(given), write=write
    )


def as_named(argument: str, given: Any, what: str, write: str) -> dict[str, Any]:
    """Returns a dict with strings as keys; `what` is the message for anything else."""
    if isinstance(given, Mapping) and all(isinstance(key, str) for key in given):
        return dict(given)
    raise InvalidArgumentTypeError(what, where=argument, got=repr(given), write=write)
