"""Attention layers: MultiHeadAttention and GroupedQueryAttention."""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pax_export._foundations.check import (
    checked_choice,
    checked_float,
    checked_integer,
    checked_positive,
)
from pax_export._foundations.errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export._foundations.types import Array, PyTree
from pax_export.core import Module
from pax_export.nn import _arguments as arg
from pax_export.nn._arguments import (
    Initializer,
    at_least_float32,
    common_dtype,
    repr_method,
    variance_scaling,
    zeros,
)
from pax_export.nn._dot_attention import (
    IMPLEMENTATIONS,
    LOWEST,
    dot_product_attention,
    require_boolean_mask,
)
from pax_export.nn._explicit import explicit_mesh, join_specs, spec_of, under_auto_axes
from pax_export.nn._linear import Linear
from pax_export.nn._norm import RMSNorm, rms_normalised
from pax_export.nn._positions import Rotary, rotate


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

    def __call__(
        self, query: Array, key: Array, value: Array, mask: Array | None = None
    ) -> jax.Array:
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
        query, key = self.query_projection(query), self.key_projection(key)
        value = self.value_projection(value)

        def attended(
            query: jax.Array, key: jax.Array, value: jax.Array, mask: Array | None
        ) -> jax.Array:
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
        return jnp.where(mask, logits, LOWEST)
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            "The mask must broadcast to [..., num_heads, t, T].",
            where=where,
            got=f"shape {jnp.shape(mask)} for {logits.shape}",
            write="mask[:, None, None, :] for a mask [batch, T] of the keys",
        ) from None


# --- GroupedQueryAttention: causal self-attention of current language models ----------


Angles = tuple[jax.Array, jax.Array] | None


