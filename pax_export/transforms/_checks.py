"""Checks of the options of transforms, before jax sees them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import tree_leaves, tree_structure

from pax_export._foundations.check import checked_integer
from pax_export._foundations.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    near_names,
)
from pax_export._foundations.types import PyTree
from pax_export.core import describe_array, named_leaves, structure_differences


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


def check_argument_names(
    signature: inspect.Signature | None, names: Iterable[str], where: str
) -> None:
    """Raises if a function with this signature has no argument of one of the names."""
    known = {} if signature is None else signature.parameters
    if signature is None or any(p.kind is p.VAR_KEYWORD for p in known.values()):
        return
    keywords = [name for name, p in known.items() if p.kind is not p.VAR_POSITIONAL]
    for name in names:
        if name not in keywords:
            raise InvalidArgumentError(
                "The function has no argument of this name.",
                where=where,
                got=repr(name),
                write=" or ".join(near_names(str(name), keywords) or keywords[:8])
                or "a function with arguments",
            )


def check_argument_numbers(
    signature: inspect.Signature | None, numbers: Iterable[int], where: str
) -> None:
    """Raises for a number beyond the positional arguments of a function with this signature."""
    kinds = [] if signature is None else [p.kind for p in signature.parameters.values()]
    if signature is None or inspect.Parameter.VAR_POSITIONAL in kinds:
        return
    count = sum(kind in _POSITIONAL for kind in kinds)
    for number in numbers:
        if not -count <= number < count:
            raise InvalidArgumentError(
                "The function has fewer positional arguments.",
                where=where,
                got=f"{number} for {count} positional argument{'' if count == 1 else 's'}",
                write=f"an integer from 0 to {count - 1}" if count else "no number",
            )


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def is_arraylike(value: object) -> bool:
    """Whether jax takes a value as an array: arrays, their shapes, and numbers."""
    return hasattr(value, "shape") or isinstance(value, (int, float, complex))


def check_arraylike(value: object, what: str, where: str, write: str) -> None:
    """Raises unless a value is an array or a number."""
    if not is_arraylike(value):
        raise InvalidArgumentTypeError(
            what, where=where, got=f"{type(value).__name__}: {value!r}"[:120], write=write
        )


def checked_integers(values: PyTree, where: str, write: str) -> list[int]:
    """One integer or several, as a list."""
    several = values if isinstance(values, Sequence) and not isinstance(values, str) else [values]
    return [checked_integer(value, where, write=write) for value in several]


def checked_size(value: PyTree, where: str) -> Any:
    """A number of calls, or None; it may be a symbolic dimension."""
    if value is None or jax.export.is_symbolic_dim(value):
        return value
    name = where.split(".")[-1]
    return checked_integer(value, where, least=0, write=f"{name}=3")


def check_axis_fits(transform: str, axis: int, rank: int, shape: Any, where: str) -> None:
    """Raises unless an array with as many axes has this one."""
    if not -rank <= axis < rank:
        raise InvalidArgumentError(
            f"{transform}: axis out of bounds.",
            where=where,
            got=f"axis {axis} for shape {shape}",
            write=f"an axis from {-rank} to {rank - 1}",
        )


def tree_differences(
    old: PyTree, new: PyTree, root: str, fits: Callable[[Any, Any], bool] | None = None
) -> list[str]:
    """The differences of two trees, as lines: of structure, else of leaves.

    `root` names the whole tree; `fits` says whether a leaf may replace another, which by default
    needs its shape and dtype.
    """
    if tree_structure(old) != tree_structure(new):
        return structure_differences(old, new) or ["the treedefs differ"]
    return [
        f"{name or root}: {_describe_leaf(x)} against {_describe_leaf(y)}"
        for (name, x), y in zip(named_leaves(old), tree_leaves(new))
        if not (fits or _are_alike)(x, y)
    ]


def _are_alike(old: PyTree, new: PyTree) -> bool:
    return jnp.shape(old) == jnp.shape(new) and jnp.result_type(old) == jnp.result_type(new)


def _describe_leaf(leaf: object) -> str:
    return describe_array(leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf))
