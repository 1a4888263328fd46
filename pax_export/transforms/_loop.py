"""The scan of PAX: a loop over time, given the state and the inputs at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pax_export.core import is_node


def scan(
    func: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    length: int | None = None,
    unroll: int | bool = 1,
    time_major: bool = True,
    *,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """Calls a function once for each step in time, carrying a state along.

    Args:
        func: takes ``(state, x)`` and returns ``(state, y)``; a function, or a
            module such as a recurrent cell.
        init: the first state, any pytree.
        xs: a pytree of arrays ``[time, ...]``, or None.
        length: the number of steps; needed if ``xs`` has no arrays.
        unroll: how many steps the compiled loop makes at a time.
        time_major: if False, arrays of ``xs`` and of the result are
            ``[batch, time, ...]``.  One that has a time axis alone stays as it is.
        reverse: whether to go from the last step to the first.

    Returns:
        The last state, and the stacked ``y`` of all steps.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> total, sums = pax.scan(lambda s, x: (s + x, s + x), 0, jnp.arange(5))
        >>> int(total), sums.tolist()
        (10, [0, 1, 3, 6, 10])
    """

    def step(state: Any, x: Any) -> tuple[Any, Any]:
        return func(state, x)

    # jax remembers programs by the function; a module is equal to another one
    # with the same arrays, so it is not passed itself.
    body = step if is_node(func) else func
    xs = xs if time_major else _swap_axes(xs)
    state, ys = jax.lax.scan(body, init, xs, length, reverse=reverse, unroll=unroll)
    return state, ys if time_major else _swap_axes(ys)


def _swap_axes(tree: Any) -> Any:
    """Exchanges batch and time where an array has both."""
    return jax.tree_util.tree_map(lambda x: jnp.swapaxes(x, 0, 1) if jnp.ndim(x) > 1 else x, tree)
