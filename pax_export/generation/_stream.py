"""Tokens as they come: one compiled step, called again and again."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

from pax_export.generation._steps import Settings, State, advance, begin, settle


class Stream(Iterator[np.ndarray]):
    """The tokens of a batch of texts, one after the other; `generate.stream` makes it.

    Args:
        operands: the net, the prompts, their lengths, a cache or None, keys or None.
        settings: what does not change.
        count: how many tokens at most.
        room: for how many tokens a new cache is made.
        dtype: of a new cache.

    Example:
        >>> import jax, jax.numpy as jnp, pax_export as pax
        >>> class Counter(pax.Module):
        ...     def init_cache(self, batch, max_length, dtype=None):
        ...         return jnp.zeros(batch, jnp.int32)
        ...
        ...     def __call__(self, tokens, cache, lengths=None):
        ...         return jax.nn.one_hot(tokens + 1, 10), cache
        >>> stream = pax.generate.stream(Counter(), [[1]], max_new_tokens=2)
        >>> [int(token[0]) for token in stream]
        [2, 3]
    """

    def __init__(
        self, operands: tuple[Any, ...], settings: Settings, count: int, room: int, dtype: Any
    ):
        self._lm, *self._prompt = operands
        self._settings, self._room, self._dtype = settings, room, dtype
        self._left = count
        self._state: State | None = None
        self._over = False

    def __next__(self) -> np.ndarray:
        """The next token of each row, int32 ``[batch]``."""
        if self._left == 0 or self._over:
            raise StopIteration
        self._left -= 1
        if self._state is None:
            made = _begun(
                self._lm,
                *self._prompt,
                settings=self._settings,
                room=self._room,
                dtype=self._dtype,
            )
        else:
            # Taken away first: after an error in between, the arrays belong to nobody.
            state, self._state = self._state, None
            cache, rest = state.cache, state._replace(cache=None)
            made = _advanced(self._lm, cache, rest, settings=self._settings)
        self._state = made
        self._over = bool(np.asarray(made.done).all())
        return np.asarray(made.token)

    @property
    def cache(self) -> Any:
        """The prompts and all tokens given so far, for a next turn.

        Before the first token it is the cache that the stream was given.  It is another array
        than what the stream goes on to write into.
        """
        if self._state is None:
            return self._prompt[2]
        return _settled(self._lm, self._state)


@partial(jax.jit, static_argnames=("settings", "room", "dtype"))
def _begun(
    lm: Any,
    tokens: Any,
    lengths: Any,
    cache: Any,
    keys: Any,
    *,
    settings: Settings,
    room: int,
    dtype: Any,
) -> State:
    if cache is None:
        cache = lm.init_cache(tokens.shape[0], room, dtype=dtype)
    return begin(lm, tokens, lengths, cache, keys, settings)


@partial(jax.jit, static_argnames="settings", donate_argnames="cache")
def _advanced(lm: Any, cache: Any, state: State, *, settings: Settings) -> State:
    return advance(lm, state._replace(cache=cache), settings)


_settled = jax.jit(settle)
