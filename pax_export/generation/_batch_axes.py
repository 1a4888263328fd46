"""Which axis of each array of a cache is that of the rows, for any net."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from pax_export._errors import InvalidArgumentTypeError


def batch_axes(lm: Any, room: int, dtype: Any) -> list[int | None]:
    """The axis of each leaf that grows with the number of rows; None where there is none."""
    axes = []
    for two, three in zip(*(jax.tree.leaves(_shapes(lm, batch, room, dtype)) for batch in (2, 3))):
        grown = [i for i, sizes in enumerate(zip(two.shape, three.shape)) if sizes[0] != sizes[1]]
        if len(grown) > 1:
            raise InvalidArgumentTypeError(
                "An array of this cache has no one axis for the rows.",
                where=f"{type(lm).__name__}.init_cache",
                got=f"shapes {two.shape} and {three.shape} for 2 and 3 rows",
                write="arrays of which one axis is that of the batch",
            )
        axes.append(grown[0] if grown else None)
    return axes


def _shapes(lm: Any, batch: int, room: int, dtype: Any) -> Any:
    return jax.eval_shape(lambda: lm.init_cache(batch, room, dtype=dtype))


def map_rows(change: Callable[[jax.Array, int], jax.Array], cache: Any, axes: list[Any]) -> Any:
    """A cache with each array changed along its axis of rows."""
    leaves, tree = jax.tree.flatten(cache)
    changed = [leaf if axis is None else change(leaf, axis) for leaf, axis in zip(leaves, axes)]
    return jax.tree.unflatten(tree, changed)
