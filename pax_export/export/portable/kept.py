"""Composites: functions kept whole for runtimes with an operator for them.

They are `jax.lax.composite` calls: a program with them still runs in jax, and a format without the
operator writes their definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pax_export._foundations.types import Array, DTypeLike, Equation, Size

PREFIX = "pax_export."


def clip(x: Array, *, low: float | None = None, high: float | None = None) -> Any:
    if low is not None:
        x = lax.max(x, jnp.asarray(low, x.dtype))
    if high is not None:
        x = lax.min(x, jnp.asarray(high, x.dtype))
    return x


def layer_norm(x: Array, *vectors: Array, epsilon: float, scaled: bool, shifted: bool) -> Any:
    """Normalizes over the last axis; `vectors` are the optional scale and shift."""
    over = {"axes": (x.ndim - 1,), "keepdims": True}
    apart = x - call("mean", x, **over)
    variance = call("mean", apart * apart, **over)
    normalized = apart * lax.rsqrt(variance + epsilon)
    if scaled:
        normalized = normalized * vectors[0]
    return normalized + vectors[-1] if shifted else normalized


def rms_norm(x: Array, *scale: Array, epsilon: float) -> Any:
    """Divides by the root of the mean square over the last axis; the scale is optional."""
    squares = call("mean", x * x, axes=(x.ndim - 1,), keepdims=True)
    normalized = x * lax.rsqrt(squares + epsilon)
    return normalized * scale[0] if scale else normalized


def lstm(x: Array, w: Array, r: Array, b: Array, h: Array, c: Array, *, reverse: bool) -> Any:
    """Returns all outputs, the last one and the last cell; gates: input, output, forget, cell.

    `x` is ``[time, batch, features]``, `w` ``[1, 4 * size, features]``, `r` the same of the state,
    and `b` ``[1, 8 * size]``, with a bias for each of the two.
    """

    def step(state: tuple[Array, Array], row: Array) -> Any:
        h, c = state
        i, o, f, g = jnp.split(row + h @ r[0].T, 4, axis=-1)
        c = lax.logistic(f) * c + lax.logistic(i) * jnp.tanh(g)
        h = lax.logistic(o) * jnp.tanh(c)
        return (h, c), h

    (h, c), outputs = lax.scan(step, (h, c), _rows(x, w, b), reverse=reverse)
    return outputs, h, c


def gru(
    x: Array, w: Array, r: Array, b: jax.Array, h: Array, *, reverse: bool, reset_after: bool
) -> Any:
    """Returns all outputs and the last one; gates: update, reset, new."""
    size, shift = h.shape[-1], b[0, -h.shape[-1] :]

    def step(h: Array, row: Array) -> Any:
        gates, new = jnp.split(row, [2 * size], axis=-1)
        of_gates = h @ (r[0] if reset_after else r[0, : 2 * size]).T
        if reset_after:
            of_gates, inner = jnp.split(of_gates, [2 * size], axis=-1)
            z, reset = jnp.split(lax.logistic(gates + of_gates), 2, axis=-1)
            new = jnp.tanh(new + reset * (inner + shift))
        else:
            z, reset = jnp.split(lax.logistic(gates + of_gates), 2, axis=-1)
            new = jnp.tanh(new + (reset * h) @ r[0, 2 * size :].T + shift)
        h = new + z * (h - new)
        return h, h

    shifts = b.at[:, -size:].set(0)
    h, outputs = lax.scan(step, h, _rows(x, w, shifts), reverse=reverse)
    return outputs, h


def rnn(x: Array, w: Array, r: Array, b: Array, h: Array, *, reverse: bool, activation: str) -> Any:
    """Returns all outputs and the last one."""
    function = {"tanh": jnp.tanh, "relu": lambda x: lax.max(x, jnp.zeros_like(x))}[activation]

    def step(h: Array, row: Array) -> Any:
        h = function(row + h @ r[0].T)
        return h, h

    h, outputs = lax.scan(step, h, _rows(x, w, b), reverse=reverse)
    return outputs, h


def _rows(x: Array, w: Array, b: Array) -> Any:
    """Returns the input part of the gates for all steps."""
    one, other = jnp.split(b[0], 2)
    return x @ w[0].T + (one + other)


def dft(x: Array) -> Any:
    """The discrete Fourier transform of ``[..., length, 2]``: real and imaginary parts."""
    length, real, imag = x.shape[-2], x[..., 0], x[..., 1]
    cosine, sine = fourier_matrix(length, length, length, x.dtype)
    return jnp.stack([real @ cosine + imag @ sine, imag @ cosine - real @ sine], -1)


def fourier_matrix(rows: Size, columns: Size, length: Size, dtype: DTypeLike) -> tuple[Any, Any]:
    """Cosines and sines of 2 * pi * row * column / length."""
    # The product is rounded before it becomes a float with few bits.
    product = jnp.arange(rows)[:, None] * jnp.arange(columns)[None, :] % length
    angle = product.astype(dtype) * (2 * math.pi / jnp.asarray(length).astype(dtype))
    return jnp.cos(angle), jnp.sin(angle)


def rank(x: Array, *, axis: int, count: Size, largest: bool) -> Any:
    """The places of the first numbers in order, or of the largest; equal ones in their order.

    NaN is larger than all others.
    """
    if largest:
        indices = lax.top_k(jnp.moveaxis(x, axis, -1), count)[1]
        return jnp.moveaxis(indices, -1, axis).astype(np.int32)
    indices = jnp.argsort(x, axis, stable=True)
    return lax.slice_in_dim(indices, 0, count, axis=axis).astype(np.int32)


def put(x: jax.Array, indices: Array, rows: Array, *inside: Array, how: str) -> Any:
    """Returns `x` with rows set, added, multiplied or compared at positions.

    `how` is set, add, mul, max or min; rows that are not `inside` are dropped.
    """
    indices = jnp.where(inside[0], indices, x.shape[0]) if inside else indices
    return getattr(x.at[indices], how)(rows, mode="drop")


def rotary(
    x: Array, positions: Array, cos: Array, sin: Array, *, heads: int, neighbors: bool
) -> Any:
    """Rotates the first channels of each head of ``[batch, length, heads * size]``.

    `positions`, ``[batch, length]``, are rows of `cos` and `sin`, ``[rows, pairs]``. Channels are
    paired with their neighbors, or by halves.
    """
    split, pairs = x.reshape((*x.shape[:2], heads, -1)), cos.shape[-1]
    turned, rest = split[..., : 2 * pairs], split[..., 2 * pairs :]
    axis = -1 if neighbors else -2
    paired = turned.reshape((*turned.shape[:-1], *((pairs, 2) if neighbors else (2, pairs))))
    first, second = (lax.index_in_dim(paired, each, axis, keepdims=False) for each in (0, 1))
    cos, sin = (each[positions][:, :, None] for each in (cos, sin))
    ends = first * cos - second * sin, second * cos + first * sin
    turned = jnp.stack(ends, axis).reshape(turned.shape)
    return jnp.concatenate([turned, rest], -1).reshape(x.shape)


def cached_attention(
    query: Array, key: Array, value: Array, past_key: Array, past_value: Array, bias: Array, *,
    heads: int, kv_heads: int, scale: float, softcap: float,
) -> Any:  # fmt: skip
    """Appends keys and values to those of earlier tokens, and attends to all of them.

    `query` is ``[batch, length, heads * size]``, the past ``[batch, kv_heads, past, size]``, and
    `bias` ``[batch, heads or 1, length, past + length]``, which masks later tokens. `softcap` is 0
    without a soft cap. Returns the heads in the shape of `query`, all keys and all values.
    """
    batch, length, width = query.shape

    def split(x: Array, *axes: int) -> Any:
        return x.reshape((batch, length, *axes, width // heads))

    new = (split(each, kv_heads).swapaxes(1, 2) for each in (key, value))
    keys, values = map(lambda *both: jnp.concatenate(both, 2), (past_key, past_value), new)
    groups = split(query, kv_heads, heads // kv_heads)
    logits = jnp.einsum("btkgc,bksc->bkgts", groups, keys) * scale
    logits = softcap * jnp.tanh(logits / softcap) if softcap else logits
    by_group = (1, 1) if bias.shape[1] == 1 else (kv_heads, heads // kv_heads)
    bias = bias.reshape((bias.shape[0], *by_group, *bias.shape[2:]))
    found = jnp.einsum("bkgts,bksc->btkgc", jax.nn.softmax(logits + bias), values)
    return found.reshape(query.shape), keys, values


#: By name.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "clip": clip,
    "silu": lambda x: x * lax.logistic(x),
    "hard_sigmoid": lambda x: jax.nn.relu6(x + 3.0) / 6.0,
    "hard_swish": lambda x: x * (jax.nn.relu6(x + 3.0) / 6.0),
    "gelu": lambda x, *, approximate: jax.nn.gelu(x, approximate=approximate),
    "softmax": lambda x, *, axis: jax.nn.softmax(x, axis),
    "log_softmax": lambda x, *, axis: jax.nn.log_softmax(x, axis),
    "mean": lambda x, *, axes, keepdims: x.mean(axes, keepdims=keepdims),
    **{each.__name__: each for each in (layer_norm, rms_norm, lstm, gru, rnn, dft)},
    **{each.__name__: each for each in (rotary, cached_attention)},
}
#: Normal forms of decompositions; every target has a row for them. Places and starts are int32, and
#: all of them in range.
NORMAL_FORMS: dict[str, Callable[..., Any]] = {
    "take": lambda x, places, *, axis: jnp.take(x, places, axis, mode="clip"),
    # The same for each line along the axis, with its own places.
    "take_along": lambda x, places, *, axis: jnp.take_along_axis(x, places, axis, mode="clip"),
    # The largest or smallest numbers along axes, none of which are NaN.
    "extreme": lambda x, *, axes, largest: (lax.reduce_max if largest else lax.reduce_min)(x, axes),
    "rank": rank,
    "put": put,
    "window": lambda x, *starts, sizes: lax.dynamic_slice(x, starts, sizes),
    "put_window": lambda x, update, *starts: lax.dynamic_update_slice(x, update, starts),
    # Sizes, some of them symbolic, as an array.
    "sizes": lambda *, of: jnp.stack([jnp.asarray(size).astype(np.int32) for size in of]),
}
FUNCTIONS.update(NORMAL_FORMS)
#: Elementwise functions.
ELEMENTWISE = frozenset({"clip", "silu", "hard_sigmoid", "hard_swish", "gelu"})


def call(name: str, *operands: Any, **attributes: Any) -> Any:
    """Calls one of the functions, so that the program contains its name."""
    return lax.composite(FUNCTIONS[name], PREFIX + name)(*operands, **attributes)


def name_of(parameters: Mapping[str, Any]) -> str:
    """The name of the function that a composite with these parameters is; empty for another's."""
    name = str(parameters.get("name", ""))
    return name.removeprefix(PREFIX) if name.startswith(PREFIX) else ""


def operation(equation: Equation) -> tuple[str, dict[str, Any]]:
    """Returns the name and the parameters of an operation; a kept function has its own."""
    name, params = equation.primitive.name, equation.params
    composite = name_of(params) if name == "composite" else ""
    if not composite:
        return name, params
    attributes = params["attributes"]
    return composite, {name: jax.tree.unflatten(tree, leaves) for name, leaves, tree in attributes}
