"""Checks of the options of transforms, before jax sees them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax

from pax_export._errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export._types import PyTree


def check_function(
    function: object,
    transform: str,
    write: str = "a function, a method of a module, or a module with __call__",
) -> None:
    """Raises unless an argument of a transform can be called."""
    if not callable(function):
        raise InvalidArgumentTypeError(
            f"{transform} needs something that can be called.",
            got=f"{type(function).__name__}: {function!r}"[:120],
            write=write,
        )


def is_arraylike(value: object) -> bool:
    """Whether jax takes a value as an array: arrays, their shapes, and numbers."""
    return hasattr(value, "shape") or isinstance(value, (int, float, complex))


def check_arraylike(value: object, what: str, where: str, write: str) -> None:
    """Raises unless a value is an array or a number."""
    if not is_arraylike(value):
        raise InvalidArgumentTypeError(
            what, where=where, got=f"{type(value).__name__}: {value!r}"[:120], write=write
        )


def checked_integer(value: PyTree, where: str, write: str) -> int:
    """The value as a Python int; a bool is refused."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise InvalidArgumentTypeError(
            "This option must be an integer.",
            where=where,
            got=f"{type(value).__name__}: {value!r}"[:120],
            write=write,
        ) from None


def checked_integers(values: PyTree, where: str, write: str) -> list[int]:
    """One integer or several, as a list."""
    several = values if isinstance(values, Sequence) and not isinstance(values, str) else [values]
    return [checked_integer(value, where, write) for value in several]


def checked_size(value: PyTree, where: str) -> Any:
    """A number of calls, or None; it may be a symbolic dimension."""
    if value is None or jax.export.is_symbolic_dim(value):
        return value
    name = where.split(".")[-1]
    size = checked_integer(value, where, f"{name}=3")
    if size < 0:
        raise InvalidArgumentError(
            "This option must be at least 0.", where=where, got=repr(size), write=f"{name}=3"
        )
    return size


def check_axis_fits(transform: str, axis: int, rank: int, shape: Any, where: str) -> None:
    """Raises unless an array with as many axes has this one."""
    if not -rank <= axis < rank:
        raise InvalidArgumentError(
            f"{transform}: axis out of bounds.",
            where=where,
            got=f"axis {axis} for shape {shape}",
            write=f"an axis from {-rank} to {rank - 1}",
        )
