"""`generate`: continues prompts in one compiled program."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import jax
import numpy as np

from pax_export._types import Array, PRNGKey, PyTree
from pax_export.core import explained
from pax_export.generation._buckets import BucketSizes, cut, sized
from pax_export.generation._defaults import default_pad, default_sampler, default_stop
from pax_export.generation._foreign_keywords import KEYWORDS
from pax_export.generation._programs import Made, begun, finished, settled, without_cache
from pax_export.generation._prompt import (
    check_new_room,
    check_room,
    checked_cache_dtype,
    checked_chunk,
    checked_count,
    checked_net,
    checked_pad,
    checked_prompt,
    checked_sampler,
    row_keys,
)
from pax_export.generation._steps import Settings
from pax_export.generation._stops import Stop, StringEnds, checked_text_ends
from pax_export.generation._stream import Stream
from pax_export.generation.samplers import Sampler


class Generated(NamedTuple):
    """What `generate` gives if more than tokens is asked for.

    Attributes:
        tokens: ``[batch, max_new_tokens]``, int32, padded after a stop.
        lengths: ``[batch]``, how many tokens of each row are meant, the stop among them and -1
            not.
        log_probs: ``[batch, max_new_tokens]``, the logarithm of the probability that the net
            itself gave to each token, before the sampler; None unless asked for.
        cache: the prompts and all new tokens, for a next turn; None unless asked for.

    Example:
        >>> from pax_export.generation import Generated
        >>> Generated._fields
        ('tokens', 'lengths', 'log_probs', 'cache')
    """

    tokens: jax.Array
    lengths: jax.Array
    log_probs: jax.Array | None
    cache: PyTree


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


class WithStream(Generic[P, R, S]):
    """A function that has a second one, `stream`, as an attribute that type checkers see."""

    def __init__(self, function: Callable[P, R], stream: S):
        self._function = function
        self.stream = stream
        update_wrapper(self, function)

    @classmethod
    def of(cls, stream: S) -> Callable[[Callable[P, R]], WithStream[P, R, S]]:
        """A decorator."""
        return lambda function: cls(function, stream)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._function(*args, **kwargs)

    def __repr__(self) -> str:
        return repr(self._function)

    def __reduce__(self) -> str:
        return self._function.__name__


@explained(KEYWORDS)
def stream(
    lm: PyTree,
    tokens: Array,
    lengths: Array | None = None,
    *,
    mask: Array | None = None,
    max_new_tokens: int,
    sampler: Sampler | None = None,
    key: PRNGKey | None = None,
    stop: Stop = None,
    tokenizer: object = None,
    pad: int | None = None,
    cache: object = None,
    max_length: int | None = None,
    cache_dtype: object = None,
    prefill_chunk: int | None = None,
) -> Stream:
    """The tokens of `generate` as they come.

    Each step is one call of one compiled program, which is given the cache to write
    into (it is donated): memory holds it once.

    Args:
        lm: as for `generate`, as all that follows.
        tokens: see there.
        lengths: see there.
        mask: see there.
        max_new_tokens: see there.
        sampler: see there.
        key: see there.
        stop: see there.
        tokenizer: see there.
        pad: see there.
        cache: see there.
        max_length: see there.
        cache_dtype: see there.
        prefill_chunk: see there.

    Returns:
        An iterator of arrays ``[batch]``, int32 of numpy, one for each token, which ends
        when all rows have ended.  Its `cache` is that of all texts so far.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> class Counter(pax.Module):
        ...     def init_cache(self, batch, max_length, dtype=None):
        ...         return jnp.zeros(batch, jnp.int32)
        ...
        ...     def __call__(self, tokens, cache, lengths=None):
        ...         return jax.nn.one_hot(tokens + 1, 10), cache
        >>> for (token,) in pax.generate.stream(Counter(), [[1]], max_new_tokens=3):
        ...     print(token)
        2
        3
        4
    """
    given = request(
        "generate.stream", lm, tokens, lengths, mask, max_new_tokens, sampler, key, stop,
        tokenizer, pad, False, cache, max_length, cache_dtype, prefill_chunk,
    )  # fmt: skip
    return given.stream()


@WithStream.of(stream)
@explained(KEYWORDS)
def generate(
    lm: PyTree,
    tokens: Array,
    lengths: Array | None = None,
    *,
    mask: Array | None = None,
    max_new_tokens: int,
    sampler: Sampler | None = None,
    key: PRNGKey | None = None,
    stop: Stop = None,
    tokenizer: object = None,
    pad: int | None = None,
    log_probs: bool = False,
    cache: object = None,
    max_length: int | None = None,
    cache_dtype: object = None,
    prefill_chunk: int | None = None,
    return_cache: bool = False,
) -> Any:
    """Continues each row of a batch of prompts.

    A row gives the tokens that it gives alone, however long the others are.  Lengths
    are rounded up and the numbers of samplers are operands, so texts of many lengths
    share a few compiled programs: the guide on language models says what compiles
    when.  In a function that is compiled, sizes are as they are.

    Args:
        lm: a net as `pax.nets.Decoder` is one: ``lm.init_cache(batch, max_length,
            dtype=None)`` makes an empty cache, and ``lm(tokens, cache=cache,
            lengths=lengths)`` gives logits ``[batch, length, vocabulary]`` and the
            cache with ``lengths[row]`` tokens more in each row.  It runs in eval mode.
        tokens: ``[batch, length]`` token ids, or a list of lists of any lengths.
        lengths: ``[batch]``, how many tokens of each row are meant; all by default.
            What stands behind may be anything.  Prompts are filled up, so a net is always
            given lengths that it has to heed.
        mask: ``[batch, length]``, in place of lengths: 1 or True at the tokens that are meant,
            on whichever side padding is; `attention_mask` of tokenizers.
        max_new_tokens: how many tokens to choose at most.
        sampler: how; of `pax_export.generation.samplers`.  By default, as ``lm.config.generation``
            says (of ``generation_config.json``): drawn if it has ``do_sample`` and there is a
            key; the likeliest tokens, otherwise.
        key: a random key, or one for each row, if the sampler draws.  Of one key each
            row folds in its number.
        stop: what ends a text, or several such things: the id of a token, a sequence
            of ids, a string.  The token with which it is complete is the last of its row;
            new tokens alone count.  When all rows have ended, the rest is not computed.
            For strings, each token is looked at as in a stream.  By default
            ``lm.config.generation.stop``; ``()`` for nothing.
        tokenizer: for strings: one of tokenizers or transformers, or anything with
            ``decode(ids, skip_special_tokens=False)``.
        pad: the id that stands behind it; negative for none of the vocabulary.  By default
            ``lm.config.generation.pad``, or 0.
        log_probs: whether to give log-probabilities, too.
        cache: texts that were read before; the prompts continue these.  It stays
            as it is.
        max_length: how many tokens a new cache has room for; by default as many as
            this call needs, rounded up; of ``cache``, if there is one, no other number.
        cache_dtype: of a new cache, if not the net's.
        prefill_chunk: read the prompts so many tokens at a time, with less memory.
        return_cache: whether to give the cache, too.

    Returns:
        ``[batch, max_new_tokens]``, int32; or a `Generated`, if log-probabilities or
        the cache are asked for.  Where the logits of the net are NaN, a row has the
        token -1, which no vocabulary has, and ends.  In a compiled function, where
        prompts are not known, so does a row of which `Decoder` can make no logits, or
        whose length is not from 1 to that of the prompts.

    Raises:
        InvalidArgumentError: an empty prompt, a length that is not that of its row,
            ids outside of the vocabulary, no key for a sampler that draws, no room
            in the cache.  All caches are then as they were.
        InvalidArgumentTypeError: an argument is of another kind.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> class Counter(pax.Module):  # its favourite is the token after the last one
        ...     def init_cache(self, batch, max_length, dtype=None):
        ...         return jnp.zeros(batch, jnp.int32)  # this net remembers nothing
        ...
        ...     def __call__(self, tokens, cache, lengths=None):
        ...         return jax.nn.one_hot(tokens + 1, 10), cache
        >>> pax.generate(Counter(), [[1, 2, 3], [5]], max_new_tokens=4, stop=7).tolist()
        [[4, 5, 6, 7], [6, 7, 0, 0]]
    """
    given = request(
        "generate", lm, tokens, lengths, mask, max_new_tokens, sampler, key, stop,
        tokenizer, pad, log_probs, cache, max_length, cache_dtype, prefill_chunk,
    )  # fmt: skip
    columns, made, said, state = given.at_once() if given.ends is None else given.by_steps()
    if not log_probs and not return_cache:
        return columns
    kept = settled(given.operands[0], state) if return_cache else None
    return Generated(columns, made, said, kept)


class GenerationRequest(NamedTuple):
    """What a caller wants, looked at."""

    operands: tuple[Any, ...]  # net, tokens, lengths, cache, keys, numbers of the sampler
    settings: Settings
    new: int  # how many tokens at most
    sizes: BucketSizes
    dtype: Any  # of a new cache
    ends: StringEnds | None

    def stream(self) -> Stream:
        return Stream(
            self.operands, self.settings, self.new, self.sizes.room, self.dtype, self.ends
        )

    def at_once(self) -> Made:
        """All tokens, by two programs."""
        lm, settings, sizes = self.operands[0], self.settings, self.sizes
        state = begun(*self.operands, settings=settings, room=sizes.room, dtype=self.dtype)
        tokens, lengths, said, state = finished(
            lm, *without_cache(state), sizes.limit, settings=settings, count=sizes.places
        )
        return cut(tokens, sizes.limit), lengths, cut(said, sizes.limit), state

    def by_steps(self) -> Made:
        """The same token by token, where somebody looks at each."""
        stream, states = self.stream(), []
        state: PyTree = None
        for _ in stream:
            state = stream.state
            states.append(jax.device_get(state._replace(cache=None, keys=None)))
        behind = self.new - len(states)

        def columns(name: str, fill: PyTree) -> jax.Array:
            made = np.stack([getattr(state, name) for state in states], axis=1)
            return jax.device_put(np.pad(made, ((0, 0), (0, behind)), constant_values=fill))

        said = columns("log_prob", 0.0) if self.settings.log_probs else None
        lengths = columns("alive", False).sum(axis=1, dtype=np.int32)
        return columns("token", self.settings.pad), lengths, said, state


def request(
    where: str,
    lm: PyTree,
    tokens: Array,
    lengths: Array | None,
    mask: Array | None,
    max_new_tokens: int,
    sampler: object,
    key: PRNGKey | None,
    stop: object,
    tokenizer: object,
    pad: object,
    log_probs: bool,
    cache: object,
    max_length: int | None,
    cache_dtype: object,
    prefill_chunk: int | None,
) -> GenerationRequest:
    """Refuses what cannot be done, before anything is computed."""
    lm = checked_net(lm, where)
    count = checked_count(max_new_tokens, "max_new_tokens", where)
    tokens, lengths = checked_prompt(lm, tokens, lengths, where, mask)
    sampler = checked_sampler(default_sampler(sampler, lm, key), where)
    keys = row_keys(key, tokens.shape[0], sampler, where)
    stops = checked_text_ends(default_stop(stop, lm), tokenizer, where)
    batch, ends = tokens.shape[0], None
    if stops.strings is not None:
        ends = StringEnds(stops.strings, batch, where)
    static, values = sampler._split()
    settings = Settings(
        static,
        stops.ids,
        stops.sequences,
        checked_pad(default_pad(pad, lm), where),
        bool(log_probs),
        checked_chunk(prefill_chunk, where),
        where,
    )
    dtype = checked_cache_dtype(cache_dtype, where)
    room = None
    if cache is not None:
        check_room(cache, lengths, count, where, max_length)
    elif max_length is not None:
        room = checked_count(max_length, "max_length", where)
        check_new_room(room, lengths, count, where)
    sizes = sized([lm], tokens, lengths, count, cache=cache, room=room, dtype=dtype)
    operands = lm, sizes.tokens, sizes.lengths, cache, keys, values
    return GenerationRequest(operands, settings, count, sizes, dtype, ends)
