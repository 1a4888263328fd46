"""How weights are stored and layers are put together: half, quantised, tied, repeated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.models.registry import between, ints, model, real, weights


@model("linen", real("batch, length, 16", "bfloat16"), rtol=3e-2, odd=("empty",))
def bfloat16_transformer():
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            half = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
            h = nn.LayerNorm(**half)(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=2, **half)(h, h)
            h = nn.LayerNorm(**half)(x)
            return x + nn.Dense(16, **half)(nn.gelu(nn.Dense(32, **half)(h)))

    net = Block()
    sample = jnp.zeros((1, 4, 16), jnp.bfloat16)
    return net.init(jax.random.key(1), sample), net.apply


@model("jax", real("batch, 8, 8, 3", "float16"), rtol=1e-2)
def float16_convolution():
    w = weights(2)
    half = lambda a: a.astype(jnp.float16)  # noqa: E731
    params = {"a": half(w(3, 3, 3, 8)), "b": half(w(8, 4))}

    def apply(p, x):
        names = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(x, p["a"], (2, 2), "SAME", dimension_numbers=names)
        return jax.nn.relu(x).mean((1, 2)) @ p["b"]

    return params, apply


@model("jax", "batch, 12", differentiable=True, rtol=1e-2)
def mixed_precision():
    """Parameters of float32, products of bfloat16, sums of float32."""
    w = weights(3)

    def apply(p, x):
        for layer in p[:-1]:
            h = jnp.dot(
                x.astype(jnp.bfloat16), layer.astype(jnp.bfloat16),
                preferred_element_type=jnp.float32,
            )  # fmt: skip
            x = jnp.tanh(h)
        return x @ p[-1]

    return [w(12, 16), w(16, 16), w(16, 3)], apply


def _rounded(a):
    scale = np.abs(a).max(0) / 127
    return {"q": jnp.asarray(np.round(a / scale), jnp.int8), "scale": jnp.asarray(scale)}


@model("jax", "batch, 16")
def int8_products():
    """Weights and activations of eight bits, sums of 32."""
    w = weights(4)
    params = [_rounded(np.asarray(w(16, 24))), _rounded(np.asarray(w(24, 4)))]

    def apply(p, x):
        for layer in p:
            size = jnp.maximum(jnp.max(jnp.abs(x), -1, keepdims=True), 1e-6) / 127
            q = jnp.clip(jnp.round(x / size), -127, 127).astype(jnp.int8)
            total = lax.dot_general(
                q, layer["q"], (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32
            )
            x = jax.nn.relu(total * size * layer["scale"])
        return x

    return params, apply


@model("jax", "batch, length, 16")
def int8_weights():
    """Weights of eight bits, made float32 where they are used."""
    w = weights(5)
    params = {"a": _rounded(np.asarray(w(16, 32))), "b": _rounded(np.asarray(w(32, 16)))}

    def apply(p, x):
        dense = lambda q, x: (x @ q["q"].astype(x.dtype)) * q["scale"]  # noqa: E731
        return x + dense(p["b"], jax.nn.silu(dense(p["a"], x)))

    return params, apply


@model("jax", "batch, 16")
def int4_groups():
    """Two weights in a byte, and a scale for each group of eight."""
    rng = np.random.default_rng(6)
    packed = rng.integers(0, 256, (8, 12)).astype(np.uint8)
    params = {"packed": jnp.asarray(packed), "scale": jnp.asarray(rng.uniform(0.1, 0.3, (2, 12)))}
    params["scale"] = params["scale"].astype(jnp.float32)

    def apply(p, x):
        low = (p["packed"] & 15).astype(jnp.int8) - 8
        high = (p["packed"] >> 4).astype(jnp.int8) - 8
        both = jnp.stack([low, high], 1).reshape(16, 12).astype(jnp.float32)
        w = (both.reshape(2, 8, 12) * p["scale"][:, None]).reshape(16, 12)
        return x @ w

    return params, apply


@model("nnx", "batch, 10", differentiable=True)
def tied_autoencoder():
    from flax import nnx

    class Auto(nnx.Module):
        def __init__(self, rngs):
            self.down = nnx.Linear(10, 4, rngs=rngs)
            self.bias = nnx.Param(jnp.zeros(10))

        def __call__(self, x):
            code = jnp.tanh(self.down(x))
            return code @ self.down.kernel[...].T + self.bias[...], code

    graph, state = nnx.split(Auto(nnx.Rngs(7)))
    return state, lambda state, x: nnx.merge(graph, state)(x)


@model("jax", "batch, 6", differentiable=True)
def ensemble():
    """Eight networks by vmap: their mean, and how far they disagree."""
    keys = jax.random.split(jax.random.key(8), 8)

    def start(key):
        a, b = jax.random.split(key)
        return {"a": jax.random.normal(a, (6, 12)) * 0.4, "b": jax.random.normal(b, (12, 2)) * 0.3}

    def one(p, x):
        return jnp.tanh(x @ p["a"]) @ p["b"]

    def apply(params, x):
        all = jax.vmap(one, (0, None))(params, x)
        return all.mean(0), all.var(0)

    return jax.vmap(start)(keys), apply


@model("linen", "batch, 8", differentiable=True)
def hundred_layers():
    import flax.linen as nn

    class Deep(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(100):
                x = x + 0.1 * nn.relu(nn.Dense(8)(x))
            return x

    net = Deep()
    return net.init(jax.random.key(9), jnp.zeros((1, 8))), net.apply


@model("jax", "batch, 8", differentiable=True)
def hundred_layers_by_scan():
    """The same by a scan over stacked weights, forgotten and computed again for gradients."""
    w = weights(10)

    def apply(p, x):
        @jax.checkpoint
        def layer(x, p):
            h = jax.nn.standardize(x) @ p["w"] + p["b"]
            return x + 0.1 * jax.nn.gelu(h), None

        return lax.scan(layer, x, p)[0]

    return {"w": w(100, 8, 8, scale=0.35), "b": w(100, 8, scale=0.1)}, apply


@model("jax", "batch, 6", differentiable=True)
def custom_gradient():
    """A step whose slope is that of a sigmoid, and a clipped gradient."""

    @jax.custom_jvp
    def spike(x):
        return (x > 0).astype(jnp.float32)

    @spike.defjvp
    def _(primals, tangents):
        s = jax.nn.sigmoid(4 * primals[0])
        return spike(primals[0]), 4 * s * (1 - s) * tangents[0]

    @jax.custom_vjp
    def gentle(x):
        return x

    gentle.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))
    w = weights(11)

    def apply(p, x):
        return spike(gentle(x @ p["a"])) @ p["b"]

    return {"a": w(6, 10), "b": w(10, 2)}, apply


@model("jax", real("batch, 7"), odd=("ties", "nan", "extreme", "empty"))
def careful_with_nan():
    """Largest and smallest, their places, sorts and clips: NaN wins, as in numpy."""

    def apply(p, x):
        return {
            "max": x.max(1),
            "argmax": x.argmax(1),
            "min": jnp.minimum(x, p["limit"]),
            "argmin": x.argmin(1),
            "sorted": jnp.sort(x, axis=1),
            "clipped": jnp.clip(x, -1, 1),
            "relu": jax.nn.relu(x),
            "sign": jnp.sign(x),
            "filled": jnp.nan_to_num(x, nan=0.5),
            "sum": jnp.nansum(x, axis=1),
        }

    return {"limit": jnp.float32(0.3)}, apply


@model("jax", "batch, 5", differentiable=True, odd=("ties", "empty"))
def running_sums():
    """Sums and products along the batch and along a row; the input itself goes out too."""

    def apply(p, x):
        rows = lax.cummax(x, axis=1)
        return jnp.cumsum(x, axis=0), jnp.cumprod(x, axis=1), rows, lax.cumsum(x, 1, True), x

    return {}, apply


@model("jax", "batch, 4", differentiable=True, odd=("ties", "empty"))
def products():
    """A product of a row, which has an odd gradient."""
    w = weights(12)
    return {"w": w(4, 4)}, lambda p, x: jnp.prod(jnp.tanh(x @ p["w"]) + 1.5, -1)


@model("jax", "batch, 8", differentiable=True)
def placed_by_sharding():
    """Trained on many devices: the layers say how their outputs lie."""
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    w = weights(13)
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    rows = NamedSharding(mesh, PartitionSpec("data"))

    def apply(p, x):
        x = lax.with_sharding_constraint(jnp.tanh(x @ p["a"]), rows)
        return lax.with_sharding_constraint(x @ p["b"], rows)

    return {"a": w(8, 16), "b": w(16, 2)}, apply


@model("equinox", "batch, 5", differentiable=True)
def equinox_as_it_is():
    """A module whose leaves are not all arrays, as its user has it in hand."""
    import equinox as eqx

    net = eqx.nn.MLP(5, 2, 8, 2, activation=jax.nn.softplus, key=jax.random.key(14))
    return net, lambda net, x: jax.vmap(net)(x)


@model(
    "jax", between(0, 3, "batch, length"), ints(3, "batch"),
    differentiable=True, odd=("ties", "nan", "empty"),
)  # fmt: skip
def branches():
    """One of three functions for each row, and a condition for the whole."""

    def apply(p, x, which):
        total = lambda x: jnp.sum(x) * p["gain"]  # noqa: E731
        most = lambda x: jnp.max(x)  # noqa: E731
        count = lambda x: jnp.sum(x > 1).astype(jnp.float32)  # noqa: E731
        rows = jax.vmap(lambda i, row: lax.switch(i, [total, most, count], row))(which, x)
        whole = lax.cond(x[0, 0] > 1.0, lambda a: a * 2, lambda a: a - 1, rows)
        return rows, whole

    return {"gain": jnp.float32(0.5)}, apply


@model("haiku", ints(1000, "batch, length"))
def hashed_features():
    """Words by a hash of bits, counted, and weighted by how rare they are."""
    import haiku as hk

    def forward(tokens):
        mixed = tokens.astype(jnp.uint32) * jnp.uint32(2654435761)
        mixed = (mixed ^ (mixed >> 15)) % jnp.uint32(32)
        counts = jax.nn.one_hot(mixed.astype(jnp.int32), 32).sum(1)
        rare = hk.get_parameter("rare", (32,), init=hk.initializers.RandomUniform(0.5, 2.0))
        x = jnp.log1p(counts) * rare
        x = x / jnp.linalg.norm(x, axis=1, keepdims=True)
        return hk.Linear(4)(x)

    net = hk.without_apply_rng(hk.transform(forward))
    return net.init(jax.random.key(15), jnp.zeros((1, 3), jnp.int32)), net.apply
