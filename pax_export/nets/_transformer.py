"""Transformer: a stack of causal attention and dense blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pax_export._foundations.check import checked_fraction, checked_integer
from pax_export._foundations.errors import InvalidArgumentError
from pax_export._foundations.types import Array, PRNGKey
from pax_export.core import Module
from pax_export.nn import (
    DenseBlock,
    LayerNorm,
    MultiHeadAttention,
    RngSeq,
    dropout,
    require_boolean_mask,
    require_divisor,
)


class CausalSelfAttention(MultiHeadAttention):
    """Causal self-attention."""

    def __call__(
        self,
        query: Array,
        key: Array | None = None,
        value: Array | None = None,
        mask: Array | None = None,
    ) -> jax.Array:
        """As `MultiHeadAttention`; key and value are the query by default."""
        key = query if key is None else key
        value = query if value is None else value
        visible = _not_after(jnp.shape(query)[-2])
        if mask is not None:
            visible = visible & require_boolean_mask(mask, repr(self))
        return super().__call__(query, key, value, visible)


def _not_after(length: int) -> jax.Array:
    """``[length, length]``: whether the column is not after the row."""
    # Compared indices, not a constant: an export may leave the length open.
    row = jax.lax.broadcasted_iota(jnp.int32, (length, length), 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (length, length), 1)
    return column <= row


class Transformer(Module):
    """A stack of causal attention blocks, each normalized first (Radford et al., 2019).

    ::

        h = h + dropout(attention(attn_layer_norm(h)))      in each layer
        h = h + dropout(dense_block(dense_layer_norm(h)))
        h = layer_norm_output(h)                             at the end

    In train mode with a dropout rate above 0, a call draws ``2 * num_layers`` keys from
    ``rng_seq``, and so requires `pure` or `purecall`.

    Args:
        dim: the size of the input and of the output.
        num_heads: the number of heads; it must divide ``dim``.
        num_layers: the number of layers.
        dropout_rate: the probability of zero in train mode, from 0 to below 1.

    Attributes:
        rng_seq: the keys of dropout, an `RngSeq`.
        layers: for each layer a dict of ``attention`` (a causal
            `MultiHeadAttention`), ``attn_layer_norm``, ``dense_block`` (with
            layers ``fc1`` and ``fc2``) and ``dense_layer_norm``.
        layer_norm_output: the last `LayerNorm`.

    Raises:
        InvalidArgumentError: (an AssertionError too) the heads do not divide
            ``dim``, or an argument is out of its range.
        InvalidArgumentTypeError: a size is not an integer.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> net = pax.nets.Transformer(8, num_heads=2, num_layers=1, dropout_rate=0.1)
        >>> net, y = net % jnp.ones((3, 5, 8))
        >>> net.eval()(jnp.ones((3, 5, 8)), mask=jnp.ones((3, 5), bool)).shape
        (3, 5, 8)
    """

    _pax_changes = "in train mode"

    def __init__(self, dim: int, num_heads: int, num_layers: int, dropout_rate: float):
        super().__init__()
        self.dim = checked_integer(dim, "Transformer.dim", least=1)
        self.num_heads = checked_integer(num_heads, "Transformer.num_heads", least=1)
        self.num_layers = checked_integer(num_layers, "Transformer.num_layers", least=1)
        self.dropout_rate = checked_fraction(
            dropout_rate, "Transformer.dropout_rate", one_allowed=False
        )
        require_divisor(self.num_heads, "heads", self.dim, "channels", "Transformer.num_heads")
        self.rng_seq = RngSeq()
        self.layers = [self._layer() for _ in range(self.num_layers)]
        self.layer_norm_output = _make_norm(self.dim)

    def _layer(self) -> dict[str, Module]:
        # The order is that of the ambient keys.
        key_size, w_init_scale = self.dim // self.num_heads, 2 / self.num_layers
        return {
            "attention": CausalSelfAttention(self.num_heads, key_size, w_init_scale),
            "attn_layer_norm": _make_norm(self.dim),
            "dense_layer_norm": _make_norm(self.dim),
            "dense_block": DenseBlock(self.dim, w_init_scale),
        }

    def __call__(self, h: Array, mask: Array | None = None) -> jax.Array:
        """Applies the network to a batch of sequences.

        Args:
            h: ``[batch, time, dim]``, or ``[time, dim]`` of a single sequence.
            mask: booleans ``[batch, time]``, or ``[time]`` for a single sequence; positions where
                it is False are not attended to.

        Returns:
            The shape of ``h``.

        Raises:
            ImmutableModuleError: in train mode with a dropout rate above 0,
                outside of `pure` and `purecall`.
            InvalidArgumentError: (a ValueError and an AssertionError) another shape.
            InvalidArgumentTypeError: (a TypeError) a mask that is not boolean.
        """
        h = jnp.asarray(h)
        if h.ndim == 2:
            return self._of_a_batch(h[None], mask if mask is None else jnp.asarray(mask)[None])[0]
        return self._of_a_batch(h, mask)

    def _of_a_batch(self, h: jax.Array, mask: Array | None) -> jax.Array:
        self._check(h, mask)
        if mask is not None:
            mask = jnp.asarray(mask)[:, None, None, :]
        keys = self._dropout_keys()
        for layer in self.layers:
            update = layer["attention"](layer["attn_layer_norm"](h), mask=mask)
            h = h + self._dropout(next(keys), update)
            update = layer["dense_block"](layer["dense_layer_norm"](h))
            h = h + self._dropout(next(keys), update)
        return self.layer_norm_output(h)

    def _check(self, h: jax.Array, mask: Array | None) -> None:
        if h.ndim != 3 or h.shape[-1] != self.dim:
            raise InvalidArgumentError(
                f"The input must have shape [batch, time, {self.dim}].",
                where=repr(self),
                got=f"shape {h.shape}",
            )
        shape = (1, 1) if mask is None else jnp.shape(mask)
        if len(shape) != 2 or any(size not in (1, own) for size, own in zip(shape, h.shape)):
            raise InvalidArgumentError(
                "The mask must have shape [batch, time].",
                where=repr(self),
                got=f"shape {shape} for an input of shape {h.shape}",
                write="True for each place that holds something; the causal mask is added",
            )

    def _dropout_keys(self) -> Iterator[Any]:
        """A key for each dropout; None for each if dropout is off."""
        if self.training and self.dropout_rate > 0:
            return iter(self.rng_seq.next_rng_key(2 * len(self.layers)))
        return itertools.repeat(None)

    def _dropout(self, key: PRNGKey, x: jax.Array) -> jax.Array:
        return x if key is None else dropout(key, self.dropout_rate, x)


def _make_norm(dim: int) -> LayerNorm:
    return LayerNorm(dim, -1, True, True)
