"""`generate`: continues prompts in one compiled program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import update_wrapper
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import jax
import numpy as np

from pax_export._foundations.types import DTypeLike, PRNGKey
from pax_export.generation._buckets import BucketSizes, bucket_sizes, cut_columns
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
    checked_pad,
    checked_prompt,
    checked_sampler,
    row_keys,
)
from pax_export.generation._steps import (
    DecodeState,
    GeneratedArrays,
    Settings,
    run_prefill,
    run_step,
    run_to_end,
    settled,
    without_cache,
)
from pax_export.generation._stops import (
    Decodes,
    Stop,
    StringEnds,
    checked_text_ends,
    default_pad,
    default_sampler,
    default_stop,
)
from pax_export.generation.samplers import Sampler


class Generated(NamedTuple):
    """The result of `generate` with ``log_probs`` or ``return_cache``.

    Attributes:
        tokens: ``[batch, max_new_tokens]``, int32, padded after a stop.
        lengths: ``[batch]``, the number of valid tokens per row, including the stop, without -1.
        log_probs: ``[batch, max_new_tokens]``, the net's log-probability of each token, before the
            sampler; None without ``log_probs``.
        cache: the prompts and all new tokens, for a next turn; None without ``return_cache``.

    Example:
        >>> from pax_export.generation import Generated
        >>> Generated._fields
        ('tokens', 'lengths', 'log_probs', 'cache')
    """

    tokens: jax.Array
    lengths: jax.Array
    log_probs: jax.Array | None
    cache: Cache


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


@explain_keywords(KEYWORDS)
def stream(
    lm: LanguageModel,
    tokens: Integers,
    lengths: Integers | None = None,
    *,
    mask: Integers | None = None,
    max_new_tokens: int,
    sampler: Sampler | None = None,
    key: PRNGKey | None = None,
    stop: Stop = None,
    tokenizer: Decodes | None = None,
    pad: int | None = None,
    cache: Cache = None,
    max_length: int | None = None,
    cache_dtype: DTypeLike | None = None,
    prefill_chunk: int | None = None,
) -> Stream:
    """Yields the tokens of `generate` one by one.

    Each step is one call of one compiled program.  The cache is donated to it, so memory holds
    the cache once.

    Args:
        lm: as for `generate`, like all other arguments.
        tokens: see `generate`.
        lengths: see `generate`.
        mask: see `generate`.
        max_new_tokens: see `generate`.
        sampler: see `generate`.
        key: see `generate`.
        stop: see `generate`.
        tokenizer: see `generate`.
        pad: see `generate`.
        cache: see `generate`.
        max_length: see `generate`.
        cache_dtype: see `generate`.
        prefill_chunk: see `generate`.

    Returns:
        An iterator of int32 numpy arrays ``[batch]``, one per token; it ends when all rows have
        ended.  Its attribute `cache` has all tokens so far.

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
    request = make_request(
        "generate.stream", lm, tokens, lengths, mask, max_new_tokens, sampler, key, stop,
        tokenizer, pad, False, cache, max_length, cache_dtype, prefill_chunk,
    )  # fmt: skip
    return Stream(request)


