"""Length buckets, so that texts of many lengths share compiled programs.

Prompts are padded, with their lengths as an operand; the number of new tokens is rounded up, with
the requested number as an operand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from pax_export._foundations.errors import InvalidArgumentError
from pax_export._foundations.jax import is_tracer
from pax_export._foundations.types import Array, DTypeLike
from pax_export.generation._prompt import Cache, LanguageModel, room_of

#: Shorter prompts hardly take less time.  An unused new token takes cache space, and no time.
_FEWEST_READ, _FEWEST_NEW = 16, 64
#: From here on a step is half a power of two: filling up to a whole one doubles the time.
_MANY = 512


class BucketSizes(NamedTuple):
    """Prompts, and for how many tokens a program has places."""

    tokens: Any  # [batch, width]
    lengths: Any  # [batch]
    columns: int  # for new tokens
    limit: int | None  # the number of tokens to choose; None: all
    room: int  # of a new cache


def bucket(size: int, least: int) -> int:
    """Rounds up to a power of two; above 512 also to the middle between two.

    Example:
        >>> [bucket(size, 16) for size in (2, 16, 17, 100, 600, 800)]
        [16, 16, 32, 128, 768, 1024]
    """
    power = max(least, 1 << (size - 1).bit_length())
    between = power * 3 // 4
    return between if size <= between and between > _MANY else power


def bucket_sizes(
    nets: Sequence[LanguageModel],
    tokens: Array,
    lengths: Array,
    count: int = 0,
    *,
    cache: Cache = None,
    room: int | None = None,
    spare: int = 0,
    dtype: DTypeLike | None = None,
) -> BucketSizes:
    """Pads prompts and sizes to buckets, unless values are traced or span several processes."""
    if not all(map(_is_at_hand, jax.tree.leaves((nets, tokens, lengths, cache)))):
        exact = tokens.shape[1] + count + spare
        return BucketSizes(tokens, lengths, count, None, exact if room is None else room)
    batch, longest = len(lengths), int(np.max(lengths))
    columns = bucket(count, _FEWEST_NEW) if count else 0
    width = 1 if longest == 1 else bucket(longest, _FEWEST_READ)
    if cache is not None:
        room, most = 0, room_of(cache)
    elif room is None:
        needed = longest + count + spare
        most = room = width + columns + spare
        shortest = int(np.min(lengths)) + count + spare
        for lm in nets:
            _check_one_rotation(lm, shortest, needed)
            most = room = _cache_length(lm, batch, room, needed, dtype)
    else:
        most = room
    if most is not None:
        width = max(longest, min(width, most))
    return BucketSizes(_of_width(tokens, width), lengths, columns, count, room)


def _longrope_of(lm: LanguageModel) -> Any:
    scaling: Any = getattr(getattr(lm, "config", None), "rotary_scaling", None)
    return scaling if getattr(scaling, "kind", None) == "longrope" else None


def _check_one_rotation(lm: LanguageModel, shortest: int, longest: int) -> None:
    """Refuses rows of which one alone would be rotated by other frequencies than together."""
    scaling = _longrope_of(lm)
    if scaling is not None and shortest <= scaling.original_length < longest:
        raise InvalidArgumentError(
            "Short and long texts of this net are rotated by other frequencies (LongRoPE).",
            where="generation: tokens",
            got=f"rows of {shortest} to {longest} tokens with the new ones, where "
            f"original_length is {scaling.original_length}",
            write=f"a call for rows of up to {scaling.original_length} tokens with the new ones, "
            "and one for longer rows",
        )


def _is_at_hand(leaf: object) -> bool:
    if is_tracer(leaf):
        return False
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable


def _of_width(tokens: Array, width: int) -> Any:
    if tokens.shape[1] == width:
        return tokens
    if isinstance(tokens, jax.Array) and len(tokens.sharding.device_set) > 1:
        return jax.numpy.pad(tokens[:, :width], ((0, 0), (0, max(0, width - tokens.shape[1]))))
    tokens = np.asarray(tokens)[:, :width]
    return np.pad(tokens, ((0, 0), (0, width - tokens.shape[1])))


def _cache_length(
    lm: LanguageModel, batch: int, wanted: int, needed: int, dtype: DTypeLike | None
) -> int:
    """Returns the length of a new cache: `wanted`, limited by the net's positions."""
    most: Any = getattr(getattr(lm, "config", None), "max_positions", None)
    if isinstance(most, int):
        scaling = _longrope_of(lm)
        if scaling is not None and needed <= scaling.original_length:
            most = min(most, scaling.original_length)  # longer caches have other frequencies
        return max(needed, min(wanted, most))
    try:
        jax.eval_shape(lambda: lm.init_cache(batch, wanted, dtype=dtype))
    except Exception:  # a net of a user may refuse it in any way
        return needed
    return wanted


def cut_columns(columns: jax.Array | None, count: int | None) -> Any:
    """Returns the first `count` columns; None stays None."""
    if columns is None or count is None or columns.shape[-1] == count:
        return columns
    if not _is_at_hand(columns):
        return columns[..., :count]
    # jax compiles a slice for each size, which numpy does not.
    where = columns.sharding if columns.committed else None
    return jax.device_put(np.asarray(columns)[..., :count], where)
