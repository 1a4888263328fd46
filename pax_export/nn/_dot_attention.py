"""Attention of projected heads: grouped queries, windows, soft caps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pax_export._foundations.check import checked_choice, checked_integer, checked_positive
from pax_export._foundations.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    first_line,
)
from pax_export._foundations.types import Array
from pax_export.nn import _arguments as arg
from pax_export.nn._explicit import on_explicit_mesh

IMPLEMENTATIONS = ("xla", "cudnn")
# The logit of a masked key: small enough for a weight of 0, and finite, so that a row whose keys
# are all masked gets a mean and not NaN.
LOWEST = -1e30


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Array | None = None,
    bias: Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    is_causal: bool = False,
    window: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Attention of ``heads`` queries to ``kv_heads`` keys and values.

    It calls `jax.nn.dot_product_attention` where that is exact and fastest; a soft cap, a single
    query, and float16 or bfloat16 without a kernel use products that every format of
    `pax_export.export` supports. Logits and softmax are at least float32.

    Args:
        query: ``[batch, length, heads, size]``.
        key: ``[batch, keys, kv_heads, size]``; ``kv_heads`` divides ``heads``, and each is shared
            by adjacent query heads.
        value: the shape of ``key``.
        mask: booleans that broadcast to ``[batch, heads or 1, length, keys]``; False masks a key.
        bias: added to the scaled logits; broadcasts as the mask does.
        scale: the factor of the logits; default ``1 / sqrt(size)``.
        softcap: logits become ``softcap * tanh(logits / softcap)`` (Gemma 2).
        is_causal: whether query ``i`` attends only to keys up to ``i``.
        window: the maximum number of keys per query, including its own; requires ``is_causal``.
        implementation: that of `jax.nn.dot_product_attention`: ``"cudnn"`` for the fused kernel of
            NVIDIA's GPUs, which takes bfloat16 and float16 and cannot be exported, or ``"xla"``.

    Returns:
        The shape of ``query``.

    Raises:
        InvalidArgumentError: shapes do not fit, a number is out of its range, a window without
            ``is_causal``, or the implementation cannot do it.
        InvalidArgumentTypeError: (a TypeError) the mask is not boolean.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> q, k = jnp.ones((1, 5, 6, 4)), jnp.ones((1, 5, 2, 4))
        >>> pax.dot_product_attention(q, k, k, is_causal=True).shape
        (1, 5, 6, 4)
    """
    query, key, value = map(arg.as_array, (query, key, value))
    _check_inputs(query, key, value)
    _check_options(softcap, implementation, window, is_causal)
    shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    mask, bias = _with_four_axes(mask, shape, "mask"), _with_four_axes(bias, shape, "bias")
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    if softcap is None and (implementation is not None or _suits_jax(query)):
        # jax counts the keys before a query, without its own.
        sides = None if window is None else (window - 1, 0)
        kernel: Any = implementation
        try:
            return jax.nn.dot_product_attention(
                query, key, value, bias, mask, scale=scale, is_causal=is_causal,
                local_window_size=sides if is_causal else None, implementation=kernel,
            )  # fmt: skip
        except (RuntimeError, TypeError, ValueError) as error:
            if implementation != "cudnn":
                raise
            raise InvalidArgumentError(
                f"The fused kernel cannot compute this attention: {first_line(error)}.",
                where="dot_product_attention.implementation",
                got=f"'cudnn' with {query.dtype}{list(query.shape)} on {jax.default_backend()}",
                write="implementation=None",
            ) from error
    if is_causal:
        seen = causal_mask(query.shape[1], window, key.shape[1])
        mask = seen if mask is None else mask & seen
    products = _of_one_query if _suits_one_product(query, key) else _by_products
    return products(query, key, value, _weigher(mask, bias, scale, softcap))


def _suits_jax(query: Array) -> bool:
    # The products of halves jax makes by an algorithm that old consumers do not know; for a single
    # query it copies the keys for each head of a group: a seventh of a step of eight rows.
    return query.dtype == jnp.float32 and query.shape[1] != 1


def _suits_one_product(query: Array, key: Array) -> bool:
    # Across devices or on a GPU, each head is better left where its keys are.
    on_one_cpu = jax.default_backend() == "cpu" and not on_explicit_mesh((query, key))
    return query.shape[1] == 1 and on_one_cpu


def causal_mask(length: int, window: int | None = None, keys: int | None = None) -> jax.Array:
    """``[1, 1, length, keys or length]``: whether a query sees a key, which is not after it."""
    # Compared indices, not a constant: an export may leave the length open.
    shape = (1, 1, length, length if keys is None else keys)
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 2)
    column = jax.lax.broadcasted_iota(jnp.int32, shape, 3)
    seen = column <= row
    return seen if window is None else seen & (column > row - window)


Weigh = Callable[[jax.Array, Callable[[Array], Array]], jax.Array]


