"""Attention over the filled part of a large cache."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pax_export._types import PyTree

#: What is compiled beside the whole room: a quarter and a half of it.
_PARTS = (4, 2)
#: Fewer places are attended to in a moment, and a program of their own is not worth its compiling.
_LEAST = 128


class FilledPlaces:
    """The first places of a cache, as many as hold tokens or a few more.

    XLA's shapes are fixed, so attention to a part of the room is a program of its own.  There are
    three at most, and a call takes the smallest that sees all tokens.

    Args:
        room: how many places a cache has; it may be open.
        filled: how many of them hold tokens, in the row that has most.
    """

    def __init__(self, room: object, filled: PyTree):
        self.parts = parts_of(room)
        passed = [filled > count for count in self.parts]
        self._chosen = sum(passed, jnp.zeros((), jnp.int32))

    def attended(self, attend: Callable[[int | None], jax.Array]) -> jax.Array:
        """What ``attend(count)`` gives for the first ``count`` places; None is all of them."""
        if not self.parts:
            return attend(None)
        branches = [lambda count=count: attend(count) for count in (*self.parts, None)]
        return jax.lax.platform_dependent(
            cpu=lambda: jax.lax.switch(self._chosen, branches), default=branches[-1]
        )


def parts_of(room: object) -> tuple[int, ...]:
    """To how many places attention is compiled beside the whole room, from the fewest on."""
    if not isinstance(room, int):
        return ()
    return tuple(room // part for part in _PARTS if room // part >= _LEAST)
