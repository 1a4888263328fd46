"""Checks of arguments, each in one place: numbers, choices, strings and mappings.

`where` is the place in error messages, for example ``Linear.in_dim``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat, SupportsIndex, TypeGuard, TypeVar

from pax_export._foundations.errors import InvalidArgumentError, InvalidArgumentTypeError

T = TypeVar("T")

#: What Python makes a float of; arrays of one number, too.
Number = SupportsFloat | SupportsIndex


def checked_integer(
    value: object,
    where: str,
    least: int | None = None,
    *,
    what: str = "This argument",
    write: str | None = None,
) -> int:
    """The value as a Python int that is not less than ``least``; a bool is refused."""
    write = write or f"an integer of at least {least}"
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]  # which is what it finds out
    except TypeError:
        got = f"{type(value).__name__}: {value!r:.120}"
        raise InvalidArgumentTypeError(
            f"{what} must be an integer.", where=where, got=got, write=write
        ) from None
    if least is not None and number < least:
        raise InvalidArgumentError(
            f"{what} must be at least {least}.", where=where, got=repr(value), write=write
        )
    return number


def checked_choice(value: T, options: Sequence[object], where: str, *, otherwise: str = "") -> T:
    """The value, which must be one of the options; `otherwise` says what else may be written."""
    if not any(isinstance(value, type(each)) and value == each for each in options):
        raise InvalidArgumentError(
            "This argument has an unknown value.",
            where=where,
            got=repr(value),
            write=" or ".join([*map(repr, options), *([otherwise] if otherwise else [])]),
        )
    return value


def checked_float(value: Number, where: str) -> float:
    """A number as a Python float."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InvalidArgumentTypeError(
            "This argument must be a number that is known when the layer is built.",
            where=where,
            got=f"{type(value).__name__}: {value!r}",
            write="a Python float",
        ) from None


def checked_positive(value: Number, where: str) -> float:
    """A number as a Python float, which is positive and finite."""
    number = checked_float(value, where)
    if not 0 < number < math.inf:
        raise InvalidArgumentError(
            "This argument must be positive and finite.", where=where, got=repr(value)
        )
    return number


def checked_fraction(value: Number, where: str, *, one_allowed: bool) -> Any:
    """A number from 0 to 1; a numpy number becomes Python's."""
    number = value if type(value) is int else checked_float(value, where)
    if not (0 <= number < 1 or (one_allowed and number == 1)):
        raise InvalidArgumentError(
            "This argument is out of its range.",
            where=where,
            got=repr(value),
            write=f"0 <= {where.split('.')[-1]} {'<=' if one_allowed else '<'} 1",
        )
    return number


def as_strings(argument: str, value: Any, write: str) -> tuple[str, ...]:
    """Returns a tuple of strings, for one string or several; raises for anything else."""
    try:
        found = (value,) if isinstance(value, str) else tuple(value)
    except TypeError:
        found = (value,)
    if all(isinstance(each, str) for each in found):
        return found
    raise InvalidArgumentTypeError(
        f"`{argument}` must be a string, or several.", where=argument, got=repr(value), write=write
    )


def is_mapping(value: object) -> TypeGuard[Mapping[Any, Any]]:
    """Whether a value is a mapping; for type checkers, one of any keys and values."""
    return isinstance(value, Mapping)


def as_named(argument: str, value: Mapping[str, Any], what: str, write: str) -> dict[str, Any]:
    """Returns a dict with strings as keys; `what` is the message for anything else."""
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return dict(value)
    raise InvalidArgumentTypeError(what, where=argument, got=repr(value), write=write)
