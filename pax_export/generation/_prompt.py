"""Checks of arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from pax_export._foundations.check import checked_integer
from pax_export._foundations.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    a_few,
)
from pax_export._foundations.jax import is_key, is_tracer
from pax_export._foundations.types import Array, DTypeLike, PRNGKey, PyTree
from pax_export.core import Module, enable_eval_mode
from pax_export.generation.samplers import Sampler
from pax_export.nets import cache_dtype, check_ids

#: Integers of any shape; lists, too.
Integers: TypeAlias = Array | Sequence[Any]
#: What a net's `init_cache` returns: any pytree, which the net alone looks into.
Cache: TypeAlias = PyTree


class TruncatableCache(Protocol):
    """A cache whose rows can be cut, as that of a `Decoder`."""

    lengths: jax.Array

    def with_lengths(self, lengths: Array) -> Self: ...


class LanguageModel(Protocol):
    """What generation calls: a `Decoder`, or a module with its methods."""

    def init_cache(self, *args: Any, **kwargs: Any) -> Any: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


Prompt = tuple[Array, Array]  # tokens [batch, length] and lengths [batch], both int32


def checked_net(lm: LanguageModel, where: str) -> Any:
    """A net that can be asked for the next token, in eval mode."""
    if not callable(lm) or not callable(getattr(lm, "init_cache", None)):
        raise InvalidArgumentTypeError(
            "The net has no cache, so it cannot continue a text token by token.",
            where=where,
            got=type(lm).__name__,
            write="pax.nets.Decoder, or a module with init_cache(batch, max_length, dtype=None) "
            "whose call (tokens, cache=cache, lengths=lengths) returns logits and the next cache",
        )
    return enable_eval_mode(lm) if isinstance(lm, Module) else lm


def checked_prompt(
    lm: LanguageModel,
    tokens: Integers,
    lengths: Integers | None,
    where: str,
    mask: Integers | None = None,
) -> Prompt:
    """Returns the tokens of a batch of prompts, and the number of valid ones per row.

    Lists of different lengths are padded. With a mask, valid tokens are moved to the start of their
    row.
    """
    if mask is not None:
        tokens, lengths = _by_mask(_integers(tokens, f"{where}: tokens"), lengths, mask, where)
    if lengths is None and _is_ragged(tokens):
        tokens, lengths = _filled_up([list(row) for row in tokens], where)
    return _whole_prompt(lm, _integers(tokens, f"{where}: tokens"), lengths, where)


def _whole_prompt(lm: LanguageModel, tokens: Array, counts: Integers | None, where: str) -> Prompt:
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise InvalidArgumentError(
            "Prompts must be token ids of shape [batch, length], with at least one token.",
            where=f"{where}: tokens",
            got=f"shape {tokens.shape}",
            write="tokens[None] for one prompt, [tokens] of a list",
        )
    batch, longest = tokens.shape
    counts = np.full(batch, longest, np.int32) if counts is None else counts
    lengths = _integers(counts, f"{where}: lengths")
    if lengths.shape != (batch,):
        raise InvalidArgumentError(
            "lengths must have one length for each row.",
            where=f"{where}: lengths",
            got=f"shape {lengths.shape} for tokens of shape {tokens.shape}",
            write=f"{batch} lengths",
        )
    if not is_tracer(lengths):
        _check_lengths(np.asarray(lengths), longest, where)
    if not is_tracer(tokens) and not is_tracer(lengths):
        check_ids(tokens, lengths, vocabulary_of(lm), f"{where}: tokens")
    return tokens, lengths


def _by_mask(tokens: Array, lengths: Integers | None, rows: Integers, where: str) -> Prompt:
    mask = rows if isinstance(rows, jax.Array) else np.asarray(rows)
    if lengths is not None or mask.shape != tokens.shape or mask.dtype.kind not in "biu":
        raise InvalidArgumentError(
            "A mask marks the valid tokens, instead of lengths.",
            where=f"{where}: mask",
            got=f"{mask.dtype} of shape {mask.shape} for tokens of shape {tokens.shape}"
            + ("" if lengths is None else ", and lengths"),
            write="bool or integers [batch, length], 1 at the tokens that are meant",
        )
    if tokens.ndim != 2:
        return tokens, mask  # which is refused
    if is_tracer(tokens) or is_tracer(mask):
        order = jnp.argsort(mask == 0, axis=1, stable=True)
        tokens = jnp.take_along_axis(jnp.asarray(tokens), order, axis=1)
    else:
        tokens, mask = np.asarray(tokens), np.asarray(mask)
        tokens = np.take_along_axis(tokens, (mask == 0).argsort(axis=1, kind="stable"), axis=1)
    return tokens, (mask != 0).sum(axis=1)


def _is_ragged(tokens: Integers) -> bool:
    rows = tokens if isinstance(tokens, (list, tuple)) else ()
    return bool(rows) and all(isinstance(row, (list, tuple, np.ndarray)) for row in rows)


def _filled_up(rows: list[list[Any]], where: str) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(row) for row in rows], np.int32)
    longest = int(lengths.max())
    if not lengths.all():
        row = int(np.argmin(lengths))
        raise _no_tokens(row, where)
    filled = [row + row[-1:] * (longest - len(row)) for row in rows]
    return _integers(filled, f"{where}: tokens"), lengths


def _no_tokens(row: int, where: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        "A prompt is empty.",
        where=f"{where}: row {row}",
        got="0 tokens",
        write="the token that begins a text, at least",
    )


def _integers(value: Integers, where: str) -> Any:
    """An int32 array; of numpy, unless it is one of jax."""
    try:
        array = value if isinstance(value, (jax.Array, np.ndarray)) else np.asarray(value)
    except (ValueError, OverflowError):  # lists of lists that are not an array
        array = np.array(None)
    if array.size == 0 and not isinstance(value, (jax.Array, np.ndarray)):
        array = array.astype(np.int32)  # numpy makes floats of an empty list
    if array.dtype.kind not in "iu":
        raise InvalidArgumentTypeError(
            "Token ids and lengths must be integers.",
            where=where,
            got=f"{array.dtype}: {value!r:.80}",
            write="tokens.astype(np.int32); tokenizer.encode(text) for each text",
        )
    if is_tracer(array) or isinstance(array, jax.Array):
        return array.astype(jnp.int32)
    if array.size and (array.max() > np.iinfo(np.int32).max or array.min() < -(2**31)):
        raise InvalidArgumentError(
            "Token ids and lengths must fit into int32.", where=where, got=f"up to {array.max()}"
        )
    return array.astype(np.int32)


def _check_lengths(lengths: np.ndarray, longest: int, where: str) -> None:
    if (wrong := np.flatnonzero(lengths == 0)).size:
        raise _no_tokens(int(wrong[0]), where)
    if (wrong := np.flatnonzero((lengths < 0) | (lengths > longest))).size:
        row = int(wrong[0])
        raise InvalidArgumentError(
            "A length is larger than its row, or less than 1.",
            where=f"{where}: lengths[{row}]",
            got=f"{lengths[row]}, where a row has {longest} tokens",
            write=f"how many tokens of the row are meant, from 1 to {longest}",
        )


def vocabulary_of(lm: LanguageModel) -> int | None:
    """Returns the vocabulary size of a net or its configuration, or None."""
    for owner in (lm, getattr(lm, "config", None)):
        size = getattr(owner, "vocab_size", None)
        if isinstance(size, int):
            return size
    return None


def check_vocabulary(stop: Iterable[int], pad: int, size: int, where: str) -> None:
    """Refuses ids that the net never returns; called once the shape of the logits is known."""
    outside = [str(each) for each in stop if not 0 <= each < size]
    if outside or pad >= size:
        raise InvalidArgumentError(
            "An id is not in the vocabulary.",
            where=f"{where}: {'stop' if outside else 'pad'}",
            got=a_few(outside or [str(pad)], 5),
            write=f"ids from 0 to {size - 1}; pad=-1 for none",
        )


def checked_count(value: int | None, name: str, where: str, least: int = 1) -> int:
    """A number of tokens."""
    write = f"{name}=64"
    return checked_integer(value, where, least, what=name, write=write)  # type: ignore[arg-type]


def checked_chunk(value: int | None, where: str) -> int | None:
    """Returns the number of prompt tokens to read at a time; None for all."""
    return None if value is None else checked_count(value, "prefill_chunk", where)


def checked_cache_dtype(value: DTypeLike | None, where: str) -> np.dtype | None:
    """Returns the dtype of a new cache, part of the key of programs; None: the net's own."""
    return None if value is None else cache_dtype(value, where, "cache_dtype")


