"""The compiled programs of `generate` and its streams.

One program reads prompts, so a prompt of another size recompiles only that one; another generates
all tokens after the first, or a third one token per call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pax_export._foundations.types import Array, DTypeLike, PRNGKey
from pax_export.generation._prompt import Cache, LanguageModel
from pax_export.generation._steps import (
    DecodeState,
    Settings,
    advance_state,
    begin_generation,
    settle_cache,
)

#: Tokens, how many of each row are meant, log-probabilities, and the state at the end.
GeneratedArrays = tuple[jax.Array, jax.Array, Any, DecodeState]
#: A state, the tokens and log-probabilities so far, and how many of each row are meant.
_Carried = tuple[DecodeState, jax.Array, Any, jax.Array]


@partial(jax.jit, static_argnames=("settings", "room", "dtype"))
def run_prefill(
    lm: LanguageModel,
    tokens: Array,
    lengths: Array,
    cache: Cache,
    keys: PRNGKey | None,
    numbers: Any,
    *,
    settings: Settings,
    room: int,
    dtype: DTypeLike | None,
) -> DecodeState:
    """The state after the prompts and the first token."""
    if cache is None:
        cache = lm.init_cache(tokens.shape[0], room, dtype=dtype)
    return begin_generation(lm, tokens, lengths, cache, keys, settings, numbers)


# The cache of the state is donated: the next one is written into it.


@partial(jax.jit, static_argnames="settings", donate_argnames="cache")
def run_step(
    lm: LanguageModel, cache: Cache, state: DecodeState, *, settings: Settings
) -> DecodeState:
    """The state one token later."""
    return advance_state(lm, state._replace(cache=cache), settings)


@partial(jax.jit, static_argnames=("settings", "count"), donate_argnames="cache")
def run_to_end(
    lm: LanguageModel,
    cache: Cache,
    state: DecodeState,
    limit: int,
    *,
    settings: Settings,
    count: int,
) -> GeneratedArrays:
    """Returns all tokens, including the first."""
    return generate_rest(lm, state._replace(cache=cache), settings, count, limit)


settled = jax.jit(settle_cache)


def without_cache(state: DecodeState) -> tuple[Any, DecodeState]:
    """Splits a state into its cache and the rest."""
    return state.cache, state._replace(cache=None)


def generate_rest(
    lm: LanguageModel, state: DecodeState, settings: Settings, count: int, limit: int | None = None
) -> GeneratedArrays:
    """Generates tokens until all rows have ended."""
    limit = count if limit is None else limit
    batch = state.token.shape[0]
    out = _put(jnp.full((batch, count), settings.pad, jnp.int32), state.token, 0)
    log_prob = state.log_prob
    log_probs = (
        None if log_prob is None else _put(jnp.zeros((batch, count), log_prob.dtype), log_prob, 0)
    )
    lengths = state.alive.astype(jnp.int32)

    def goes_on(carried: _Carried) -> jax.Array:
        state = carried[0]
        more = state.step < limit
        return more & ~jnp.all(state.done) if settings.stop or settings.sequences else more

    def step(carried: _Carried) -> Any:
        state, out, log_probs, lengths = carried
        column, state = state.step, advance_state(lm, state, settings)
        if log_probs is not None:
            log_probs = _put(log_probs, state.log_prob, column)
        return state, _put(out, state.token, column), log_probs, lengths + state.alive

    carried = state, out, log_probs, lengths
    state, out, log_probs, lengths = jax.lax.while_loop(goes_on, step, carried)
    return out, lengths, log_probs, state


def _put(columns: jax.Array, column: Any, index: jax.Array | int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(columns, column[:, None], index, axis=1)


# --- Token streams: one compiled step per token --------------------------------------------------


class Stream(Iterator[np.ndarray]):
    """An iterator of the tokens of a batch of sequences; the result of `generate.stream`.

    Args:
        operands: the net, the prompts, their lengths, a cache or None, keys or None, and numbers
            of the sampler.
        settings: constants of the generation.
        count: the maximum number of tokens.
        room: the length of a new cache.
        dtype: the dtype of a new cache.
        ends: additional stop conditions, by the newest tokens.

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
        self,
        operands: tuple[Any, ...],
        settings: Settings,
        count: int,
        room: int,
        dtype: DTypeLike | None,
        ends: Callable[[Any, Any], np.ndarray] | None = None,
    ):
        self._lm, *self._prompt = operands
        self._settings, self._room, self._dtype = settings, room, dtype
        self._left, self._ends = count, ends
        self.state: DecodeState | None = None
        self._over = False

    def __next__(self) -> np.ndarray:
        """The next token of each row, int32 ``[batch]``."""
        if self._left == 0 or self._over:
            raise StopIteration
        self._left -= 1
        if self.state is None:
            next_state = run_prefill(
                self._lm,
                *self._prompt,
                settings=self._settings,
                room=self._room,
                dtype=self._dtype,
            )
        else:
            # Detached first: after an error in between, the arrays are donated and invalid.
            state, self.state = self.state, None
            next_state = run_step(self._lm, *without_cache(state), settings=self._settings)
        if self._ends is not None:
            next_state = next_state._replace(
                done=self._ends(next_state.token, next_state.alive) | np.asarray(next_state.done)
            )
        self.state = next_state
        self._over = bool(np.asarray(next_state.done).all())
        return np.asarray(next_state.token)

    @property
    def cache(self) -> Any:
        """The cache with the prompts and all tokens so far, for a next turn.

        Before the first token it is the cache passed to the stream. It is a copy of the cache that
        the stream continues to write.
        """
        if self.state is None:
            return self._prompt[2]
        return settled(self._lm, self.state)
