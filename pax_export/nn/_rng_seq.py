"""RngSeq: a stream of random keys as a module."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp

from pax_export._errors import InvalidArgumentTypeError
from pax_export.core import StateModule, is_array
from pax_export.nn._arguments import integer, key_or_next


class RngSeq(StateModule):
    """A stream of random keys whose state is part of the module.

    Args:
        seed: the number to start from.
        rng_key: the key to start from; it counts more than ``seed``.  Without
            either, the next key of the ambient stream.

    Attributes:
        _rng_key: the state.  (The name is that of PAX's checkpoints.)

    Raises:
        InvalidArgumentTypeError: (a ValueError) ``rng_key`` is no array, or
            ``seed`` no integer.

    Example:
        >>> import pax_export as pax
        >>> stream = pax.RngSeq(seed=42)
        >>> stream, keys = pax.module_and_value(stream.next_rng_key)(2)
        >>> len(keys)
        2
    """

    rng_attributes = ("_rng_key",)

    def __init__(self, seed: int | None = None, rng_key: Any = None):
        super().__init__()
        if rng_key is None and seed is not None:
            rng_key = _key_of_seed(seed)
        if rng_key is not None and not is_array(rng_key):
            raise InvalidArgumentTypeError(
                "A random key must be an array.",
                where="RngSeq.rng_key",
                got=f"{type(rng_key).__name__}: {rng_key!r}"[:120],
                write="jax.random.key(42), or RngSeq(seed=42)",
            )
        self._rng_key = jnp.asarray(key_or_next(rng_key))

    def next_rng_key(self, num_keys: int = 1) -> Any:
        """Draws keys and advances the state, in train and in eval mode.

        Args:
            num_keys: how many.

        Returns:
            The key itself for 1, else a list of keys.

        Raises:
            ImmutableModuleError: outside of `pure` and `module_and_value`.
            InvalidArgumentError: ``num_keys`` is negative.
        """
        count = integer(num_keys, "RngSeq.next_rng_key.num_keys", least=0)
        state, *keys = jax.random.split(self._rng_key, count + 1)
        self._rng_key = state
        return keys[0] if count == 1 else keys


def _key_of_seed(seed: Any) -> jax.Array:
    try:
        # An array is allowed, so that a seed may be an argument of a jitted function.
        return jax.random.PRNGKey(seed if is_array(seed) else operator.index(seed))
    except TypeError:
        raise InvalidArgumentTypeError(
            "A seed must be an integer.",
            where="RngSeq.seed",
            got=f"{type(seed).__name__}: {seed!r}",
            write="RngSeq(seed=42)",
        ) from None
