"""Graphs: nodes and edges, as many as come."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.models.registry import Input, between, ints, model, real, weights, yes_or_no

_SIZES = [{"nodes": 5, "edges": 9}, {"nodes": 7, "edges": 4}, {"nodes": 3, "edges": 12}]
# An edge of a model with symbolic nodes may point to any of them.
_EDGES = Input("edges, 2", "int32", lambda rng, size, s: rng.integers(0, s["nodes"], size))
_GRAPHS = Input("nodes", "int32", lambda rng, size, _: rng.integers(0, 3, size))


@model("jax", "nodes, 4", _EDGES, sizes=_SIZES, differentiable=True)
def graph_attention():
    """Shares of neighbours: a softmax over the edges that end in one node."""
    w = weights(1)
    params = {"w": w(4, 2, 6), "from": w(2, 6), "to": w(2, 6), "out": w(12, 3)}

    def apply(p, x, edges):
        source, target = edges[:, 0], edges[:, 1]
        count = x.shape[0]
        h = jnp.einsum("nd,dhf->nhf", x, p["w"])
        score = (h * p["from"]).sum(-1)[source] + (h * p["to"]).sum(-1)[target]
        score = jax.nn.leaky_relu(score, 0.2)
        top = jax.ops.segment_max(score, target, count)
        top = jnp.where(jnp.isfinite(top), top, 0.0)
        e = jnp.exp(score - top[target])
        share = e / (jax.ops.segment_sum(e, target, count)[target] + 1e-9)
        mixed = jax.ops.segment_sum(share[..., None] * h[source], target, count)
        return jax.nn.elu(mixed).reshape(count, 12) @ p["out"]

    return params, apply


@model("linen", "batch, 6, 4", yes_or_no("batch, 6, 6"), differentiable=True)
def graph_convolution():
    """Neighbours as a matrix, with roots of degrees."""
    import flax.linen as nn

    class GCN(nn.Module):
        @nn.compact
        def __call__(self, x, near):
            near = (near | jnp.swapaxes(near, 1, 2) | jnp.eye(6, dtype=bool)).astype(x.dtype)
            root = lax.rsqrt(near.sum(-1))
            near = near * root[:, :, None] * root[:, None, :]
            for width in (8, 3):
                x = near @ nn.Dense(width)(nn.relu(x))
            return x, x.max(1)

    net = GCN()
    sample = jnp.zeros((1, 6, 4)), jnp.zeros((1, 6, 6), bool)
    return net.init(jax.random.key(2), *sample), net.apply


@model("nnx", "nodes, 4", _EDGES, _GRAPHS, sizes=_SIZES, differentiable=True)
def graph_isomorphism():
    """Sums over edges, then over the nodes of each of three graphs."""
    from flax import nnx

    class GIN(nnx.Module):
        def __init__(self, rngs):
            self.eps = nnx.Param(jnp.float32(0.1))
            self.first = nnx.Linear(4, 8, rngs=rngs)
            self.second = nnx.Linear(8, 8, rngs=rngs)
            self.out = nnx.Linear(8, 2, rngs=rngs)

        def __call__(self, x, edges, graph):
            for layer in (self.first, self.second):
                around = jax.ops.segment_sum(x[edges[:, 0]], edges[:, 1], x.shape[0])
                x = nnx.relu(layer((1 + self.eps[...]) * x + around))
            return self.out(jax.ops.segment_sum(x, graph, 3))

    graph, state = nnx.split(GIN(nnx.Rngs(3)))
    return state, lambda state, *args: nnx.merge(graph, state)(*args)


@model("haiku", real("batch, 5, 3", scale=2.0), ints(4, "batch, 5"), differentiable=True)
def schnet():
    """Continuous filters of distances between atoms, three rounds of messages."""
    import haiku as hk

    def forward(places, kinds):
        x = hk.Embed(4, 8)(kinds)
        apart = jnp.sqrt(((places[:, :, None] - places[:, None]) ** 2).sum(-1) + 1e-6)
        rings = jnp.exp(-2 * (apart[..., None] - jnp.arange(6.0)) ** 2)
        near = 0.5 * (jnp.cos(jnp.minimum(apart, 5) * jnp.pi / 5) + 1)
        for _ in range(3):
            kernel = hk.nets.MLP([8, 8], activation=jax.nn.softplus)(rings) * near[..., None]
            message = jnp.einsum("bijf,bjf->bif", kernel, hk.Linear(8)(x))
            x = x + hk.nets.MLP([8, 8], activation=jax.nn.softplus)(message)
        return hk.Linear(1)(x).sum((1, 2))

    net = hk.without_apply_rng(hk.transform(forward))
    sample = jnp.zeros((1, 5, 3)), jnp.zeros((1, 5), jnp.int32)
    return net.init(jax.random.key(4), *sample), net.apply


@model("jax", _EDGES, between(0.1, 1, "nodes"), sizes=_SIZES, odd=())
def page_rank():
    """The rank of pages by their links, until it stays."""

    def apply(p, edges, start):
        count = start.shape[0]
        out = jnp.zeros(count).at[edges[:, 0]].add(1.0)
        rank = start / start.sum()

        def going(state):
            old, new, i = state
            return (jnp.abs(new - old).sum() > 1e-6) & (i < 50)

        def step(state):
            _, rank, i = state
            given = rank / jnp.maximum(out, 1)
            got = jnp.zeros(count).at[edges[:, 1]].add(given[edges[:, 0]])
            lost = jnp.where(out == 0, rank, 0.0).sum()
            return rank, (1 - p["stay"]) / count + p["stay"] * (got + lost / count), i + 1

        return lax.while_loop(going, step, (jnp.zeros(count), rank, 0))[1]

    return {"stay": jnp.float32(0.85)}, apply


@model(
    "equinox",
    "batch, points, 3",
    yes_or_no("batch, points"),
    differentiable=True,
    odd=("ties", "nan", "empty"),
)
def point_net():
    """A set of points of any size: one network for each, and the largest of each feature."""
    import equinox as eqx

    class Net(eqx.Module):
        each: eqx.nn.MLP
        all: eqx.nn.MLP

        def __init__(self, key):
            a, b = jax.random.split(key)
            self.each = eqx.nn.MLP(3, 8, 12, 1, key=a)
            self.all = eqx.nn.MLP(8, 4, 12, 1, key=b)

        def __call__(self, points, there):
            h = jax.vmap(self.each)(points)
            return self.all(jnp.where(there[:, None], h, -jnp.inf).max(0))

    arrays, rest = eqx.partition(Net(jax.random.key(5)), eqx.is_array)
    return arrays, lambda arrays, x, m: jax.vmap(eqx.combine(arrays, rest))(x, m)