@WithStream.of(stream)
@explain_keywords(KEYWORDS)
def generate(
    lm: LanguageModel,
    tokens: Integers,
    lengths: Integers | None = None,
    *,
    mask: Integers | None = None,
    max_new_tokens: int,
    sampler: Sampler | None = None,
    key: PRNGKey | None = None,
    stop: Stop = None,
    tokenizer: Decodes | None = None,
    pad: int | None = None,
    log_probs: bool = False,
    cache: Cache = None,
    max_length: int | None = None,
    cache_dtype: DTypeLike | None = None,
    prefill_chunk: int | None = None,
    return_cache: bool = False,
) -> Any:
    """Continues each row of a batch of prompts.

    The tokens of a row do not depend on the other rows.  Lengths are rounded up, and the
    parameters of samplers are operands, so prompts of many lengths share a few compiled
    programs; see the guide on language models.  In a function that is itself compiled, sizes are
    not rounded.

    Args:
        lm: a net such as `pax.nets.Decoder`: ``lm.init_cache(batch, max_length, dtype=None)``
            returns an empty cache, and ``lm(tokens, cache=cache, lengths=lengths)`` returns
            logits ``[batch, length, vocabulary]`` and the cache, with ``lengths[row]`` more
            tokens in each row.  It runs in eval mode.
        tokens: ``[batch, length]`` token ids, or a list of lists of any lengths.
        lengths: ``[batch]``, the number of valid tokens per row; default: all.  Later tokens
            are ignored.  Prompts are padded, so the net is always called with lengths.
        mask: ``[batch, length]``, instead of ``lengths``: 1 or True at valid tokens, with
            padding on either side; the `attention_mask` of tokenizers.
        max_new_tokens: the maximum number of new tokens.
        sampler: from `pax_export.generation.samplers`.  The default follows
            ``lm.config.generation`` (of ``generation_config.json``): it draws if that has
            ``do_sample`` and a key is given, and otherwise takes the most likely token.
        key: a random key, or one per row, if the sampler draws.  A single key is folded with
            the number of each row.
        stop: the end of a sequence: a token id, a sequence of ids, a string, or several of
            these.  The token that completes it is the last of its row; only new tokens count.
            Generation ends when all rows have ended.  Strings are checked after each token, as
            in a stream.  The default is ``lm.config.generation.stop``; ``()`` turns it off.
        tokenizer: for strings: a tokenizer of tokenizers or transformers, or any object with
            ``decode(ids, skip_special_tokens=False)``.
        pad: the id of padding after a stop; may be negative.  The default is
            ``lm.config.generation.pad``, or 0.
        log_probs: whether to return log-probabilities, too.
        cache: the cache of earlier calls, which the prompts continue.  It does not change.
        max_length: the length of a new cache; default: as many tokens as this call needs,
            rounded up.  With ``cache``, it must be the length of that cache.
        cache_dtype: the dtype of a new cache; default: the net's.
        prefill_chunk: read the prompts this many tokens at a time, with less memory.
        return_cache: whether to return the cache, too.

    Returns:
        ``[batch, max_new_tokens]``, int32; or a `Generated`, with ``log_probs`` or
        ``return_cache``.  Where logits are NaN, the token is -1, which is in no vocabulary, and
        the row ends.  In a compiled function, where prompts are traced, this also happens to
        rows with invalid tokens or lengths.

    Raises:
        InvalidArgumentError: an empty prompt, a length that does not fit its row, ids outside
            of the vocabulary, no key for a sampler that draws, no room in the cache.  Caches
            do not change then.
        InvalidArgumentTypeError: an argument has the wrong type.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> class Counter(pax.Module):  # its favorite is the token after the last one
        ...     def init_cache(self, batch, max_length, dtype=None):
        ...         return jnp.zeros(batch, jnp.int32)  # this net remembers nothing
        ...
        ...     def __call__(self, tokens, cache, lengths=None):
        ...         return jax.nn.one_hot(tokens + 1, 10), cache
        >>> pax.generate(Counter(), [[1, 2, 3], [5]], max_new_tokens=4, stop=7).tolist()
        [[4, 5, 6, 7], [6, 7, 0, 0]]

    """
    request = make_request(
        "generate", lm, tokens, lengths, mask, max_new_tokens, sampler, key, stop,
        tokenizer, pad, log_probs, cache, max_length, cache_dtype, prefill_chunk,
    )  # fmt: skip
    columns, counts, token_log_probs, state = (
        request.at_once() if request.ends is None else request.by_steps()
    )
    if not log_probs and not return_cache:
        return columns
    new_cache = settled(request.operands[0], state) if return_cache else None
    return Generated(columns, counts, token_log_probs, new_cache)