def checked_pad(value: int, where: str) -> int:
    """The id behind the end of a text; a negative one is none of any vocabulary."""
    return checked_count(value, "pad", where, least=-(2**31))


def checked_sampler(sampler: Sampler, where: str) -> Sampler:
    """Returns the sampler; refuses a sampler class."""
    if isinstance(sampler, Sampler):
        return sampler
    raise InvalidArgumentTypeError(
        "Expected an instance of a sampler.",
        where=f"{where}: sampler",
        got=repr(sampler),
        write="greedy(), or temperature(0.8) | top_p(0.9), of pax_export.generation.samplers",
    )


def row_keys(key: PRNGKey | None, batch: int, sampler: Sampler, where: str) -> jax.Array | None:
    """Returns a random key per row, so rows are independent; None if nothing is drawn.

    A single key is folded with the number of the row; an array of keys is used unchanged.
    """
    if not sampler.draws:
        return None
    if key is None:
        raise InvalidArgumentError(
            "The sampler draws tokens at random and needs a key.",
            where=f"{where}: key",
            got=f"sampler={sampler!r}",
            write=f"key=jax.random.key(0), or sampler={sampler!r} | greedy()",
        )
    is_typed = isinstance(key, jax.Array) and is_key(key.dtype)
    keys = key if is_typed else jax.random.wrap_key_data(jnp.asarray(key))
    if keys.shape == (batch,):
        return keys
    return jax.vmap(jax.random.fold_in, (None, 0))(keys, jnp.arange(batch))


