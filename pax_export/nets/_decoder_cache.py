"""DecoderCache: the keys and values of what a language model has read, for each row of a batch.

It is an immutable pytree: a call of `Decoder` gives a new one, and under donation the new one
lies in the memory of the old.  Arrays are preallocated; each row has a length of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


@partial(jax.tree_util.register_dataclass, data_fields=["codes", "scales"], meta_fields=[])
@dataclass(frozen=True)
class Int8Store:
    """Vectors as integers of 8 bits, each with a scale of its own.

    Attributes:
        codes: ``[layers, batch, places, kv_heads, head_size]`` of int8.
        scales: ``[layers, batch, places, kv_heads]`` of float32.

    Example:
        >>> import pax_export as pax
        >>> config = pax.nets.DecoderConfig.llama(
        ...     vocab_size=100, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=32)
        >>> cache = pax.nets.Decoder(config).init_cache(3, max_length=8, dtype="int8")
        >>> cache.keys.codes.dtype.name, cache.keys.scales.shape
        ('int8', (2, 3, 8, 2))
    """

    codes: Any
    scales: Any


Store = Any  # an array [layers, batch, places, kv_heads, head_size], or an Int8Store


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "window_keys", "window_values", "lengths"],
    meta_fields=[],
)
@dataclass(frozen=True)
class DecoderCache:
    """What a `Decoder` has read, made by `Decoder.init_cache`.

    Layers with a sliding window have stores of their own, which hold no more places than the
    window and are written in circles, unless the cache was made with ``rolling=False``.

    Attributes:
        keys: ``[layers, batch, max_length, kv_heads, head_size]``, or an `Int8Store`.
        values: the same.
        window_keys: ``[windowed layers, batch, window, kv_heads, head_size]``, or None.
        window_values: the same.
        lengths: ``[batch]`` of int32: how many tokens of each row it holds.  One above
            `max_length` says that tokens were lost.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> config = pax.nets.DecoderConfig.llama(
        ...     vocab_size=100, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=32)
        >>> lm = pax.nets.Decoder(config)
        >>> cache = lm.init_cache(3, max_length=8)
        >>> _, cache = lm(jnp.ones((3, 4), jnp.int32), cache=cache, lengths=jnp.array([4, 2, 3]))
        >>> cache.lengths.tolist(), cache.keys.shape, cache.overflowed.tolist()
        ([4, 2, 3], (2, 3, 8, 2, 4), [False, False, False])
    """

    keys: Store
    values: Store
    window_keys: Store | None
    window_values: Store | None
    lengths: Any

    @property
    def max_length(self) -> int:
        """How many tokens a row can hold."""
        return _array(self.keys).shape[2]

    @property
    def batch(self) -> int:
        """How many rows it has."""
        return _array(self.keys).shape[1]

    @property
    def overflowed(self) -> jax.Array:
        """``[batch]``: the rows that got more tokens than `max_length`, and lost the last ones."""
        return self.lengths > self.max_length

    @property
    def is_rolling(self) -> bool:
        """Whether layers with a window have stores of their own."""
        return self.window_keys is not None

    def with_lengths(self, lengths: Any) -> DecoderCache:
        """The cache cut to these lengths, ``[batch]``: what is behind them is written over.

        A rolling one has lost what a cut would bring back, so cut only what is not
        `is_rolling`, or to zero.
        """
        return replace(self, lengths=jnp.asarray(lengths, jnp.int32))


def new_store(shape: tuple, dtype: Any) -> Store:
    """A store of zeros; of int8 it has scales."""
    if jnp.dtype(dtype) == jnp.int8:
        return Int8Store(jnp.zeros(shape, jnp.int8), jnp.zeros(shape[:-1], jnp.float32))
    return jnp.zeros(shape, dtype)


def _array(store: Store) -> Any:
    return store.codes if isinstance(store, Int8Store) else store


def places_of(store: Store) -> int:
    """How many places each row of a store has."""
    return _array(store).shape[2]


def read(store: Store, layer: Any, dtype: Any) -> jax.Array:
    """``[batch, places, kv_heads, head_size]``: what a store holds of one layer."""
    take: Callable[[Any], Any] = lambda x: jax.lax.dynamic_index_in_dim(x, layer, 0, False)  # noqa: E731
    if isinstance(store, Int8Store):
        return (take(store.codes).astype(jnp.float32) * take(store.scales)[..., None]).astype(dtype)
    return take(store).astype(dtype)


def write(store: Store, layer: Any, places: Any, vectors: Any) -> Store:
    """The store with vectors of one layer at these places.

    Args:
        store: the store.
        layer: its number.
        places: ``[batch, length]``; a place behind the last is not written.
        vectors: ``[batch, length, kv_heads, head_size]``.
    """
    rows = jax.lax.broadcasted_iota(jnp.int32, places.shape, 0)

    def put(array: Any, values: Any) -> Any:
        at = array.at[layer, rows, places]
        return at.set(values.astype(array.dtype), mode="drop", unique_indices=True)

    if not isinstance(store, Int8Store):
        return put(store, vectors)
    codes, scales = quantised(vectors)
    return Int8Store(put(store.codes, codes), put(store.scales, scales))


def quantised(vectors: Any) -> tuple[jax.Array, jax.Array]:
    """Vectors as int8 and, for each, a scale: its largest value becomes 127."""
    vectors = vectors.astype(jnp.float32)
    scales = jnp.max(jnp.abs(vectors), -1) / 127.0
    codes = jnp.round(vectors / jnp.where(scales == 0, 1.0, scales)[..., None])
    return codes.astype(jnp.int8), scales
