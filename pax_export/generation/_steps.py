"""Prefill and decode steps, shared by all generation functions, and the programs of `generate`.

Steps are pure functions of arrays, which callers compile. The net is called in one way only:
``logits, cache = lm(tokens, cache=cache, lengths=lengths)`` appends ``lengths[row]`` tokens at the
end of each row.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pax_export._foundations.types import Array, DTypeLike, PRNGKey
from pax_export.core import static_key
from pax_export.generation._prompt import Cache, LanguageModel, check_vocabulary
from pax_export.generation._stops import TextEnds
from pax_export.generation.samplers import Sampler

#: Instead of a token where the logits of a net are NaN: it is in no vocabulary, so no tokenizer
#: decodes it.
NO_TOKEN = -1


@dataclass(frozen=True, eq=False)
class Settings:
    """Constants of a generation; static data of the compiled programs.

    User-defined samplers may have an inexact ``__eq__`` or contain lists, so settings are compared
    by their contents at creation, as static data of modules is.
    """

    sampler: Sampler
    stop: tuple[int, ...] = ()
    sequences: tuple[tuple[int, ...], ...] = ()
    pad: int = 0
    log_probs: bool = False
    chunk: int | None = None
    where: str = field(default="generate", compare=False)  # which errors name

    def __post_init__(self) -> None:
        key = static_key(tuple([getattr(self, x.name) for x in fields(self) if x.compare]))
        object.__setattr__(self, "_key", key)
        object.__setattr__(self, "_hash", hash(key))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Settings) and self._key == other._key)  # type: ignore

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]


class DecodeState(NamedTuple):
    """The state of a batch of sequences between two tokens.

    The newest token of a row is known, and the cache does not have it yet.
    """

    token: jax.Array  # [batch], the padding in rows that have ended; or NO_TOKEN
    alive: jax.Array  # [batch], whether `token` is one of the text
    done: jax.Array  # [batch], whether the sequence has ended
    log_prob: jax.Array | None  # [batch]
    step: jax.Array  # how many tokens have been chosen
    keys: jax.Array | None  # [batch]
    seen: jax.Array | None  # [batch, vocabulary]
    recent: jax.Array | None  # [batch, few], the tokens before, where sequences end texts
    numbers: Any  # of the sampler, where its settings leave them out
    cache: Cache


def read_prompt(
    lm: LanguageModel, tokens: Array, lengths: Array, cache: Cache, chunk: int | None = None
) -> tuple[jax.Array, Any]:
    """Reads prompts into a cache; returns the logits after the last token of each row.

    With `chunk` the prompt is read that many tokens at a time, by one program in a loop, so
    activations take the memory of one chunk. The loop ends with the longest row.
    """
    length = tokens.shape[1]
    if chunk is None or not isinstance(length, int) or chunk >= length:
        return last_logits(lm, tokens, cache, lengths)
    padded = jnp.pad(jnp.asarray(tokens), ((0, 0), (0, -length % chunk)))

    def read(carried: tuple[Any, jax.Array, Any]) -> tuple[Any, jax.Array, Any]:
        start, logits, cache = carried
        here = jnp.clip(lengths - start, 0, chunk)
        part = jax.lax.dynamic_slice_in_dim(padded, start, chunk, axis=1)
        new, cache = last_logits(lm, part, cache, here)
        return start + chunk, jnp.where((here > 0)[:, None], new, logits), cache

    shape = jax.eval_shape(lambda: last_logits(lm, padded[:, :chunk], cache, lengths)[0])
    begun = jnp.zeros((), jnp.int32), jnp.zeros(shape.shape, shape.dtype), cache
    longest = jnp.max(lengths)
    return jax.lax.while_loop(lambda carried: carried[0] < longest, read, begun)[1:]


def last_logits(
    lm: LanguageModel, tokens: Array, cache: Cache, lengths: Array
) -> tuple[jax.Array, Any]:
    """The logits after the last of ``lengths[row]`` tokens, ``[batch, vocabulary]``."""
    if _picks_last(lm):  # the head then computes only the last position of each row
        logits, cache = lm(tokens, cache=cache, lengths=lengths, last_only=True)
        return logits, cache
    logits, cache = lm(tokens, cache=cache, lengths=lengths)
    index = jnp.clip(lengths - 1, 0)[:, None, None]
    return jnp.take_along_axis(logits, index, axis=1)[:, 0], cache


def _picks_last(lm: LanguageModel) -> bool:
    try:
        return "last_only" in inspect.signature(type(lm).__call__).parameters
    except (TypeError, ValueError):  # a callable of C
        return False


def begin_generation(
    lm: LanguageModel,
    tokens: Array,
    lengths: Array,
    cache: Cache,
    keys: jax.Array | None,
    settings: Settings,
    numbers: Array | None = None,
) -> DecodeState:
    """Reads the prompts and chooses the first token of each row."""
    logits, cache = read_prompt(lm, tokens, lengths, cache, settings.chunk)
    logits = of_real_prompts(logits, tokens, lengths)
    stops = {*settings.stop, *chain(*settings.sequences)}
    check_vocabulary(sorted(stops), settings.pad, logits.shape[-1], settings.where)
    seen = None
    if settings.sampler.looks_back:
        seen = _occurring_ids(tokens, lengths, logits.shape[-1])
    batch, recent = logits.shape[0], None
    if settings.sequences:
        recent = jnp.full((batch, max(map(len, settings.sequences)) - 1), NO_TOKEN)
    nothing = jnp.zeros(batch, jnp.int32), jnp.ones(batch, bool), jnp.zeros(batch, bool)
    log_prob = jnp.zeros(batch, jnp.float32) if settings.log_probs else None
    state = DecodeState(
        *nothing, log_prob, jnp.zeros((), jnp.int32), keys, seen, recent, numbers, cache
    )
    return _chosen(state, logits, cache, settings)


def of_real_prompts(logits: jax.Array, tokens: Array, lengths: Array) -> jax.Array:
    """The logits after prompts; NaN where a length, of a caller that is compiled, is none."""
    is_real = (lengths >= 1) & (lengths <= tokens.shape[1])
    return jnp.where(is_real[:, None], logits, jnp.nan)


def _occurring_ids(tokens: Array, lengths: Array, size: int) -> jax.Array:
    """Returns which ids occur in each prompt, up to its length."""
    tokens = jnp.asarray(tokens)
    column = jax.lax.broadcasted_iota(jnp.int32, tokens.shape, 1)
    ids = jnp.where(column < lengths[:, None], tokens, size)  # nowhere
    rows = jax.lax.broadcasted_iota(jnp.int32, tokens.shape, 0)
    nowhere = jnp.zeros((tokens.shape[0], size), bool)
    return nowhere.at[rows, ids].set(True, mode="drop")


def advance_state(lm: LanguageModel, state: DecodeState, settings: Settings) -> DecodeState:
    """Adds the newest token of each row to the cache, and chooses the next one."""
    logits, cache = _read_newest(lm, state)
    return _chosen(state, logits, cache, settings)


def settle_cache(lm: LanguageModel, state: DecodeState) -> Any:
    """The cache with the newest token of each row, which no next one follows."""
    return _read_newest(lm, state)[1]


def _read_newest(lm: LanguageModel, state: DecodeState) -> tuple[jax.Array, Any]:
    # Padding may be any number, and a net is given tokens only.
    token = jnp.where(state.alive, state.token, 0)
    return last_logits(lm, token[:, None], state.cache, state.alive.astype(jnp.int32))


def _chosen(state: DecodeState, logits: jax.Array, cache: Cache, settings: Settings) -> DecodeState:
    keys = state.keys
    if keys is not None:
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys, state.step)
    sampler = settings.sampler
    if state.numbers is not None:
        sampler = sampler._joined(state.numbers)
    chosen = unless_nan(sampler.choose(logits, keys, state.seen), logits)
    alive = ~state.done & (chosen >= 0)
    token = jnp.where(state.done, settings.pad, chosen)
    log_prob, seen = state.log_prob, state.seen
    if log_prob is not None:
        of_all = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        of_one = jnp.take_along_axis(of_all, chosen[:, None], axis=1)[:, 0]
        log_prob = jnp.where(alive, of_one, 0.0)
    if seen is not None:
        new = jax.lax.broadcasted_iota(jnp.int32, seen.shape, 1) == chosen[:, None]
        seen = seen | (new & alive[:, None])
    done = state.done | ends_sequence(chosen, settings.stop)
    recent = state.recent
    if recent is not None:
        recent = jnp.concatenate([recent, chosen[:, None]], axis=1)
        done, recent = done | end_with_any(recent, settings.sequences), recent[:, 1:]
    return state._replace(
        token=token, alive=alive, done=done, log_prob=log_prob, step=state.step + 1, seen=seen,
        recent=recent, cache=cache,
    )  # fmt: skip


def unless_nan(chosen: jax.Array, logits: jax.Array) -> jax.Array:
    """The tokens that were chosen from logits; NO_TOKEN where these are NaN."""
    return jnp.where(jnp.isnan(logits).any(axis=-1), NO_TOKEN, chosen)


def ends_sequence(tokens: jax.Array, stop: tuple[int, ...]) -> jax.Array:
    """Returns after which tokens a sequence ends."""
    return is_any(tokens, stop) | (tokens < 0)


def is_any(tokens: jax.Array, ids: tuple[int, ...]) -> jax.Array:
    """Returns which tokens are in a set."""
    found = jnp.zeros(tokens.shape, bool)
    for each in ids:
        found = found | (tokens == each)
    return found


def end_with_any(texts: jax.Array, sequences: tuple[tuple[int, ...], ...]) -> jax.Array:
    """``[batch]``: which texts end with one of some sequences of tokens."""
    found = jnp.zeros(texts.shape[0], bool)
    for each in sequences:
        same = texts[:, -len(each) :] == jnp.array(each, texts.dtype)
        found = found | jnp.all(same, axis=1)
    return found


def ends_at(texts: jax.Array, last: jax.Array, alive: jax.Array, stops: TextEnds) -> jax.Array:
    """``[...]``: which sequences end with their token at ``last``.

    Args:
        texts: ``[..., length]``.
        last: ``[...]``.
        alive: ``[...]``, which of them are valid.
        stops: the stop conditions; strings are checked outside of the program.
    """

    def tokens_before(count: int) -> jax.Array:
        columns = last[..., None] - jnp.arange(count - 1, -1, -1)
        tokens = jnp.take_along_axis(texts, jnp.clip(columns, 0), axis=-1, mode="clip")
        return jnp.where(columns >= 0, tokens, NO_TOKEN)

    found = ends_sequence(tokens_before(1)[..., 0], stops.ids)
    for each in stops.sequences:
        found = found | jnp.all(tokens_before(len(each)) == jnp.array(each), axis=-1)
    if stops.strings is not None:
        shape = jax.ShapeDtypeStruct(last.shape, bool)
        found = found | jax.pure_callback(
            stops.strings.of_texts, shape, texts, last, alive, vmap_method="broadcast_all"
        )
    return found


# --- The programs of `generate` and its streams --------------------------------------------------

# One program reads prompts, so a prompt of another size recompiles only that one; another generates
# all tokens after the first, or a third one token per call.

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
