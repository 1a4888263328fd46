"""Tracing: what a module adds to the tracing of its arithmetic.

The arithmetic is written once, over arrays; a candidate is that arithmetic in
methods of its own modules, which hold the same arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import pax_export as pax
from benchmarks.compare import compare, table
from benchmarks.same_tree import as_dicts, as_equinox, as_nnx

_HEADS = 4


def tables() -> Iterator[str]:
    """A Transformer and a ResNet18, in eval mode."""
    net = pax.nets.Transformer(64, _HEADS, 12, 0.0).eval()
    x = jnp.ones((2, 16, 64))
    by_name = Transformer(lambda owner, name: getattr(owner, name))
    rows = compare(
        {
            "nested dicts": _trace(Transformer(dict.__getitem__), as_dicts(net), x),
            "pax_export": _trace(lambda net, x: net(x), net, x),
            "equinox": _trace(by_name, as_equinox(net), x),
            "flax nnx": _trace_nnx(by_name, as_nnx(net), x),
        },
        rounds=15,
    )
    goal = "1.05 times nested dicts"
    yield table("trace of a Transformer of 12 layers", rows, goal, "1.02 times")

    net = pax.nets.ResNet18(3, 10).eval()
    x = jnp.ones((2, 3, 32, 32))
    rows = compare(
        {
            "nested dicts": _trace(_resnet, as_dicts(net), x),
            "pax_export": _trace(lambda net, x: net(x), net, x),
        },
        rounds=15,
    )
    yield table("trace of ResNet18", rows, goal, "3.4 times")


def _trace(function: Callable, *args: Any) -> Callable[[], Any]:
    # A new function each time: jax remembers what it has traced.
    return lambda: jax.make_jaxpr(lambda *args: function(*args))(*args)


def _trace_nnx(function: Callable, net: Any, x: jax.Array) -> Callable[[], Any]:
    from flax import nnx

    graph, state = nnx.split(net)
    return _trace(lambda state, x: function(nnx.merge(graph, state), x), state, x)


class Transformer:
    """The arithmetic of `pax.nets.Transformer` over somebody's containers.

    Args:
        get: ``get(owner, name)`` reads an attribute of a module.
    """

    def __init__(self, get: Callable[[Any, str], Any]):
        self.get = get

    def __call__(self, net: Any, h: jax.Array) -> jax.Array:
        """``[batch, time, dim]`` to the same shape."""
        for layer in self.get(net, "layers"):
            h = h + self._attention(layer["attention"], self._norm(layer["attn_layer_norm"], h))
            h = h + self._dense(layer["dense_block"], self._norm(layer["dense_layer_norm"], h))
        return self._norm(self.get(net, "layer_norm_output"), h)

    def _linear(self, owner: Any, name: str, x: jax.Array) -> jax.Array:
        layer = self.get(owner, name)
        return jnp.dot(x, _array(self.get(layer, "weight"))) + _array(self.get(layer, "bias"))

    def _norm(self, norm: Any, x: jax.Array) -> jax.Array:
        mean = jnp.mean(x, -1, keepdims=True)
        factor = jax.lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5)
        return _array(self.get(norm, "scale")) * factor * (x - mean) + _array(
            self.get(norm, "offset")
        )

    def _dense(self, dense: Any, x: jax.Array) -> jax.Array:
        return self._linear(dense, "fc2", jax.nn.gelu(self._linear(dense, "fc1", x)))

    def _attention(self, attention: Any, x: jax.Array) -> jax.Array:
        def heads(name: str) -> jax.Array:
            y = self._linear(attention, name, x)
            return y.reshape((*y.shape[:-1], _HEADS, -1))

        query, key = heads("query_projection"), heads("key_projection")
        logits = jnp.einsum("...thd,...Thd->...htT", query, key, preferred_element_type=jnp.float32)
        shape = (x.shape[-2], x.shape[-2])
        row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        logits = jnp.where(column <= row, logits / math.sqrt(query.shape[-1]), -1e30)
        values = jnp.einsum(
            "...htT,...Thd->...thd", jax.nn.softmax(logits), heads("value_projection")
        )
        return self._linear(attention, "output_projection", values.reshape(x.shape))


def _array(value: Any) -> Any:
    return value.get_value() if hasattr(value, "get_value") else value  # a Variable of nnx


def _resnet(net: dict, x: jax.Array) -> jax.Array:
    """The arithmetic of `pax.nets.ResNet18` over nested dicts."""
    x = jax.nn.relu(_norm(net["initial_batchnorm"], _conv(net["initial_conv"], x, 2)))
    x = jnp.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 3, 3), (1, 1, 2, 2), "VALID")
    for group, stride in zip(net["block_groups"], (1, 2, 2, 2)):
        for block, step in zip(group["blocks"], (stride, 1)):
            x = _block(block, x, step)
    logits = net["logits"]
    return jnp.dot(jnp.mean(x, axis=(2, 3)), logits["weight"]) + logits["bias"]


def _block(block: dict, x: jax.Array, stride: int) -> jax.Array:
    shortcut = x
    if "proj_conv" in block:
        shortcut = _norm(block["proj_batchnorm"], _conv(block["proj_conv"], x, stride))
    (first, first_norm), (second, second_norm) = block["layers"]
    x = jax.nn.relu(_norm(first_norm, _conv(first, x, stride)))
    return jax.nn.relu(_norm(second_norm, _conv(second, x, 1)) + shortcut)


def _conv(conv: dict, x: jax.Array, stride: int) -> jax.Array:
    pad = conv["weight"].shape[0] // 2
    return jax.lax.conv_general_dilated(
        x,
        conv["weight"],
        window_strides=(stride, stride),
        padding=[(pad, pad), (pad, pad)],
        dimension_numbers=("NCHW", "HWIO", "NCHW"),
    )


def _norm(norm: dict, x: jax.Array) -> jax.Array:
    mean, variance = norm["ema_mean"]["averages"], norm["ema_var"]["averages"]
    return (x - mean) * (norm["scale"] * jax.lax.rsqrt(variance + 1e-5)) + norm["offset"]
