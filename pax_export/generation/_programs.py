"""The compiled programs of `generate` and its streams.

One program reads prompts, so a prompt of another size recompiles only that one; another generates
all tokens after the first, or a third one token per call.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pax_export._types import Array, PyTree
from pax_export.generation._steps import (
    DecodeState,
    Settings,
    advance_state,
    begin_generation,
    settle_cache,
)

#: Tokens, how many of each row are meant, log-probabilities, and the state at the end.
Made = tuple[jax.Array, jax.Array, Any, DecodeState]


@partial(jax.jit, static_argnames=("settings", "room", "dtype"))
def run_prefill(
    lm: PyTree,
    tokens: Any,
    lengths: Array | None,
    cache: PyTree,
    keys: PyTree,
    numbers: Array,
    *,
    settings: Settings,
    room: int,
    dtype: Any,
) -> DecodeState:
    """The state after the prompts and the first token."""
    if cache is None:
        cache = lm.init_cache(tokens.shape[0], room, dtype=dtype)
    return begin_generation(lm, tokens, lengths, cache, keys, settings, numbers)


# The cache of the state is donated: the next one is written into it.


@partial(jax.jit, static_argnames="settings", donate_argnames="cache")
def run_step(lm: PyTree, cache: object, state: DecodeState, *, settings: Settings) -> DecodeState:
    """The state one token later."""
    return advance_state(lm, state._replace(cache=cache), settings)


@partial(jax.jit, static_argnames=("settings", "count"), donate_argnames="cache")
def run_to_end(
    lm: PyTree, cache: object, state: DecodeState, limit: int, *, settings: Settings, count: int
) -> Made:
    """Returns all tokens, including the first."""
    return generate_rest(lm, state._replace(cache=cache), settings, count, limit)


settled = jax.jit(settle_cache)


def without_cache(state: DecodeState) -> tuple[Any, DecodeState]:
    """Splits a state into its cache and the rest."""
    return state.cache, state._replace(cache=None)


def generate_rest(
    lm: PyTree, state: DecodeState, settings: Settings, count: int, limit: object = None
) -> Made:
    """Generates tokens until all rows have ended.

    Args:
        lm: the net.
        state: the state after the first token.
        settings: constants of the generation.
        count: the number of positions for tokens.
        limit: the maximum number of tokens; None: `count`.
    """
    limit = count if limit is None else limit
    batch = state.token.shape[0]
    out = _put(jnp.full((batch, count), settings.pad, jnp.int32), state.token, 0)
    said = state.log_prob
    log_probs = None if said is None else _put(jnp.zeros((batch, count), said.dtype), said, 0)
    made = state.alive.astype(jnp.int32)

    def goes_on(carried: PyTree) -> jax.Array:
        state = carried[0]
        more = state.step < limit
        return more & ~jnp.all(state.done) if settings.stop or settings.sequences else more

    def step(carried: PyTree) -> Any:
        state, out, log_probs, made = carried
        place, state = state.step, advance_state(lm, state, settings)
        if log_probs is not None:
            log_probs = _put(log_probs, state.log_prob, place)
        return state, _put(out, state.token, place), log_probs, made + state.alive

    carried = state, out, log_probs, made
    state, out, log_probs, made = jax.lax.while_loop(goes_on, step, carried)
    return out, made, log_probs, state


def _put(columns: jax.Array, column: PyTree, place: PyTree) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(columns, column[:, None], place, axis=1)
