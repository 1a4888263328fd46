"""Caches of any net: new ones, their batch axes, and `prefill`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from pax_export._foundations.errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export._foundations.types import Array, DTypeLike
from pax_export.export import spec
from pax_export.generation._buckets import bucket_sizes
from pax_export.generation._foreign_keywords import KEYWORDS, explain_keywords
from pax_export.generation._prompt import (
    Cache,
    Integers,
    LanguageModel,
    check_new_room,
    check_room,
    checked_cache_dtype,
    checked_chunk,
    checked_count,
    checked_net,
    checked_prompt,
)
from pax_export.generation._steps import read_prompt

#: Longer than any window, so that sizes that grow with a cache's length are visible.
_LARGE = 1 << 20


def batch_axes(lm: LanguageModel, room: int, dtype: DTypeLike | None) -> list[int | None]:
    """Returns the batch axis of each leaf of a cache; None for leaves without one."""
    axes = []
    for two, three in zip(*(jax.tree.leaves(_shapes(lm, batch, room, dtype)) for batch in (2, 3))):
        grown = [i for i, sizes in enumerate(zip(two.shape, three.shape)) if sizes[0] != sizes[1]]
        if len(grown) > 1:
            raise InvalidArgumentTypeError(
                "An array of the cache has no single batch axis.",
                where=f"{type(lm).__name__}.init_cache",
                got=f"shapes {two.shape} and {three.shape} for 2 and 3 rows",
                write="arrays with one batch axis each",
            )
        axes.append(grown[0] if grown else None)
    return axes


def shapes_of_cache(
    lm: LanguageModel, batch: int | str, room: int | str, dtype: DTypeLike | None, **wishes: bool
) -> Any:
    """Returns a cache of specs with these sizes, numbers or names; options as for `new_cache`.

    An array of a fixed window keeps its size.
    """
    rows = batch if isinstance(batch, int) else 2
    length = room if isinstance(room, int) else _LARGE
    here = _shapes(lm, rows, length, dtype, **wishes)
    more_rows = jax.tree.leaves(_shapes(lm, rows + 1, length, dtype, **wishes))
    more_room = more_rows
    if isinstance(room, str):
        more_room = jax.tree.leaves(_shapes(lm, rows, length + 1, dtype, **wishes))

    def described(leaf: Array, rows: Array, longer: Array) -> Any:
        shape: list[int | str] = list(leaf.shape)
        for axis, size in enumerate(leaf.shape):
            if rows.shape[axis] != size and isinstance(batch, str):
                shape[axis] = batch
            elif longer.shape[axis] != size and isinstance(room, str):
                shape[axis] = room
        return spec(tuple(shape), leaf.dtype)

    leaves, tree = jax.tree.flatten(here)
    found = [described(*each) for each in zip(leaves, more_rows, more_room)]
    return jax.tree.unflatten(tree, found)


def _shapes(
    lm: LanguageModel, batch: int, room: int, dtype: DTypeLike | None, **wishes: bool
) -> Any:
    return jax.eval_shape(lambda: new_cache(lm, batch, room, dtype, **wishes))


def map_rows(change: Callable[[jax.Array, int], jax.Array], cache: Cache, axes: list[Any]) -> Any:
    """A cache with each array changed along its axis of rows."""
    leaves, tree = jax.tree.flatten(cache)
    changed = [leaf if axis is None else change(leaf, axis) for leaf, axis in zip(leaves, axes)]
    return jax.tree.unflatten(tree, changed)


# --- Creates an empty cache for any net ----------------------------------------------------------


def new_cache(
    lm: LanguageModel, batch: int, room: int, dtype: DTypeLike | None, **wishes: bool
) -> Any:
    """Calls ``lm.init_cache`` with those of the options that it has parameters for."""
    known = inspect.signature(lm.init_cache).parameters
    options = {name: wish for name, wish in wishes.items() if name in known}
    return lm.init_cache(batch, room, dtype=dtype, **options)


# --- `prefill`: reads a prompt once, to be continued several times -------------------------------


@explain_keywords(
    {**KEYWORDS, "max_new_tokens": "max_length=..., for these tokens and all that will follow"}
)
def prefill(
    lm: LanguageModel,
    tokens: Integers,
    lengths: Integers | None = None,
    *,
    mask: Integers | None = None,
    max_length: int | None = None,
    cache: Cache = None,
    cache_dtype: DTypeLike | None = None,
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
    read, counts = checked_prompt(lm, tokens, lengths, where, mask)
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
        check_new_room(room, counts, 0, where)
    else:
        room = 0
        check_room(cache, counts, 0, where, max_length)
    dtype = checked_cache_dtype(cache_dtype, where)
    read, counts, *_ = bucket_sizes([lm], read, counts, cache=cache, room=room, dtype=dtype)
    return _read(lm, read, counts, cache, chunk=chunk, room=room, dtype=dtype, copies=copies)


@partial(jax.jit, static_argnames=("chunk", "room", "dtype", "copies"))
def _read(
    lm: LanguageModel,
    tokens: Array,
    lengths: Array,
    cache: Cache,
    *,
    chunk: int | None,
    room: int,
    dtype: DTypeLike | None,
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
