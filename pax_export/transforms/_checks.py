"""Checks of the options of transforms, before jax sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
from jax.tree_util import tree_leaves, tree_structure

from pax_export._foundations.check import checked_integer
from pax_export._foundations.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
)
from pax_export._foundations.types import ArrayLike, PyTree
from pax_export.core import describe_array, named_leaves, structure_differences


def is_arraylike(value: object) -> bool:
    """Whether jax takes a value as an array: arrays, their shapes, and numbers."""
    return hasattr(value, "shape") or isinstance(value, (int, float, complex))


def check_arraylike(value: object, what: str, where: str, write: str) -> None:
    """Raises unless a value is an array or a number."""
    if not is_arraylike(value):
        raise InvalidArgumentTypeError(
            what, where=where, got=f"{type(value).__name__}: {value!r}"[:120], write=write
        )


def checked_size(value: SupportsIndex | None, where: str) -> Any:
    """A number of calls, or None; it may be a symbolic dimension."""
    if value is None or jax.export.is_symbolic_dim(value):  # type: ignore[arg-type]
        return value
    name = where.split(".")[-1]
    return checked_integer(value, where, least=0, write=f"{name}=3")


def check_axis_fits(
    transform: str, axis: int, rank: int, shape: tuple[int, ...], where: str
) -> None:
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


def _are_alike(old: ArrayLike, new: ArrayLike) -> bool:
    return jnp.shape(old) == jnp.shape(new) and jnp.result_type(old) == jnp.result_type(new)


def _describe_leaf(leaf: ArrayLike) -> str:
    return describe_array(leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf))
