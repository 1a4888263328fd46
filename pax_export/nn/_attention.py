"""MultiHeadAttention."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pax_export._check import checked_integer
from pax_export._errors import InvalidArgumentError
from pax_export._types import Array, PyTree
from pax_export.core import Module
from pax_export.nn._arguments import at_least_float32, common_dtype, repr_method
from pax_export.nn._dot_attention import require_boolean_mask
from pax_export.nn._explicit import explicit_mesh, join_specs, spec_of, under_auto_axes
from pax_export.nn._initializers import variance_scaling
from pax_export.nn._linear import Linear

# The logit of a masked key: small enough for a weight of 0, and finite, so that a row whose keys
# are all masked gets a mean and not NaN.
_LOWEST = -1e30


class MultiHeadAttention(Module):
    """Attention with several heads (Vaswani et al., 2017).

    Each head weighs the projected values by ``softmax(query · key / sqrt(key_size))``.

    Args:
        num_heads: the number of heads.
        key_size: the size of query, key and value of one head.
        w_init_scale: the initial weights have variance ``w_init_scale / model_size``.

    Attributes:
        value_size: equal to ``key_size``.
        model_size: ``num_heads * key_size``.
        query_projection: a `Linear` of width ``model_size``.
        key_projection: the same.
        value_projection: the same.
        output_projection: the same.

    Raises:
        InvalidArgumentError: a size is less than one.
        InvalidArgumentTypeError: a size is not an integer.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> attention = pax.MultiHeadAttention(2, 4)
        >>> x = jnp.ones((3, 5, 8))
        >>> attention(x, x, x).shape
        (3, 5, 8)
    """

    axes_of_layers: ClassVar = {
        "query_projection": {"in": "embed", "out": "heads"},
        "key_projection": {"in": "embed", "out": "heads"},
        "value_projection": {"in": "embed", "out": "heads"},
        "output_projection": {"in": "heads", "out": "embed"},
    }

    def __init__(self, num_heads: int, key_size: int, w_init_scale: float = 1.0):
        super().__init__()
        where = type(self).__name__
        self.num_heads = checked_integer(num_heads, f"{where}.num_heads", least=1)
        self.key_size = checked_integer(key_size, f"{where}.key_size", least=1)
        self.value_size = self.key_size
        self.model_size = self.num_heads * self.key_size
        w_init = variance_scaling(w_init_scale)
        size = self.model_size
        self.query_projection = Linear(size, size, w_init=w_init, name="qry_proj")
        self.key_projection = Linear(size, size, w_init=w_init, name="key_proj")
        self.value_projection = Linear(size, size, w_init=w_init, name="val_proj")
        self.output_projection = Linear(size, size, w_init=w_init, name="out_proj")

    def __call__(self, query: Any, key: Any, value: Any, mask: Array | None = None) -> jax.Array:
        """Attends from each query to the values of all keys.

        Logits and softmax are computed in float32 at least, under any mixed-precision policy.

        Args:
            query: ``[..., t, model_size]``.
            key: ``[..., T, model_size]``.
            value: ``[..., T, model_size]``.
            mask: booleans that broadcast to ``[..., num_heads, t, T]``; where it is False, a query
                does not attend to a key.  A query whose keys are all masked gets the mean of all
                values.

        Returns:
            ``[..., t, model_size]``.

        Raises:
            InvalidArgumentError: (a ValueError) the shape of the mask does not broadcast.
            InvalidArgumentTypeError: (a TypeError) another width than `model_size`, or a mask that
                is not boolean.
        """
        if mask is not None:
            mask = require_boolean_mask(mask, repr(self))
        query = self.query_projection(query)
        key = self.key_projection(key)
        value = self.value_projection(value)

        def attended(query: Any, key: PyTree, value: Any, mask: Any) -> jax.Array:
            query_heads, key_heads, value_heads = map(self._heads, (query, key, value))
            weights = self._weights(query_heads, key_heads, mask).astype(value_heads.dtype)
            heads = jnp.einsum("...htT,...Thd->...thd", weights, value_heads)
            return heads.reshape((*heads.shape[:-2], self.model_size))

        if explicit_mesh(query, key, value) is None:
            return self.output_projection(attended(query, key, value, mask))
        # By jax's rules heads would have to be split as channels are, mask and all.
        operands = (query, key, value, mask)
        found = under_auto_axes(attended, operands, lambda: join_specs(*spec_of(query)))
        return self.output_projection(found)

    def _heads(self, x: jax.Array) -> jax.Array:
        """``[..., t, model_size]`` as ``[..., t, num_heads, key_size]``."""
        return x.reshape((*x.shape[:-1], self.num_heads, self.key_size))

    def _weights(self, query: jax.Array, key: jax.Array, mask: Array | None) -> jax.Array:
        """``[..., num_heads, t, T]``: how much each query takes of each value."""
        dtype = at_least_float32(common_dtype(query, key))
        logits = jnp.einsum("...thd,...Thd->...htT", query, key, preferred_element_type=dtype)
        logits = logits / math.sqrt(self.key_size)
        if mask is not None:
            logits = _mask_logits(logits, mask, repr(self))
        return jax.nn.softmax(logits)

    _repr = repr_method("num_heads", "key_size")


def _mask_logits(logits: jax.Array, mask: Array, where: str) -> jax.Array:
    """The logits, very low where the mask is False or 0."""
    try:
        return jnp.where(mask, logits, _LOWEST)
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            "The mask must broadcast to [..., num_heads, t, T].",
            where=where,
            got=f"shape {jnp.shape(mask)} for {logits.shape}",
            write="mask[:, None, None, :] for a mask [batch, T] of the keys",
        ) from None