def check_room(
    cache: Cache, lengths: Array, new: int, where: str, max_length: int | None = None
) -> None:
    """Refuses prompts for which a cache has too few rows or positions, if its sizes are known."""
    have, most = getattr(cache, "lengths", None), room_of(cache)
    if have is not None and have.shape != np.shape(lengths):
        raise InvalidArgumentError(
            "The cache has another number of rows than the prompts.",
            where=f"{where}: cache",
            got=f"{np.shape(lengths)[0]} prompts, and a cache of {have.shape[0]} rows",
            write="a prompt for each row of the cache",
        )
    if None not in (most, max_length) and most != max_length:
        raise InvalidArgumentError(
            "The cache has room for another number of tokens.",
            where=f"{where}: max_length",
            got=f"max_length={max_length!r:.80}, and a cache of {most} places",
            write=f"max_length={most}, or none with a cache",
        )
    if most is not None and have is not None and not is_tracer(have):
        check_new_room(most, lengths, new, where, np.asarray(have))


def room_of(cache: Cache) -> int | None:
    """Returns the length of a cache per row; None if it is unknown or unlimited."""
    most = getattr(cache, "max_length", None)
    return int(most) if isinstance(most, int) else None


def check_new_room(
    room: int, lengths: Array, new: int, where: str, have: np.ndarray | None = None
) -> None:
    """Refuses prompts for which a cache has too few places, behind the tokens that it has."""
    if is_tracer(lengths):
        return
    before = np.zeros(len(lengths), int) if have is None else have.astype(int)
    needed = before + np.asarray(lengths) + new
    row = int(np.argmax(needed))
    if needed[row] > room:
        raise InvalidArgumentError(
            "The cache has no room for the text.",
            where=f"{where}: row {row}",
            got=f"max_length={room} for {before[row]} tokens in the cache, {lengths[row]} of the "
            f"prompt and {new} new ones",
            write=f"max_length={needed[row]} for a new cache, a shorter prompt, or fewer new ones",
        )
