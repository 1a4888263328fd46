"""`beam_search`: returns the most likely sequences."""

from __future__ import annotations

import math
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pax_export._foundations.errors import InvalidArgumentError
from pax_export._foundations.types import Array
from pax_export.generation._buckets import bucket_sizes, cut_columns
from pax_export.generation._cache import batch_axes, map_rows
from pax_export.generation._foreign_keywords import KEYWORDS, explain_keywords
from pax_export.generation._prompt import (
    Cache,
    Integers,
    LanguageModel,
    check_vocabulary,
    checked_chunk,
    checked_count,
    checked_net,
    checked_pad,
    checked_prompt,
)
from pax_export.generation._steps import (
    NO_TOKEN,
    ends_at,
    last_logits,
    of_real_prompts,
    read_prompt,
)
from pax_export.generation._stops import (
    Decodes,
    Stop,
    TextEnds,
    checked_text_ends,
    default_pad,
    default_stop,
)

EarlyStopping = bool | Literal["never"]


class Beams(NamedTuple):
    """The result of `beam_search`: the best texts of each prompt, the best one first.

    Attributes:
        tokens: ``[batch, beams, max_new_tokens]``, int32, padded after a stop.
        lengths: ``[batch, beams]``, how many tokens are meant, the stop among them.
        scores: ``[batch, beams]``, the logarithm of the probability of each text, over its
            length to the power of ``length_penalty``.

    Example:
        >>> from pax_export.generation import Beams
        >>> Beams._fields
        ('tokens', 'lengths', 'scores')
    """

    tokens: jax.Array
    lengths: jax.Array
    scores: jax.Array


class _BeamSearch(NamedTuple):
    texts: jax.Array  # [batch, beams, count], of unfinished beams
    newest: jax.Array  # [batch, beams]
    total: jax.Array  # [batch, beams], sums of log-probabilities; -inf for missing beams
    ended: Beams  # the best texts that have ended; -inf is the score of none
    is_open: jax.Array  # [batch], whether texts that end later are still considered
    step: jax.Array
    cache: Cache  # of batch * beams rows


class _ScoreRules(NamedTuple):
    penalty: Any  # float32
    limit: Any  # how many tokens a text has at most
    stop: TextEnds
    early_stopping: EarlyStopping