class GenerationRequest(NamedTuple):
    """The checked arguments of a call."""

    operands: tuple[Any, ...]  # net, tokens, lengths, cache, keys, numbers of the sampler
    settings: Settings
    new: int  # how many tokens at most
    sizes: BucketSizes
    dtype: Any  # of a new cache
    ends: StringEnds | None

    def prefill(self) -> DecodeState:
        """Returns the state after the prompts and the first token."""
        room, dtype = self.sizes.room, self.dtype
        return run_prefill(*self.operands, settings=self.settings, room=room, dtype=dtype)

    def at_once(self) -> GeneratedArrays:
        """Returns all tokens, by two programs."""
        lm, settings, sizes = self.operands[0], self.settings, self.sizes
        tokens, lengths, log_probs, state = run_to_end(
            lm, *without_cache(self.prefill()), sizes.limit, settings=settings, count=sizes.columns
        )
        return cut_columns(tokens, sizes.limit), lengths, cut_columns(log_probs, sizes.limit), state

    def by_steps(self) -> GeneratedArrays:
        """The same token by token, where somebody looks at each."""
        stream, states = Stream(self), []
        state: Any = None
        for _ in stream:
            state = stream.state
            states.append(jax.device_get(state._replace(cache=None, keys=None)))
        behind = self.new - len(states)

        def columns(name: str, fill: float) -> jax.Array:
            stacked = np.stack([getattr(state, name) for state in states], axis=1)
            return jax.device_put(np.pad(stacked, ((0, 0), (0, behind)), constant_values=fill))

        log_probs = columns("log_prob", 0.0) if self.settings.log_probs else None
        lengths = columns("alive", False).sum(axis=1, dtype=np.int32)
        return columns("token", self.settings.pad), lengths, log_probs, state


def make_request(
    where: str,
    lm: LanguageModel,
    tokens: Integers,
    lengths: Integers | None,
    mask: Integers | None,
    max_new_tokens: int,
    sampler: Sampler | None,
    key: PRNGKey | None,
    stop: Stop,
    tokenizer: Decodes | None,
    pad: int | None,
    log_probs: bool,
    cache: Cache,
    max_length: int | None,
    cache_dtype: DTypeLike | None,
    prefill_chunk: int | None,
) -> GenerationRequest:
    """Refuses what cannot be done, before anything is computed."""
    lm = checked_net(lm, where)
    count = checked_count(max_new_tokens, "max_new_tokens", where)
    read, counts = checked_prompt(lm, tokens, lengths, where, mask)
    rule = checked_sampler(default_sampler(sampler, lm, key), where)
    keys = row_keys(key, read.shape[0], rule, where)
    stops = checked_text_ends(default_stop(stop, lm), tokenizer, where)
    batch, ends = read.shape[0], None
    if stops.strings is not None:
        ends = StringEnds(stops.strings, batch, where)
    static, values = rule._split()
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
        check_room(cache, counts, count, where, max_length)
    elif max_length is not None:
        room = checked_count(max_length, "max_length", where)
        check_new_room(room, counts, count, where)
    sizes = bucket_sizes([lm], read, counts, count, cache=cache, room=room, dtype=dtype)
    operands = lm, sizes.tokens, sizes.lengths, cache, keys, values
    return GenerationRequest(operands, settings, count, sizes, dtype, ends)


class Stream(Iterator[np.ndarray]):
    """An iterator of the tokens of a batch of sequences; the result of `generate.stream`.

    Example:
        >>> import jax, jax.numpy as jnp, pax_export as pax
        >>> class Counter(pax.Module):
        ...     def init_cache(self, batch, max_length, dtype=None):
        ...         return jnp.zeros(batch, jnp.int32)
        ...
        ...     def __call__(self, tokens, cache, lengths=None):
        ...         return jax.nn.one_hot(tokens + 1, 10), cache
        >>> stream = pax.generate.stream(Counter(), [[1]], max_new_tokens=2)
        >>> [int(token[0]) for token in stream]
        [2, 3]
    """

    def __init__(self, request: GenerationRequest):
        self._request, self._left = request, request.new
        self.state: DecodeState | None = None

    def __next__(self) -> np.ndarray:
        """The next token of each row, int32 ``[batch]``."""
        if self._left == 0:
            raise StopIteration
        self._left -= 1
        request = self._request
        if self.state is None:
            state = request.prefill()
        else:
            # Detached first: after an error in between, the arrays are donated and invalid.
            old, self.state = self.state, None
            state = run_step(request.operands[0], *without_cache(old), settings=request.settings)
        if request.ends is not None:
            done = request.ends(state.token, state.alive) | np.asarray(state.done)
            state = state._replace(done=done)
        self.state = state
        if np.asarray(state.done).all():
            self._left = 0
        return np.asarray(state.token)

    @property
    def cache(self) -> Any:
        """The cache with the prompts and all tokens so far, for a next turn.

        Before the first token it is the cache passed to the stream. It is a copy of the cache that
        the stream continues to write.
        """
        if self.state is None:
            return self._request.operands[3]
        return settled(self._request.operands[0], self.state)
