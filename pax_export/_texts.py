"""Arguments that are one text, or several, or values by texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pax_export._errors import InvalidArgumentTypeError


def texts(argument: str, given: Any, write: str) -> tuple[str, ...]:
    """The texts that a user gave, of which one may stand alone; refuses anything else.

    Example:
        >>> texts("platforms", "cpu", 'platforms="cpu"'), texts("platforms", ["cpu", "tpu"], "")
        (('cpu',), ('cpu', 'tpu'))
    """
    try:
        found = (given,) if isinstance(given, str) else tuple(given)
    except TypeError:
        found = (given,)
    if all(isinstance(each, str) for each in found):
        return found
    raise InvalidArgumentTypeError(
        f"`{argument}` is a text, or several.", where=argument, got=repr(given), write=write
    )


def by_text(argument: str, given: Any, what: str, write: str) -> dict[str, Any]:
    """What a user gave by names; `what` says of anything else that it stands in a dict.

    Example:
        >>> by_text("kwargs", {"mask": 1}, "Inputs stand in a dict.", "kwargs={...}")
        {'mask': 1}
    """
    if isinstance(given, Mapping) and all(isinstance(key, str) for key in given):
        return dict(given)
    raise InvalidArgumentTypeError(what, where=argument, got=repr(given), write=write)