@explain_keywords(KEYWORDS)
def beam_search(
    lm: LanguageModel,
    tokens: Integers,
    lengths: Integers | None = None,
    *,
    mask: Integers | None = None,
    max_new_tokens: int,
    beams: int = 4,
    stop: Stop = None,
    tokenizer: Decodes | None = None,
    pad: int | None = None,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    prefill_chunk: int | None = None,
) -> Beams:
    """Searches for the most likely continuations with several beams per row.

    Finished sequences are stored separately, up to ``beams`` of them, and take no beam from
    unfinished ones.  Tokens and scores equal those of ``generate(num_beams=...)`` of transformers.
    With one beam, unless ``early_stopping="never"``, the tokens are those of `generate`.

    Args:
        lm: a net with a cache, as for `generate`.
        tokens: ``[batch, length]``, or lists of any lengths.
        lengths: ``[batch]``, the number of valid tokens per row.
        mask: ``[batch, length]``, 1 at valid tokens; instead of ``lengths``.
        max_new_tokens: the maximum number of new tokens.
        beams: the number of beams per row, and of returned sequences.
        stop: stop tokens, token sequences or strings; default as for `generate`.
        tokenizer: for strings, as for `generate`.
        pad: the id of padding after a stop, as for `generate`.
        length_penalty: log-probabilities are divided by the length to this power. 0 compares
            whole sequences, which favors short ones; 1 compares means per token; larger values
            favor long sequences, negative ones short sequences.
        early_stopping: when a row is finished, once it has ``beams`` finished sequences.
            ``True``: immediately.  ``False``: when no beam would beat the worst of them if it
            ended now.  ``"never"``: when no beam can beat it at any length.
        prefill_chunk: read the prompts this many tokens at a time.

    Returns:
        `Beams`: sequences, lengths and scores.  If logits are NaN, the score is NaN and all
        tokens are -1.

    Raises:
        InvalidArgumentError: as for `generate`; more beams than tokens in the vocabulary; a
            ``length_penalty`` that is not finite, or too large for ``max_new_tokens``.

    Example:
        >>> import jax, pax_export as pax
        >>> config = pax.nets.DecoderConfig.llama(
        ...     vocab_size=50, dim=8, num_layers=1, num_heads=2, hidden_dim=16)
        >>> lm = pax.nets.Decoder(config)
        >>> found = pax.generation.beam_search(lm, [[1, 2], [3]], max_new_tokens=5, beams=3)
        >>> found.tokens.shape, found.scores.shape
        ((2, 3, 5), (2, 3))

    """
    where = "beam_search"
    lm = checked_net(lm, where)
    prompts = checked_prompt(lm, tokens, lengths, where, mask)
    count = checked_count(max_new_tokens, "max_new_tokens", where)
    if early_stopping not in (True, False, "never"):
        raise InvalidArgumentError(
            'early_stopping must be True, False or "never".',
            where=f"{where}: early_stopping",
            got=f"{early_stopping!r:.80}",
        )
    penalty = float(length_penalty)
    # Powers of lengths are computed in float32.
    if not abs(penalty) * math.log(count) < math.log(np.finfo(np.float32).max):
        raise InvalidArgumentError(
            "The length of a text to the power of length_penalty is not finite in float32.",
            where=f"{where}: length_penalty",
            got=f"{penalty} for {count} tokens",
            write="length_penalty=1.0; a usual one is between -2 and 2",
        )
    sizes = bucket_sizes([lm], *prompts, count)
    found = _search_beams(
        lm,
        sizes.tokens,
        sizes.lengths,
        penalty,
        sizes.limit,
        count=sizes.columns,
        room=sizes.room,
        beams=checked_count(beams, "beams", where),
        stop=checked_text_ends(default_stop(stop, lm), tokenizer, where),
        pad=checked_pad(default_pad(pad, lm), where),
        early_stopping="never" if early_stopping == "never" else bool(early_stopping),
        chunk=checked_chunk(prefill_chunk, where),
    )
    return found._replace(tokens=cut_columns(found.tokens, sizes.limit))


@partial(
    jax.jit, static_argnames=("count", "room", "beams", "stop", "pad", "early_stopping", "chunk")
)
def _search_beams(
    lm: LanguageModel,
    tokens: Array,
    lengths: Array,
    penalty: float,
    limit: int,
    *,
    count: int,
    room: int,
    beams: int,
    stop: TextEnds,
    pad: int,
    early_stopping: EarlyStopping,
    chunk: int | None,
) -> Beams:
    batch = tokens.shape[0]
    cache = lm.init_cache(batch, room, dtype=None)
    logits, cache = read_prompt(lm, tokens, lengths, cache, chunk)
    logits = of_real_prompts(logits, tokens, lengths)
    size = logits.shape[-1]
    check_vocabulary({*stop.ids, *chain(*stop.sequences)}, pad, size, "beam_search")
    if beams > size:
        raise InvalidArgumentError(
            "The vocabulary has fewer tokens than there are beams.",
            where="beam_search",
            got=f"beams={beams}, and a vocabulary of {size}",
            write=f"beams={size} or fewer",
        )
    axes = batch_axes(lm, room, None)
    limit = count if limit is None else limit
    rules = _ScoreRules(jnp.asarray(penalty, jnp.float32), limit, stop, early_stopping)
    texts = jnp.full((batch, beams, count), pad, jnp.int32)
    none = jnp.full((batch, beams), -jnp.inf)
    nothing = jnp.zeros((batch, beams), jnp.int32)
    search = _BeamSearch(
        texts,
        nothing,
        none.at[:, 0].set(0.0),  # all beams begin with one prompt
        Beams(texts, nothing, none),
        jnp.ones(batch, bool),
        jnp.zeros((), jnp.int32),
        map_rows(lambda x, axis: x.repeat(beams, axis), cache, axes),
    )
    search = _extend_beams(search, logits.repeat(beams, 0), axes, rules)
    search = jax.lax.while_loop(
        lambda search: (search.step < limit) & jnp.any(search.is_open),
        lambda search: _extend_beams(*_read_newest(lm, search), axes, rules),
        search,
    )
    tokens, lengths, scores = search.ended
    no_number = jnp.isnan(scores)
    tokens = jnp.where(no_number[:, :, None], NO_TOKEN, tokens)
    return Beams(tokens, jnp.where(no_number, 0, lengths), scores)


