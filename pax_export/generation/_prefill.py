"""`prefill`: reads a prompt once, to be continued several times."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from pax_export._errors import InvalidArgumentError
from pax_export._types import Array, DTypeLike, PyTree
from pax_export.generation._batch_axes import batch_axes, map_rows
from pax_export.generation._buckets import bucket_sizes
from pax_export.generation._foreign_keywords import KEYWORDS, explain_keywords
from pax_export.generation._prompt import (
    check_new_room,
    check_room,
    checked_cache_dtype,
    checked_chunk,
    checked_count,
    checked_net,
    checked_prompt,
)
from pax_export.generation._steps import read_prompt


@explain_keywords(
    {**KEYWORDS, "max_new_tokens": "max_length=..., for these tokens and all that will follow"}
)
def prefill(
    lm: PyTree,
    tokens: Array,
    lengths: Array | None = None,
    *,
    mask: Array | None = None,
    max_length: int | None = None,
    cache: object = None,
    cache_dtype: object = None,
    prefill_chunk: int | None = None,
    copies: int = 1,
) -> tuple[jax.Array, Any]:
    """Reads prompts into a cache, which `generate` continues.

    A common prefix of many prompts, such as instructions, is read once in this way.

    Args:
        lm: a net with a cache, as for `generate`.
        tokens: ``[batch, length]``, or lists of any lengths.
        lengths: ``[batch]``, the number of valid tokens per row.
        mask: ``[batch, length]``, 1 at valid tokens; instead of ``lengths``.
        max_length: the length of a new cache, including all tokens that will follow.
        cache: a cache that the prompts continue, instead of a new one.  It does not change.
        cache_dtype: the dtype of a new cache; default: the net's.
        prefill_chunk: read this many tokens at a time, with less memory.
        copies: the number of adjacent copies of each row, for several continuations.

    Returns:
        The logits after each row, ``[batch * copies, vocabulary]``, and the cache.

    Raises:
        InvalidArgumentError: as for `generate`; neither ``cache`` nor ``max_length``.

    Example:
        >>> import jax, pax_export as pax
        >>> config = pax.nets.DecoderConfig.llama(
        ...     vocab_size=50, dim=8, num_layers=1, num_heads=2, hidden_dim=16)
        >>> lm = pax.nets.Decoder(config)
        >>> beginning = [[7, 8, 9]]
        >>> _, cache = pax.generation.prefill(lm, beginning, max_length=20, copies=2)
        >>> pax.generate(lm, [[1, 2], [3]], cache=cache, max_new_tokens=4).shape
        (2, 4)

    """
    where = "prefill"
    lm = checked_net(lm, where)
    tokens, lengths = checked_prompt(lm, tokens, lengths, where, mask)
    copies = checked_count(copies, "copies", where)
    chunk = checked_chunk(prefill_chunk, where)
    if cache is None and max_length is None:
        raise InvalidArgumentError(
            "A new cache requires its length.",
            where=f"{where}: max_length",
            got="neither max_length nor cache",
            write="max_length=..., for these tokens and all that will follow",
        )
    if cache is None:
        room = checked_count(max_length, "max_length", where)
        check_new_room(room, lengths, 0, where)
    else:
        room = 0
        check_room(cache, lengths, 0, where, max_length)
    dtype = checked_cache_dtype(cache_dtype, where)
    tokens, lengths, *_ = bucket_sizes([lm], tokens, lengths, cache=cache, room=room, dtype=dtype)
    return _read(lm, tokens, lengths, cache, chunk=chunk, room=room, dtype=dtype, copies=copies)


@partial(jax.jit, static_argnames=("chunk", "room", "dtype", "copies"))
def _read(
    lm: PyTree,
    tokens: Array,
    lengths: Array | None,
    cache: object,
    *,
    chunk: int | None,
    room: int,
    dtype: DTypeLike,
    copies: int,
) -> tuple[jax.Array, Any]:
    if cache is None:
        cache = lm.init_cache(tokens.shape[0], room, dtype=dtype)
    logits, cache = read_prompt(lm, tokens, lengths, cache, chunk)
    if copies == 1:
        return logits, cache
    axes = batch_axes(lm, 1, dtype)
    repeated = map_rows(lambda x, axis: x.repeat(copies, axis), cache, axes)
    return logits.repeat(copies, 0), repeated
