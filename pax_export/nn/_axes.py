"""Which axes a norm looks at: an integer, several, or a slice of all."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pax_export._errors import InvalidArgumentTypeError

Axis = int | Sequence[int] | slice


@dataclass(frozen=True)
class AxisSlice:
    """A slice of all axes; static data must have a hash, and slices have none.

    (They have since Python 3.12.)
    """

    start: int | None
    stop: int | None
    step: int | None

    def __repr__(self) -> str:
        return repr(self.slice)

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop, self.step)


def static_axes(axis: Any, where: str) -> tuple[int, ...] | AxisSlice:
    """The form in which a layer keeps its axes.

    Raises:
        InvalidArgumentTypeError: (a ValueError) neither an integer, a sequence
            of integers, nor a slice.
    """
    try:
        if isinstance(axis, slice):
            return AxisSlice(axis.start, axis.stop, axis.step)
        if isinstance(axis, Sequence) and not isinstance(axis, str):
            return tuple([operator.index(each) for each in axis])
        return (operator.index(axis),)  # pyright: ignore[reportArgumentType]  # text raises
    except TypeError:
        raise InvalidArgumentTypeError(
            "The axes must be an integer, several integers, or a slice.",
            where=where,
            got=f"{type(axis).__name__}: {axis!r}",
            write="-1, (1, 2) or slice(1, None)",
        ) from None


def axes_of(axis: tuple[int, ...] | AxisSlice, rank: int) -> tuple[int, ...]:
    """The axes as integers, for an array of some rank."""
    return tuple(range(rank))[axis.slice] if isinstance(axis, AxisSlice) else axis