def _read_newest(lm: LanguageModel, search: _BeamSearch) -> tuple[_BeamSearch, jax.Array]:
    """Adds the newest token of each beam to the cache; the logits after it."""
    counts = jnp.broadcast_to(search.is_open[:, None], search.newest.shape).astype(jnp.int32)
    logits, cache = last_logits(lm, search.newest.reshape(-1, 1), search.cache, counts.reshape(-1))
    return search._replace(cache=cache), logits


def _extend_beams(
    search: _BeamSearch, logits: jax.Array, axes: list[Any], rules: _ScoreRules
) -> _BeamSearch:
    """Keeps the best unfinished continuations, and the best finished ones."""
    batch, beams, _ = search.texts.shape
    size = logits.shape[-1]
    more = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1).reshape(batch, beams, size)
    totals = (search.total[:, :, None] + more).reshape(batch, -1)
    # A beam can end with each of the stops, so that many more candidates are kept.
    # For a stop of several tokens, transformers counts one.
    stop = rules.stop
    ways = max(len(stop.ids), 1 if stop.sequences or stop.strings else 0)
    candidates = beams * min(1 + ways, size)
    total, index = jax.lax.top_k(totals, candidates)
    beam, token = index // size, (index % size).astype(jnp.int32)
    texts = jax.lax.dynamic_update_slice_in_dim(
        _of_beams(search.texts, beam), token[:, :, None], search.step, axis=2
    )
    step = search.step + 1
    last = jnp.broadcast_to(search.step, total.shape)
    ends = ends_at(texts, last, search.is_open[:, None] & (total > -jnp.inf), stop)
    # Only the best candidates may end; later ones only continue.
    new = jnp.where((ends | (step == rules.limit)) & search.is_open[:, None], total, -jnp.inf)
    length = step.astype(jnp.float32)
    new = Beams(texts, jnp.full_like(token, step), new / length**rules.penalty)
    ended = _best_of_both(search.ended, Beams(*(x[:, :beams] for x in new)))
    total, best = jax.lax.top_k(jnp.where(ends, -jnp.inf, total), beams)
    rows = jnp.arange(batch)[:, None] * beams + _of_beams(beam, best)
    cache = map_rows(lambda x, axis: jnp.take(x, rows.reshape(-1), axis), search.cache, axes)
    return _BeamSearch(
        _of_beams(texts, best),
        _of_beams(token, best),
        total,
        ended,
        search.is_open & _goes_on(total, ended.scores, length, rules),
        step,
        cache,
    )


def _best_of_both(ended: Beams, new: Beams) -> Beams:
    """Returns the best of two sets of sequences, as many as the first set has."""
    tokens, lengths, scores = (jnp.concatenate(both, axis=1) for both in zip(ended, new))
    scores, best = jax.lax.top_k(scores, ended.scores.shape[1])
    return Beams(_of_beams(tokens, best), _of_beams(lengths, best), scores)


def _goes_on(
    total: jax.Array, scores: jax.Array, length: jax.Array, rules: _ScoreRules
) -> jax.Array:
    """``[batch]``: whether an unfinished sequence may still beat a finished one."""
    has_room = ~jnp.all(scores > -jnp.inf, axis=1)
    if rules.early_stopping is True:
        return has_room
    if rules.early_stopping == "never":  # a sum that no longer grows, over the largest length
        length = jnp.where(rules.penalty > 0, jnp.float32(rules.limit), length)
    return has_room | (total[:, 0] / length**rules.penalty > scores[:, -1])


def _of_beams(x: jax.Array, index: jax.Array) -> jax.Array:
    """``x[row, index[row]]`` for each row."""
    return jnp.take_along_axis(x, index if x.ndim == 2 else index[:, :, None], axis=1)
