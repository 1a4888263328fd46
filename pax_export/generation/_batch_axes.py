"""Finds the batch axis of each array of a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from pax_export._errors import InvalidArgumentTypeError
from pax_export._types import Array, DTypeLike, PyTree
from pax_export.export import spec
from pax_export.generation._new_cache import new_cache

#: Longer than any window, so that sizes that grow with a cache's length are visible.
_LARGE = 1 << 20


def batch_axes(lm: PyTree, room: int, dtype: Any) -> list[int | None]:
    """Returns the batch axis of each leaf of a cache; None for leaves without one."""
    axes = []
    for two, three in zip(*(jax.tree.leaves(_shapes(lm, batch, room, dtype)) for batch in (2, 3))):
        grown = [i for i, sizes in enumerate(zip(two.shape, three.shape)) if sizes[0] != sizes[1]]
        if len(grown) > 1:
            raise InvalidArgumentTypeError(
                "An array of the cache has no single batch axis.",
                where=f"{type(lm).__name__}.init_cache",
                got=f"shapes {two.shape} and {three.shape} for 2 and 3 rows",
                write="arrays with one batch axis each",
            )
        axes.append(grown[0] if grown else None)
    return axes


def shapes_of_cache(
    lm: PyTree, batch: int | str, room: int | str, dtype: Any, **wishes: object
) -> Any:
    """Returns a cache of specs with these sizes, numbers or names; options as for `new_cache`.

    An array of a fixed window keeps its size.
    """
    rows = batch if isinstance(batch, int) else 2
    places = room if isinstance(room, int) else _LARGE
    here = _shapes(lm, rows, places, dtype, **wishes)
    more_rows = jax.tree.leaves(_shapes(lm, rows + 1, places, dtype, **wishes))
    more_room = more_rows
    if isinstance(room, str):
        more_room = jax.tree.leaves(_shapes(lm, rows, places + 1, dtype, **wishes))

    def described(leaf: PyTree, rows: Array, longer: PyTree) -> Any:
        shape: list[int | str] = list(leaf.shape)
        for axis, size in enumerate(leaf.shape):
            if rows.shape[axis] != size and isinstance(batch, str):
                shape[axis] = batch
            elif longer.shape[axis] != size and isinstance(room, str):
                shape[axis] = room
        return spec(tuple(shape), leaf.dtype)

    leaves, tree = jax.tree.flatten(here)
    found = [described(*each) for each in zip(leaves, more_rows, more_room)]
    return jax.tree.unflatten(tree, found)


def _shapes(lm: PyTree, batch: int, room: int, dtype: DTypeLike, **wishes: object) -> Any:
    return jax.eval_shape(lambda: new_cache(lm, batch, room, dtype, **wishes))


def map_rows(change: Callable[[jax.Array, int], jax.Array], cache: object, axes: list[Any]) -> Any:
    """A cache with each array changed along its axis of rows."""
    leaves, tree = jax.tree.flatten(cache)
    changed = [leaf if axis is None else change(leaf, axis) for leaf, axis in zip(leaves, axes)]
    return jax.tree.unflatten(tree, changed)
