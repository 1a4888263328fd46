"""`speculate`: speculative decoding with a smaller draft model."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pax_export._foundations.errors import InvalidArgumentTypeError
from pax_export._foundations.types import Array
from pax_export.generation._buckets import bucket_sizes, cut_columns
from pax_export.generation._cache import new_cache
from pax_export.generation._foreign_keywords import KEYWORDS, explain_keywords
from pax_export.generation._prompt import (
    Integers,
    LanguageModel,
    TruncatableCache,
    check_vocabulary,
    checked_chunk,
    checked_count,
    checked_net,
    checked_pad,
    checked_prompt,
)
from pax_export.generation._steps import (
    ends_at,
    last_logits,
    of_real_prompts,
    read_prompt,
    unless_nan,
)
from pax_export.generation._stops import (
    Decodes,
    Stop,
    TextEnds,
    checked_text_ends,
    default_pad,
    default_stop,
)


class _Texts(NamedTuple):
    tokens: jax.Array  # [batch, count]
    made: jax.Array  # [batch], their number
    newest: jax.Array  # [batch], in neither cache yet
    done: jax.Array  # [batch]
    cache: TruncatableCache
    draft_cache: TruncatableCache


@explain_keywords(KEYWORDS)
def speculate(
    lm: LanguageModel,
    draft: LanguageModel,
    tokens: Integers,
    lengths: Integers | None = None,
    *,
    mask: Integers | None = None,
    max_new_tokens: int,
    ahead: int = 4,
    stop: Stop = None,
    tokenizer: Decodes | None = None,
    pad: int | None = None,
    prefill_chunk: int | None = None,
) -> jax.Array:
    """Generates greedy tokens with speculative decoding, in fewer calls of the net.

    A smaller net with the same vocabulary proposes tokens; the net reads them in one call, keeps
    those that it would have chosen, and adds one.  The tokens equal those of
    ``generate(lm, ..., sampler=greedy())``, whatever the smaller net proposes; better proposals
    mean fewer calls.  Both caches need room for ``ahead + 1`` tokens more than those of
    `generate`, so nets with learned positions need as many more positions.

    Args:
        lm: a net with a cache, as for `generate`, whose cache has ``with_lengths(lengths)``: the
            same cache, truncated to these lengths.
        draft: a smaller net of the same kind.
        tokens: ``[batch, length]``, or lists of any lengths.
        lengths: ``[batch]``, the number of valid tokens per row.
        mask: ``[batch, length]``, 1 at valid tokens; instead of ``lengths``.
        max_new_tokens: the maximum number of new tokens.
        ahead: the number of tokens proposed at once.
        stop: stop tokens, token sequences or strings; default as for `generate`.
        tokenizer: for strings, as for `generate`.
        pad: the id of padding after a stop, as for `generate`.
        prefill_chunk: read the prompts this many tokens at a time.

    Returns:
        ``[batch, max_new_tokens]``, int32; -1 as for `generate`.

    Raises:
        InvalidArgumentError: as for `generate`.
        InvalidArgumentTypeError: a cache that cannot be truncated.

    Example:
        >>> import jax, pax_export as pax
        >>> config = pax.nets.DecoderConfig.llama(
        ...     vocab_size=50, dim=8, num_layers=1, num_heads=2, hidden_dim=16)
        >>> lm, small = pax.nets.Decoder(config), pax.nets.Decoder(config)
        >>> pax.generation.speculate(lm, small, [[1, 2], [3]], max_new_tokens=6).shape
        (2, 6)

    """
    where = "speculate"
    lm, draft = checked_net(lm, where), checked_net(draft, f"{where}: draft")
    prompts = checked_prompt(lm, tokens, lengths, where, mask)
    count = checked_count(max_new_tokens, "max_new_tokens", where)
    ahead = checked_count(ahead, "ahead", where)
    sizes = bucket_sizes([lm, draft], *prompts, count, spare=ahead + 1)
    new_tokens = _run_speculation(
        lm,
        draft,
        sizes.tokens,
        sizes.lengths,
        sizes.limit,
        count=sizes.columns,
        room=sizes.room,
        ahead=ahead,
        stop=checked_text_ends(default_stop(stop, lm), tokenizer, where),
        pad=checked_pad(default_pad(pad, lm), where),
        chunk=checked_chunk(prefill_chunk, where),
    )
    return cut_columns(new_tokens, sizes.limit)


@partial(jax.jit, static_argnames=("count", "room", "ahead", "stop", "pad", "chunk"))
def _run_speculation(
    lm: LanguageModel,
    draft: LanguageModel,
    tokens: Array,
    lengths: Array,
    limit: int,
    *,
    count: int,
    room: int,
    ahead: int,
    stop: TextEnds,
    pad: int,
    chunk: int | None,
) -> jax.Array:
    batch, limit = tokens.shape[0], count if limit is None else limit
    logits, cache = read_prompt(lm, tokens, lengths, _truncatable_cache(lm, batch, room), chunk)
    stops = {*stop.ids, *chain(*stop.sequences)}
    check_vocabulary(stops, pad, logits.shape[-1], "speculate")
    _, draft_cache = read_prompt(
        draft, tokens, lengths, _truncatable_cache(draft, batch, room), chunk
    )
    newest = _most_likely(of_real_prompts(logits, tokens, lengths))
    begun, one = (
        jnp.full((batch, count), pad, jnp.int32).at[:, 0].set(newest),
        jnp.ones(batch, jnp.int32),
    )
    texts = _Texts(
        begun,
        one,
        newest,
        ends_at(begun, one - 1, one > 0, stop) | (limit == 1),
        cache,
        draft_cache,
    )

    def step(texts: _Texts) -> _Texts:
        proposed, draft_cache = _propose_tokens(draft, texts, ahead, logits.shape[-1])
        return _accept_proposals(lm, texts._replace(draft_cache=draft_cache), proposed, stop, limit)

    return jax.lax.while_loop(lambda texts: ~jnp.all(texts.done), step, texts).tokens


def _truncatable_cache(lm: LanguageModel, batch: int, room: int) -> TruncatableCache:
    """Returns a cache that can be truncated: one that drops no tokens."""
    cache = new_cache(lm, batch, room, None, rolling=False)
    if not hasattr(cache, "with_lengths"):
        raise InvalidArgumentTypeError(
            "The cache cannot be cut, and rejected tokens have to be removed from it.",
            where="speculate",
            got=type(cache).__name__,
            write="a cache with a method with_lengths(lengths), as that of pax.nets.Decoder",
        )
    return cache


def _propose_tokens(
    draft: LanguageModel, texts: _Texts, ahead: int, size: int
) -> tuple[jax.Array, Any]:
    """Returns the tokens that the draft proposes, ``[batch, ahead]``; its cache then has them all.

    If its vocabulary is larger, only ids of the net's vocabulary are proposed.
    """
    alive = (~texts.done).astype(jnp.int32)

    def step(carried: tuple[jax.Array, Any], _: None) -> tuple[tuple[jax.Array, Any], jax.Array]:
        token, cache = carried
        logits, cache = last_logits(draft, token[:, None], cache, alive)
        token = jnp.argmax(logits[:, :size], -1).astype(jnp.int32)
        return (token, cache), token

    begun = texts.newest, texts.draft_cache
    (_, cache), tokens = jax.lax.scan(step, begun, None, length=ahead + 1)
    return tokens[:ahead].T, cache


def _most_likely(logits: jax.Array) -> jax.Array:
    return unless_nan(jnp.argmax(logits, -1).astype(jnp.int32), logits)


def _accept_proposals(
    lm: LanguageModel, texts: _Texts, proposed: jax.Array, stop: TextEnds, limit: int
) -> _Texts:
    """Keeps the proposals that the net would have chosen, and adds one token."""
    ahead, count = proposed.shape[1], texts.tokens.shape[1]
    alive = ~texts.done
    read = jnp.concatenate([texts.newest[:, None], proposed], axis=1)
    lengths = jnp.where(alive, ahead + 1, 0)
    logits, cache = lm(read, cache=texts.cache, lengths=lengths)
    own = _most_likely(logits)  # after each of the tokens read
    right = jnp.cumprod((proposed == own[:, :-1]).astype(jnp.int32), axis=1).sum(axis=1)
    step = jnp.arange(ahead + 1, dtype=jnp.int32)
    column = texts.made[:, None] + step
    new = alive[:, None] & (step <= right[:, None]) & (column < limit)
    rows = jnp.arange(own.shape[0])[:, None]
    put = lambda new: texts.tokens.at[rows, jnp.where(new, column, count)].set(own, mode="drop")  # noqa: E731
    candidates = jnp.broadcast_to(put(new)[:, None], (*own.shape, count))
    is_end = ends_at(candidates, column, new, stop)
    # A sequence ends with its first stop, or at the requested length.
    new = new & (jnp.cumsum(is_end.astype(jnp.int32), axis=1) - is_end == 0)
    tokens = put(new)
    total = texts.made + new.sum(axis=1, dtype=jnp.int32)
    newest = jnp.take_along_axis(own, right[:, None], axis=1)[:, 0]
    done = texts.done | (total >= limit) | (new & is_end).any(axis=1)
    too_many = jnp.where(alive, ahead - right, 0)
    return _Texts(
        tokens,
        total,
        newest,
        done,
        cache.with_lengths(cache.lengths - too_many),
        texts.draft_cache.with_lengths(texts.draft_cache.lengths - too_many),
    )
