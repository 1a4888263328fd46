"""Token streams: one compiled step per token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pax_export.generation._programs import run_prefill, run_step, settled, without_cache
from pax_export.generation._steps import DecodeState, Settings


class Stream(Iterator[np.ndarray]):
    """An iterator of the tokens of a batch of sequences; the result of `generate.stream`.

    Args:
        operands: the net, the prompts, their lengths, a cache or None, keys or None, and numbers
            of the sampler.
        settings: constants of the generation.
        count: the maximum number of tokens.
        room: the length of a new cache.
        dtype: the dtype of a new cache.
        ends: additional stop conditions, by the newest tokens.

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

    def __init__(
        self,
        operands: tuple[Any, ...],
        settings: Settings,
        count: int,
        room: int,
        dtype: Any,
        ends: Callable[[Any, Any], np.ndarray] | None = None,
    ):
        self._lm, *self._prompt = operands
        self._settings, self._room, self._dtype = settings, room, dtype
        self._left, self._ends = count, ends
        self.state: DecodeState | None = None
        self._over = False

    def __next__(self) -> np.ndarray:
        """The next token of each row, int32 ``[batch]``."""
        if self._left == 0 or self._over:
            raise StopIteration
        self._left -= 1
        if self.state is None:
            made = run_prefill(
                self._lm,
                *self._prompt,
                settings=self._settings,
                room=self._room,
                dtype=self._dtype,
            )
        else:
            # Detached first: after an error in between, the arrays are donated and invalid.
            state, self.state = self.state, None
            made = run_step(self._lm, *without_cache(state), settings=self._settings)
        if self._ends is not None:
            made = made._replace(done=self._ends(made.token, made.alive) | np.asarray(made.done))
        self.state = made
        self._over = bool(np.asarray(made.done).all())
        return np.asarray(made.token)

    @property
    def cache(self) -> Any:
        """The cache with the prompts and all tokens so far, for a next turn.

        Before the first token it is the cache passed to the stream. It is a copy of the cache that
        the stream continues to write.
        """
        if self.state is None:
            return self._prompt[2]
        return settled(self._lm, self.state)
