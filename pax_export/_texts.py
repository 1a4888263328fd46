"""Arguments that are one text, or several."""

from __future__ import annotations

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