class GroupedQueryAttention(Module):
    """Causal self-attention in which several query heads share a key and a value head.

    ``num_kv_heads=num_heads`` is the attention of Vaswani et al. (2017), ``num_kv_heads=1``
    multi-query attention (Shazeer, 2019), and values in between grouped (Ainslie et al., 2023).

    Args:
        dim: the size of the last axis of input and output.
        num_heads: the number of query heads.
        num_kv_heads: the number of key and value heads, a divisor of ``num_heads``; default: equal.
        head_size: the size of a head, ``dim / num_heads`` by default.
        with_bias: whether query, key and value projections have a bias.
        output_bias: whether the output projection has a bias; default: ``with_bias``.
        query_key_norm: the ``eps`` of norms of each query and key head, or None for no norms.
        norm_offset: the ``scale_offset`` of these norms.
        norm_per_head: whether each head is normalized on its own; False: all of them together.
        rotary: a `Rotary` for queries and keys.
        window: the maximum number of positions per query, including its own.
        softcap: the soft cap of the logits, see `dot_product_attention`.
        scale: the factor of the logits; default ``1 / sqrt(head_size)``.
        implementation: as in `dot_product_attention`.
        w_init: ``w_init(key, shape)`` makes the weights, as for a `Linear`.

    Attributes:
        query: a `Linear` to ``num_heads * head_size``.
        key: a `Linear` to ``num_kv_heads * head_size``.
        value: the same.
        output: a `Linear` back to ``dim``.
        query_norm: an `RMSNorm` of ``head_size`` channels, or of those of all heads; missing
            without norms.
        key_norm: the same.

    Raises:
        InvalidArgumentError: a number is out of its range, the heads or the rotary embedding do
            not fit, or an unknown implementation.
        InvalidArgumentTypeError: an argument has another type.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> layer = pax.GroupedQueryAttention(12, 6, 2, rotary=pax.Rotary(2), window=4)
        >>> layer(jnp.ones((3, 5, 12))).shape, layer.key.weight.shape
        ((3, 5, 12), (12, 4))
    """

    axes_of_layers: ClassVar = {
        "query": {"in": "embed", "out": "heads"},
        "key": {"in": "embed", "out": "kv_heads"},
        "value": {"in": "embed", "out": "kv_heads"},
        "output": {"in": "heads", "out": "embed"},
    }

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_size: int | None = None,
        *,
        with_bias: bool = False,
        output_bias: bool | None = None,
        query_key_norm: float | None = None,
        norm_offset: float = 0.0,
        norm_per_head: bool = True,
        rotary: Rotary | None = None,
        window: int | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        implementation: str | None = None,
        w_init: Initializer | None = None,
    ):
        super().__init__()
        where = "GroupedQueryAttention"
        self.dim = checked_integer(dim, f"{where}.dim", least=1)
        self.num_heads = checked_integer(num_heads, f"{where}.num_heads", least=1)
        kv_heads = self.num_heads if num_kv_heads is None else num_kv_heads
        self.num_kv_heads = checked_integer(kv_heads, f"{where}.num_kv_heads", least=1)
        arg.require_divisor(
            self.num_kv_heads, "key heads", self.num_heads, "heads", f"{where}.num_kv_heads"
        )
        if head_size is None:
            arg.require_divisor(
                self.num_heads, "heads", self.dim, "channels", f"{where}.num_heads", "head_size="
            )
        size = self.dim // self.num_heads if head_size is None else head_size
        self.head_size = checked_integer(size, f"{where}.head_size", least=1)
        self.window = (
            None if window is None else checked_integer(window, f"{where}.window", least=1)
        )
        self.softcap = None if softcap is None else checked_positive(softcap, f"{where}.softcap")
        self.scale = None if scale is None else checked_float(scale, f"{where}.scale")
        if implementation is not None:
            checked_choice(implementation, IMPLEMENTATIONS, f"{where}.implementation")
        self.implementation = implementation
        self._make_layers(bool(with_bias), output_bias, w_init)
        self.norm_per_head = bool(norm_per_head)
        if query_key_norm is not None:
            for norm, count in (("query_norm", self.num_heads), ("key_norm", self.num_kv_heads)):
                width = self.head_size * (1 if self.norm_per_head else count)
                setattr(self, norm, RMSNorm(width, query_key_norm, norm_offset))
        if rotary is not None:
            self._check_rotary(rotary)
            self.rotary = rotary

    def _check_rotary(self, rotary: Rotary) -> None:
        size = getattr(rotary, "size", None)
        if size is None or size > self.head_size:
            raise (InvalidArgumentTypeError if size is None else InvalidArgumentError)(
                "A rotary embedding must fit the size of a head.",
                where="GroupedQueryAttention.rotary",
                got=f"{rotary!r:.80} for heads of size {self.head_size}",
                write=f"Rotary(size) with a size of at most {self.head_size}",
            )

    def _make_layers(
        self, with_bias: bool, output_bias: bool | None, w_init: Initializer | None
    ) -> None:
        def made(of: int, to: int, bias: bool) -> Linear:
            b_init = zeros if bias else None
            return Linear(of, to, with_bias=bias, w_init=w_init, b_init=b_init)

        inner = self.num_heads * self.head_size
        kv_inner = self.num_kv_heads * self.head_size
        self.query = made(self.dim, inner, with_bias)
        self.key = made(self.dim, kv_inner, with_bias)
        self.value = made(self.dim, kv_inner, with_bias)
        self.output = made(inner, self.dim, with_bias if output_bias is None else bool(output_bias))

    def __call__(
        self, x: Array, positions: Array | None = None, mask: Array | None = None
    ) -> jax.Array:
        """Attends from each position to itself and to earlier ones.

        Args:
            x: ``[batch, length, dim]``, or ``[length, dim]`` of a single example.
            positions: integers that broadcast to ``[batch, length]``, for `rotary`; from 0 up by
                default.
            mask: booleans that broadcast to ``[batch, num_heads or 1, length, length]``; False also
                masks a key.

        Returns:
            The shape of ``x``.

        Raises:
            InvalidArgumentError: another number of axes.
            InvalidArgumentTypeError: another width than ``dim``, or a mask that is not boolean.
        """
        x = arg.as_array(x)
        if x.ndim != 2:
            arg.require_rank(x, 3, "[batch, length, dim]", self)
            return self._of_a_batch(x, positions, mask)
        return self._of_a_batch(x[None], positions, mask)[0]

    def _of_a_batch(self, x: jax.Array, positions: Array | None, mask: Array | None) -> jax.Array:
        rotary = getattr(self, "rotary", None)
        cos, sin, pairing = None, None, "halves"
        if rotary is not None:
            if positions is None:
                positions = jax.lax.iota(jnp.int32, x.shape[1])
            (cos, sin), pairing = rotary.angles(positions), rotary.pairing

        def attended(q: Any, k: Any, v: Any, scales: Any, cos: Any, sin: Any, mask: Any) -> Any:
            angles = None if cos is None else (cos, sin)
            heads = self._heads(q, k, v, scales, angles, pairing)
            attend = functools.partial(self.attend, is_causal=True, window=self.window)
            found = attend(*heads, mask=mask)
            return found.reshape((*found.shape[:2], self.num_heads * self.head_size))

        mask = mask if mask is None else jnp.asarray(mask)
        flat = self.query(x), self.key(x), self.value(x)
        query_scale, key_scale = self._norm_scales()
        operands = (*flat, query_scale, key_scale, cos, sin, mask)

        def of_operands(q: Array, k: Array, v: Array, qs: Array, ks: Array, *rest: object) -> Any:
            return attended(q, k, v, (qs, ks), *rest)

        out = lambda: join_specs(*spec_of(flat[0]))  # noqa: E731
        return self.output(under_auto_axes(of_operands, operands, out))

    def project(self, x: Array, angles: Angles = None, pairing: str = "halves") -> tuple:
        """Returns queries, keys and values by head, normalized and rotated.

        Args:
            x: ``[batch, length, dim]``.
            angles: the cosines and sines of `Rotary.angles`, computed once for all layers.
            pairing: as in `Rotary`.

        Returns:
            ``[batch, length, num_heads, head_size]``, and two with ``num_kv_heads``.
        """
        flat = self.query(x), self.key(x), self.value(x)
        return self._heads(*flat, self._norm_scales(), angles, pairing)

    def attend(self, query: Array, key: Array, value: Array, **options: PyTree) -> jax.Array:
        """`dot_product_attention` with the scale, soft cap and kernel of this layer."""
        return dot_product_attention(
            query, key, value, scale=self.scale, softcap=self.softcap,
            implementation=self.implementation, **options,
        )  # fmt: skip

    def _norm_scales(self) -> tuple[Any, Any]:
        if not hasattr(self, "query_norm"):
            return None, None
        return self.query_norm.scale, self.key_norm.scale

    def _heads(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        scales: tuple[Any, Any],
        angles: Angles,
        pairing: str,
    ) -> tuple:
        def split(x: jax.Array, heads: int, scale: Array | None = None) -> jax.Array:
            if scale is not None and not self.norm_per_head:
                x = normalised(x, scale)
            x = x.reshape((*x.shape[:-1], heads, self.head_size))
            return normalised(x, scale) if scale is not None and self.norm_per_head else x

        def normalised(x: jax.Array, scale: Array) -> jax.Array:
            return rms_normalised(x, scale, self.query_norm.eps, self.query_norm.scale_offset)

        query = split(query, self.num_heads, scales[0])
        key, value = split(key, self.num_kv_heads, scales[1]), split(value, self.num_kv_heads)
        if angles is not None:
            query, key = rotate(query, *angles, pairing), rotate(key, *angles, pairing)
        return query, key, value

    _repr = arg.repr_method("dim", "num_heads", "num_kv_heads", "head_size", "window")
