"""One layer of a Decoder, and the attention of one call, alone or over a cache or other stores.

Positions, angles and masks are the same in all layers and are computed once, before the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pax_export._foundations.types import Array
from pax_export.core import Module
from pax_export.nets.decoder._cache import DecoderCache, places_of, read_store, write_store
from pax_export.nets.decoder._config import DecoderConfig
from pax_export.nets.decoder._fields import LayerKind
from pax_export.nn import (
    GatedDense,
    GroupedQueryAttention,
    LayerNorm,
    PlainDense,
    RMSNorm,
    RotaryScaling,
    alibi_slopes,
    rotary_angles,
    rotary_frequencies,
    variance_scaling,
)

Attend = Callable[[GroupedQueryAttention, Any], jax.Array]


def norm_of(config: DecoderConfig) -> Module:
    """A norm of hidden vectors."""
    if config.norm == "layer":
        return LayerNorm(config.dim, eps=config.norm_eps)
    return RMSNorm(config.dim, config.norm_eps, config.norm_offset)


class DecoderLayer(Module):
    """Attention and an MLP, each with a norm before it and a residual connection.

    All layers of a net have equal treedefs, so that they can be stacked; settings that differ
    (windows, bases of rotary embeddings) are passed to the call.

    Attributes:
        attention_norm: the norm before `attention`, if the configuration has ``pre_norms``.
        attention: a `GroupedQueryAttention`.
        attention_post_norm: the norm after it, if the configuration has ``post_norms``.
        dense_norm: the norm before `dense`, if the configuration has ``pre_norms``.
        dense: a `GatedDense`, or two layers ``up`` and ``down``.
        dense_post_norm: the norm after it, if the configuration has ``post_norms``.

    Example:
        >>> import pax_export as pax
        >>> config = pax.nets.DecoderConfig.llama(
        ...     vocab_size=100, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=32)
        >>> layer = pax.nets.Decoder(config, layers="listed").layers[0]
        >>> type(layer).__name__, layer.attention.key.weight.shape
        ('DecoderLayer', (16, 8))
    """

    def __init__(self, config: DecoderConfig):
        super().__init__()
        # The variance added to the residual stream stays that of one layer, as in GPT-2.
        w_init = variance_scaling(1.0)
        if config.pre_norms:
            self.attention_norm = norm_of(config)
        self.attention = GroupedQueryAttention(
            config.dim, config.num_heads, config.num_kv_heads, config.head_size,
            with_bias=config.projection_bias, output_bias=config.output_bias,
            query_key_norm=config.norm_eps if config.query_key_norm else None,
            norm_offset=config.norm_offset, norm_per_head=config.norm_per_head,
            softcap=config.attention_softcap,
            scale=config.attention_scale, implementation=config.implementation, w_init=w_init,
        )  # fmt: skip
        self._heads_size = config.num_heads * config.head_size
        if config.pre_norms:
            self.dense_norm = norm_of(config)
        dense = GatedDense if config.gated else PlainDense
        self.dense = dense(
            config.dim, config.hidden_dim, config.activation, config.dense_bias, w_init
        )
        self.pre_norms, self.post_norms = config.pre_norms, config.post_norms
        self.residual_scale = config.residual_scale
        if config.post_norms:
            self.attention_post_norm, self.dense_post_norm = norm_of(config), norm_of(config)

    def __call__(self, h: jax.Array, attend: Attend) -> jax.Array:
        """Applies the layer.

        Args:
            h: ``[batch, length, dim]``.
            attend: a function of the attention layer and its input that returns the heads,
                ``[batch, length, num_heads, head_size]``.

        Returns:
            ``[batch, length, dim]``.
        """
        heads = attend(self.attention, self.attention_norm(h) if self.pre_norms else h)
        update = self.attention.output(heads.reshape((*h.shape[:2], self._heads_size)))
        h = h + self._scaled(self.attention_post_norm(update) if self.post_norms else update)
        update = self.dense(self.dense_norm(h) if self.pre_norms else h)
        return h + self._scaled(self.dense_post_norm(update) if self.post_norms else update)

    def _scaled(self, update: jax.Array) -> jax.Array:
        return update if self.residual_scale == 1.0 else update * self.residual_scale


# --- what a layer attends to ----------------------------------------------------------------

Stores = tuple  # keys, values, window_keys, window_values of a cache; empty without one


class UncachedCall:
    """A call without a cache; `positions` are ``[batch or 1, length]``."""

    def __init__(self, config: DecoderConfig, positions: Array):
        self.config, self.positions = config, positions
        self._angles: dict[tuple, Any] = {}
        self._kept: dict[Any, Any] = {}
        for kind in config.kinds:  # before the loop, not in it
            self.angles(kind)
        self._own_bias = self.bias(positions)

    def angles(self, kind: LayerKind) -> Any:
        """Returns the cosines and sines for a kind of layers, or None without rotary embedding."""
        config = self.config
        base = config.rotary_base if kind.rotary_base is None else kind.rotary_base
        if config.positions != "rotary" or base == 0:
            return None
        scaling = config.rotary_scaling if kind.scaled else None
        if (base, scaling) not in self._angles:
            factor = 1.0 if scaling is None else scaling.result_factor
            frequencies = self._frequencies(base, scaling)
            self._angles[base, scaling] = rotary_angles(self.positions, frequencies, factor)
        return self._angles[base, scaling]

    def _frequencies(self, base: float, scaling: RotaryScaling | None) -> Any:
        room, size = self.room, self.config.rotary_size or self.config.head_size
        if scaling is None or scaling.kind != "longrope":
            return rotary_frequencies(size, base, scaling)
        if isinstance(room, int):
            return rotary_frequencies(size, base, scaling.for_length(room))
        most = scaling.original_length or 0
        short, long = (
            rotary_frequencies(size, base, scaling.for_length(each)).astype(np.float32)
            for each in (most, most + 1)
        )
        return jnp.where(jnp.asarray(room) > most, long, short)  # a symbolic size

    @property
    def room(self) -> Any:
        """The length of the context: the number of tokens, or the capacity of a cache."""
        return self.positions.shape[1]

    def not_read(self, tokens: Array, counts: Array) -> jax.Array:
        """``[batch]``: rows with a token outside of the vocabulary, or without a position.

        Args:
            tokens: ``[batch, length]``.
            counts: ``[batch]``: the number of valid tokens per row.
        """
        ids = tokens.astype(jnp.promote_types(tokens.dtype, jnp.int32))
        outside = (ids < 0) | (ids >= self.config.vocab_size) | self._has_no_place()
        steps = jax.lax.broadcasted_iota(jnp.int32, tokens.shape, 1)
        return jnp.any(outside & (steps < counts[:, None]), axis=1)

    def _has_no_place(self) -> Any:
        if self.config.positions != "learned":
            return False
        return self.positions >= self.config.max_positions

    def after(self, stores: Stores, counts: Array) -> DecoderCache | None:
        """Returns the cache after the call, or None."""
        return None

    def rolls(self, kind: LayerKind) -> bool:
        """Whether layers of a kind have stores that are written in circles."""
        return False

    def projected(self, attention: GroupedQueryAttention, x: Array, kind: LayerKind) -> tuple:
        """Queries, keys and values of a layer."""
        return attention.project(x, self.angles(kind), self.config.rotary_pairing)

    def bias(self, places: Array) -> Any:
        """Returns the bias added to the logits for keys at these positions, or None."""
        if self.config.positions != "alibi":
            return None
        return alibi_bias(alibi_slopes(self.config.num_heads), places, self.positions)

    def attend(
        self,
        attention: GroupedQueryAttention,
        x: Array,
        kind: LayerKind,
        index: int | Array,
        stores: Stores,
    ) -> tuple:
        """The heads of layer `index` of its kind, and the updated stores."""
        query, key, value = self.projected(attention, x, kind)
        options = {"bias": self._own_bias, "is_causal": True, "window": kind.window}
        return attention.attend(query, key, value, **options), stores


class CachedReading(UncachedCall):
    """A call that appends ``counts[row]`` of `length` tokens to each row of a cache."""

    def __init__(self, config: DecoderConfig, cache: DecoderCache, counts: Array, length: int):
        steps = jnp.arange(length, dtype=jnp.int32)[None, :]
        self.start, self.cache = cache.lengths[:, None], cache
        self._is_step = isinstance(length, int) and length == 1  # of one token a row
        super().__init__(config, self.start + steps)
        counts = counts[:, None]
        self.counted = steps < counts
        self._last = steps >= counts - (
            places_of(cache.window_keys) if cache.window_keys is not None else 0
        )
        for kind in config.kinds:
            self._seen(kind)
        ends = jnp.where(counts > 0, self.start + counts, 0)
        self._filled = FilledPlaces(cache.max_length, jnp.max(ends, initial=0))

    @property
    def room(self) -> Any:
        return self.cache.max_length

    def _has_no_place(self) -> Any:
        # A length that a server made up may be negative.
        outside = (self.positions < 0) | (self.positions >= self.cache.max_length)
        return outside | super()._has_no_place()

    def after(self, stores: Stores, counts: Array) -> DecoderCache:
        keys, values, window_keys, window_values = stores
        return replace(
            self.cache, keys=keys, values=values, window_keys=window_keys,
            window_values=window_values, lengths=self.cache.lengths + counts,
        )  # fmt: skip

    def rolls(self, kind: LayerKind) -> bool:
        return kind.window is not None and self.cache.is_rolling

    def attend(
        self,
        attention: GroupedQueryAttention,
        x: Array,
        kind: LayerKind,
        index: int | Array,
        stores: Stores,
    ) -> tuple:
        query, key, value = self.projected(attention, x, kind)
        first = 2 if self.rolls(kind) else 0
        pair = stores[first : first + 2]
        places, mask, bias = self._seen(kind)
        # In a ring buffer, later tokens of the call may overwrite keys that earlier ones attend to.
        several = self.rolls(kind) and not self._is_step
        seen = [read_store(store, index, query.dtype) for store in pair] if several else []
        pair = tuple([write_store(s, index, places, new) for s, new in zip(pair, (key, value))])

        def heads_of(count: int | None) -> jax.Array:
            """The heads over the first ``count`` places of the stores; None is all."""
            seen = [read_store(store, index, query.dtype, count) for store in pair]
            own_bias = bias if bias is None else bias[..., :count]
            return attention.attend(query, *seen, mask=mask[..., :count], bias=own_bias)

        if several:
            seen = [jnp.concatenate(both, 1) for both in zip(seen, (key, value))]
            heads = attention.attend(query, *seen, mask=mask, bias=bias)
        else:
            heads = heads_of(None) if self.rolls(kind) else self._filled.attended(heads_of)
        return heads, (*stores[:first], *pair, *stores[first + 2 :])

    def _seen(self, kind: LayerKind) -> tuple:
        """Returns the places of the tokens, the mask of the keys, and the bias of the logits."""
        rolls = self.rolls(kind)
        entry = ("rolling",) if rolls else ("whole", kind.window)
        if entry not in self._kept:
            places, keys = self._in_a_circle() if rolls else self._in_order()
            mask = seen_in_order(keys, self.positions, kind.window)
            self._kept[entry] = places, mask, self.bias(keys)
        return self._kept[entry]

    def _in_order(self) -> tuple[Array, Array]:
        """The places in the store to which tokens are written, and the positions of its keys."""
        size = self.cache.max_length
        places = jnp.where(self.counted, self.positions, size)
        return places, jnp.arange(size, dtype=jnp.int32)[None, :]

    def _in_a_circle(self) -> tuple[Array, Array]:
        """The same of a ring buffer, behind whose keys are those of a call of several tokens."""
        size = places_of(self.cache.window_keys)
        places = jnp.where(self.counted & self._last, self.positions % size, size)
        slots = jnp.arange(size, dtype=jnp.int32)[None, :]
        # A slot has the last position written to it; negative: empty.
        newest = self.positions if self._is_step else self.start - 1
        keys = newest - (newest - slots) % size
        if not self._is_step:
            keys = jnp.concatenate((keys, self.positions), 1)
        return places, keys


#: Writes new vectors into the store of one layer, ``[batch, kv_heads, places, head_size]``.
Put = Callable[[Any, Any], Any]


class PlacedReading(UncachedCall):
    """A call that writes keys and values to each layer's stores, then attends to all of them.

    Args:
        config: the configuration of the net.
        positions: the positions of the tokens, ``[batch, length]``.
        in_stores: the positions in the stores after the call, ``[batch, places]``; negative: empty.
        put: writes new vectors to a store, both ``[batch, kv_heads, places, head_size]``.
    """

    def __init__(self, config: DecoderConfig, positions: Array, in_stores: Array, put: Put):
        self.in_stores, self.put = in_stores, put
        super().__init__(config, positions)

    @property
    def room(self) -> Any:
        return self.in_stores.shape[1]

    def attend(
        self,
        attention: GroupedQueryAttention,
        x: Array,
        kind: LayerKind,
        index: int | Array,
        stores: Stores,
    ) -> tuple:
        heads, pair = self.attend_layer(attention, x, kind, [each[index] for each in stores])
        changed = [(*all[:index], own, *all[index + 1 :]) for all, own in zip(stores, pair)]
        return heads, tuple(changed)

    def attend_layer(
        self, attention: GroupedQueryAttention, x: Array, kind: LayerKind, pair: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]]:
        """The heads of a layer with these keys and values, and both with the new ones."""
        query, *new = self.projected(attention, x, kind)
        pair = [self.put(store, each.swapaxes(1, 2)) for store, each in zip(pair, new)]
        mask, bias = self.seen(kind)
        seen = [each.swapaxes(1, 2).astype(query.dtype) for each in pair]
        return attention.attend(query, *seen, mask=mask, bias=bias), pair

    def seen(self, kind: LayerKind) -> tuple:
        """The mask of the keys for a kind of layers, and the bias of their logits."""
        if kind.window not in self._kept:
            mask = seen_in_order(self.in_stores, self.positions, kind.window)
            self._kept[kind.window] = mask, self.bias(self.in_stores)
        return self._kept[kind.window]


# --- masks ------------------------------------------------------------------------------------


def seen_in_order(places: Array, positions: Array, window: int | None) -> Array:
    """The causal mask ``[batch, 1, length, keys]`` of keys at `places`; negative: empty."""
    keys, queries = places[:, None, None, :], positions[:, None, :, None]
    seen = (keys <= queries) & (keys >= 0)
    return seen if window is None else seen & (keys > queries - window)


def alibi_bias(slopes: Array, places: Array, positions: Array) -> jax.Array:
    """``[batch, heads, length, keys]``: how much less a query sees of distant keys."""
    distance = places[:, None, None, :] - positions[:, None, :, None]
    return jnp.asarray(slopes, jnp.float32)[None, :, None, None] * distance


#: Fractions of the length that are compiled in addition to the whole: a quarter and a half.
_PARTS = (4, 2)
#: Fewer places are attended to in a moment, and a program of their own is not worth its compiling.
_LEAST = 128


class FilledPlaces:
    """Prefixes of a cache of size `room` that contain all `filled` places.

    XLA's shapes are fixed, so each prefix is a program; a call takes the shortest of up to three.
    """

    def __init__(self, room: int, filled: Array):
        self.parts = parts_of(room)
        passed = [filled > count for count in self.parts]
        self._chosen = sum(passed, jnp.zeros((), jnp.int32))

    def attended(self, attend: Callable[[int | None], jax.Array]) -> jax.Array:
        """Returns ``attend(count)`` for the first ``count`` positions; None: all positions."""
        if not self.parts:
            return attend(None)
        branches = [lambda count=count: attend(count) for count in (*self.parts, None)]
        return jax.lax.platform_dependent(
            cpu=lambda: jax.lax.switch(self._chosen, branches), default=branches[-1]
        )


def parts_of(room: int) -> tuple[int, ...]:
    """Returns the lengths for which attention is compiled besides the whole, in ascending order."""
    if not isinstance(room, int):
        return ()
    return tuple(room // part for part in _PARTS if room // part >= _LEAST)
