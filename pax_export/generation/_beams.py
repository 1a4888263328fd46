"""`beam_search`: the likeliest texts, instead of the likeliest token again and again."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pax_export._errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export.generation._batch_axes import batch_axes, map_rows
from pax_export.generation._prompt import (
    check_stop_ids,
    checked_chunk,
    checked_count,
    checked_net,
    checked_pad,
    checked_prompt,
    checked_stop,
)
from pax_export.generation._steps import is_any, last_logits, read_prompt

_NEVER = -1e30  # a score that no text has


class Beams(NamedTuple):
    """What `beam_search` gives: of each prompt the best texts, the best one first.

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


class _Search(NamedTuple):
    tokens: jax.Array  # [batch, beams, count]
    newest: jax.Array  # [batch, beams]
    total: jax.Array  # [batch, beams], sums of log-probabilities
    lengths: jax.Array  # [batch, beams]
    done: jax.Array  # [batch, beams]
    step: jax.Array
    cache: Any  # of batch * beams rows


def beam_search(
    lm: Any,
    tokens: Any,
    lengths: Any = None,
    *,
    max_new_tokens: int,
    beams: int = 4,
    stop: Any = (),
    pad: int = 0,
    length_penalty: float = 1.0,
    prefill_chunk: int | None = None,
) -> Beams:
    """Searches the likeliest texts: of all that can follow, so many are kept at each step.

    With one beam it gives what `generate` gives.

    Args:
        lm: a net with a cache, as for `generate`.
        tokens: ``[batch, length]``, or lists of any lengths.
        lengths: ``[batch]``, how many tokens of each row are meant.
        max_new_tokens: how many tokens a text has at most.
        beams: how many texts of each row are kept.
        stop: the id of the token that ends a text, or several.
        pad: the id that stands behind it.
        length_penalty: 0 compares probabilities of whole texts, which short ones win; 1
            compares those of a token in the mean.
        prefill_chunk: read the prompts so many tokens at a time.

    Returns:
        The texts, their lengths and scores.

    Raises:
        InvalidArgumentError: as for `generate`; more beams than there are tokens.

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
    tokens, lengths = checked_prompt(lm, tokens, lengths, where)
    return _searched(
        lm,
        tokens,
        lengths,
        _checked_penalty(length_penalty),
        count=checked_count(max_new_tokens, "max_new_tokens", where),
        beams=checked_count(beams, "beams", where),
        stop=checked_stop(stop, where),
        pad=checked_pad(pad, where),
        chunk=checked_chunk(prefill_chunk, where),
    )


def _checked_penalty(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentTypeError(
            "length_penalty is a number.",
            where="beam_search",
            got=repr(value),
            write="length_penalty=1.0",
        ) from error


@partial(jax.jit, static_argnames=("count", "beams", "stop", "pad", "chunk"))
def _searched(
    lm: Any,
    tokens: Any,
    lengths: Any,
    penalty: Any,
    *,
    count: int,
    beams: int,
    stop: tuple[int, ...],
    pad: int,
    chunk: int | None,
) -> Beams:
    batch, room = tokens.shape[0], tokens.shape[1] + count
    cache = lm.init_cache(batch, room, dtype=None)
    logits, cache = read_prompt(lm, tokens, lengths, cache, chunk)
    size = logits.shape[-1]
    check_stop_ids(stop, size, "beam_search")
    if beams > size:
        raise InvalidArgumentError(
            "There are fewer tokens than beams.",
            where="beam_search",
            got=f"beams={beams}, and a vocabulary of {size}",
            write=f"beams={size} or fewer",
        )
    axes = batch_axes(lm, room, None)
    total, newest = jax.lax.top_k(_log_softmax(logits), beams)
    newest = newest.astype(jnp.int32)
    out = jnp.full((batch, beams, count), pad, jnp.int32).at[:, :, 0].set(newest)
    search = _Search(
        out,
        newest,
        total,
        jnp.ones((batch, beams), jnp.int32),
        is_any(newest, stop),
        jnp.ones((), jnp.int32),
        map_rows(lambda x, axis: x.repeat(beams, axis), cache, axes),
    )
    step = partial(_step, lm, axes, stop, pad)
    search = jax.lax.while_loop(
        lambda search: (search.step < count) & ~jnp.all(search.done), step, search
    )
    scores = search.total / search.lengths.astype(jnp.float32) ** penalty
    order = jnp.argsort(-scores, axis=1)

    def best_first(x: jax.Array) -> jax.Array:
        at = order if x.ndim == 2 else order[:, :, None]
        return jnp.take_along_axis(x, at, axis=1)

    return Beams(best_first(search.tokens), best_first(search.lengths), best_first(scores))


def _step(lm: Any, axes: list[Any], stop: tuple[int, ...], pad: int, search: _Search) -> _Search:
    """Adds a token to each beam, and keeps the best of what can follow."""
    batch, beams = search.newest.shape
    alive = (~search.done).reshape(-1).astype(jnp.int32)
    newest = jnp.where(search.done, 0, search.newest).reshape(-1, 1)
    logits, cache = last_logits(lm, newest, search.cache, alive)
    size = logits.shape[-1]
    more = _log_softmax(logits).reshape(batch, beams, size)
    # A text that has ended goes on in one way, which costs nothing.
    only = jnp.where(jnp.arange(size) == 0, 0.0, _NEVER)
    more = jnp.where(search.done[:, :, None], only, more)
    total, place = jax.lax.top_k((search.total[:, :, None] + more).reshape(batch, -1), beams)
    beam, token = place // size, (place % size).astype(jnp.int32)
    rows = (jnp.arange(batch)[:, None] * beams + beam).reshape(-1)
    cache = map_rows(lambda x, axis: jnp.take(x, rows, axis=axis), cache, axes)

    def of_beam(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, beam, axis=1)

    was_done = of_beam(search.done)
    token = jnp.where(was_done, pad, token)
    texts = jnp.take_along_axis(search.tokens, beam[:, :, None], axis=1)
    texts = jax.lax.dynamic_update_slice_in_dim(texts, token[:, :, None], search.step, axis=2)
    return _Search(
        texts,
        token,
        total,
        of_beam(search.lengths) + ~was_done,
        was_done | is_any(token, stop),
        search.step + 1,
        cache,
    )


def _log_softmax(logits: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
