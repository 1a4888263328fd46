"""One layer of a Decoder, with and without a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pax_export._foundations.types import Array
from pax_export.core import Module
from pax_export.nets.decoder._config import DecoderConfig
from pax_export.nn import (
    GatedDense,
    GroupedQueryAttention,
    LayerNorm,
    PlainDense,
    RMSNorm,
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


def seen_in_order(places: Any, positions: Any, window: int | None) -> jax.Array:
    """The causal mask ``[batch, 1, length, keys]`` of keys at `places`; negative: empty."""
    keys, queries = places[:, None, None, :], positions[:, None, :, None]
    seen = (keys <= queries) & (keys >= 0)
    return seen if window is None else seen & (keys > queries - window)


def alibi_bias(slopes: Array, places: Array, positions: Array) -> jax.Array:
    """``[batch, heads, length, keys]``: how much less a query sees of distant keys."""
    distance = places[:, None, None, :] - positions[:, None, :, None]
    return jnp.asarray(slopes, jnp.float32)[None, :, None, None] * distance