def _weigher(mask: Array | None, bias: Array | None, scale: float, softcap: float | None) -> Weigh:
    """A function of the logits, and of the form that mask and bias take beside them."""

    def weigh(logits: jax.Array, form: Callable[[Array], Array]) -> jax.Array:
        logits = logits * scale
        own_mask, own_bias = (None if x is None else form(x) for x in (mask, bias))
        if softcap is not None:
            logits = softcap * jnp.tanh(logits / softcap)
        if own_bias is not None:
            logits = logits + own_bias
        if own_mask is not None:
            logits = jnp.where(own_mask, logits, LOWEST)
        return jax.nn.softmax(logits)

    return weigh


def _by_products(query: Array, key: Array, value: Array, weigh: Weigh) -> jax.Array:
    batch, length, heads, size = query.shape
    kv_heads = key.shape[2]
    dtype = arg.at_least_float32(query.dtype)
    grouped = query.reshape((batch, length, kv_heads, heads // kv_heads, size))
    logits = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=dtype)
    weights = arg.cast(weigh(logits, lambda x: _group_heads(x, kv_heads)), value.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, value).reshape(query.shape)


def _of_one_query(query: Array, key: Array, value: Array, weigh: Weigh) -> jax.Array:
    """Attention of one query per row: a block-diagonal product for all heads, without copies.

    XLA's CPU takes a sixth of the time of copying keys and values by head.
    """
    batch, _, heads, size = query.shape
    keys, kv_heads = key.shape[1:3]
    own = np.repeat(np.eye(kv_heads, dtype=bool), heads // kv_heads, axis=0)[..., None]
    spread = jnp.where(own, query[:, 0, :, None], 0).reshape((batch, heads, kv_heads * size))
    key, value = (x.reshape((batch, keys, kv_heads * size)) for x in (key, value))
    dtype = arg.at_least_float32(query.dtype)
    logits = jnp.einsum("bnc,bsc->bns", spread, key, preferred_element_type=dtype)
    weights = arg.cast(weigh(logits, lambda x: jnp.asarray(x)[:, :, 0]), value.dtype)
    mixed = jnp.einsum("bns,bsc->bnc", weights, value).reshape((batch, heads * kv_heads, size))
    return mixed[:, np.flatnonzero(own)][:, None]


def _group_heads(x: Array, kv_heads: int) -> jax.Array:
    """``[batch, heads or 1, ...]`` as ``[batch, kv_heads, group, ...]``."""
    x = jnp.asarray(x)
    if x.shape[1] == 1:
        return x[:, :, None]
    return x.reshape((x.shape[0], kv_heads, x.shape[1] // kv_heads, *x.shape[2:]))


def require_boolean_mask(mask: Array, where: str) -> jax.Array:
    """The mask as an array; raises for numbers, which some libraries add to the logits."""
    array = arg.as_array(mask)
    if array.dtype != bool:
        raise InvalidArgumentTypeError(
            "A mask must have booleans: False masks a key.",
            where=where,
            got=f"{array.dtype.name}{list(array.shape)}",
            write="mask != 0 for ones and zeros, mask == 0 for numbers that are added to the "
            "logits, and dot_product_attention(bias=...) for a bias",
        )
    return array


def _with_four_axes(x: Array | None, shape: tuple[Any, ...], name: str) -> Any:
    """A mask or bias ``[batch, heads, length, keys]``, of which each size may be 1."""
    if x is None:
        return None
    array = arg.as_array(x)
    if name == "mask":
        require_boolean_mask(array, "dot_product_attention.mask")
    if array.ndim < 4:
        array = jnp.expand_dims(array, tuple(range(4 - array.ndim)))
    if array.ndim > 4 or any(size not in (1, whole) for size, whole in zip(array.shape, shape)):
        raise InvalidArgumentError(
            f"The {name} must broadcast to [batch, heads, length, keys].",
            where=f"dot_product_attention.{name}",
            got=f"shape {array.shape} for {shape}",
            write=f"{name}[:, None, None, :] for one of the keys [batch, keys]",
        )
    return array


def _check_inputs(query: Array, key: Array, value: Array) -> None:
    fits = query.ndim == key.ndim == 4 and query.shape[::3] == key.shape[::3]
    if not (fits and key.shape == value.shape and query.shape[2] % key.shape[2] == 0):
        raise InvalidArgumentError(
            "Queries, keys and values must fit together, and the key heads divide the query heads.",
            where="dot_product_attention",
            got=f"query {query.shape}, key {key.shape} and value {value.shape}",
            write="query [batch, length, heads, size], key and value [batch, keys, kv_heads, size]",
        )


def _check_options(
    softcap: float | None, implementation: str | None, window: int | None, is_causal: bool
) -> None:
    where = "dot_product_attention"
    if implementation is not None:
        checked_choice(implementation, IMPLEMENTATIONS, f"{where}.implementation")
    if softcap is not None:
        checked_positive(softcap, f"{where}.softcap")
    if window is not None:
        checked_integer(window, f"{where}.window", least=1)
        if not is_causal:
            raise InvalidArgumentError(
                "A window requires causal attention.",
                where=f"{where}.window",
                got=f"window={window}, is_causal=False",
                write="is_causal=True, or mask= for a window on both sides",
            )
    if implementation == "cudnn" and softcap is not None:
        raise InvalidArgumentError(
            "The fused kernel has no soft cap.",
            where=f"{where}.implementation",
            got=f"'cudnn' with softcap={softcap}",
            write="implementation=None",
        )
