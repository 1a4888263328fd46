"""Attention of other kinds than a transformer's: over sets, latents, blocks, memories, a state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pax_export.export import symbolic_numpy
from tests.models.registry import ints, model, weights, yes_or_no


def _attend(p, asking, given, seen=None, heads=2):
    """Attention with heads; `seen` says which of the given count."""
    split = lambda x: x.reshape(*x.shape[:-1], heads, -1)  # noqa: E731
    q, k, v = split(asking @ p["q"]), split(given @ p["k"]), split(given @ p["v"])
    like = jnp.einsum("...ihd,...jhd->...hij", q, k) / jnp.sqrt(q.shape[-1])
    if seen is not None:
        like = jnp.where(seen[..., None, None, :], like, -1e9)
    out = jnp.einsum("...hij,...jhd->...ihd", jax.nn.softmax(like), v)
    return out.reshape(*out.shape[:-2], -1) @ p["o"]


def _block(w, width):
    inner = {name: w(width, width) for name in "qkvo"}
    return inner | {"a": w(width, 2 * width), "b": w(2 * width, width)}


def _after(p, x, more):
    x = x + more
    x = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return x + jax.nn.relu(x @ p["a"]) @ p["b"]


@model("jax", "batch, count, 3", yes_or_no("batch, count"), differentiable=True)
def set_transformer():
    """Sets of any size with holes: few points in between, and two seeds that gather."""
    w = weights(1)
    params = {
        "in": w(3, 8), "points": w(4, 8), "seeds": w(2, 8), "out": w(16, 5),
        "up": _block(w, 8), "down": _block(w, 8), "pool": _block(w, 8),
    }  # fmt: skip

    def apply(p, x, seen):
        x = x @ p["in"]
        points = jnp.broadcast_to(p["points"], (x.shape[0], 4, 8))
        points = _after(p["up"], points, _attend(p["up"], points, x, seen))
        x = _after(p["down"], x, _attend(p["down"], x, points))
        seeds = jnp.broadcast_to(p["seeds"], (x.shape[0], 2, 8))
        seeds = _after(p["pool"], seeds, _attend(p["pool"], seeds, x, seen))
        return seeds.reshape(x.shape[0], 16) @ p["out"]

    return params, apply


@model("jax", "batch, height, width, 3", differentiable=True)
def perceiver():
    """Latents look at an image of any size, and queries at the latents."""
    w = weights(2)
    params = {
        "latents": w(6, 8), "in": w(15, 8), "read": _block(w, 8), "think": _block(w, 8),
        "asked": w(5, 8), "answer": _block(w, 8), "out": w(8, 2),
    }  # fmt: skip

    def places(height, width):
        y, x = (symbolic_numpy.linspace(-1.0, 1.0, size) for size in (height, width))
        both = jnp.stack(jnp.meshgrid(y, x, indexing="ij"), -1)
        turned = both[..., None] * jnp.pi * 2.0 ** jnp.arange(3)
        return jnp.concatenate([jnp.sin(turned), jnp.cos(turned)], -1).reshape(height, width, 12)

    def apply(p, image):
        batch, height, width, _ = image.shape
        where = jnp.broadcast_to(places(height, width), (batch, height, width, 12))
        seen = jnp.concatenate([image, where], -1).reshape(batch, height * width, 15) @ p["in"]
        latents = jnp.broadcast_to(p["latents"], (batch, 6, 8))
        for _ in range(2):  # the same weights twice
            latents = _after(p["read"], latents, _attend(p["read"], latents, seen))
            latents = _after(p["think"], latents, _attend(p["think"], latents, latents))
        asked = jnp.broadcast_to(p["asked"], (batch, 5, 8))
        return _attend(p["answer"], asked, latents) @ p["out"]

    return params, apply


@model("jax", "batch, 4*chunks, 8", differentiable=True)
def retention():
    """RetNet in chunks of four: inside by decays of distances, between them by a state."""
    w = weights(3)
    params = {name: w(8, 8) for name in "qkvog"} | {"scale": jnp.ones(4)}
    decay = 1 - 2.0 ** (-3 - jnp.arange(2.0))
    apart = jnp.arange(4)[:, None] - jnp.arange(4)
    inside = jnp.where(apart >= 0, decay[:, None, None] ** jnp.maximum(apart, 0), 0.0)

    def apply(p, x):
        def chunks(a):
            return a.reshape(a.shape[0], -1, 4, 2, 4).transpose(1, 0, 3, 2, 4)

        q, k, v = (chunks(x @ p[name]) for name in "qkv")
        since, until = decay[:, None] ** (jnp.arange(4) + 1), decay[:, None] ** (3 - jnp.arange(4))

        def step(state, at):
            q, k, v = at
            here = jnp.einsum("bhid,bhjd->bhij", q, k) * inside
            out = jnp.einsum("bhij,bhjd->bhid", here, v)
            out = out + jnp.einsum("bhid,bhde->bhie", q, state) * since[..., None]
            more = jnp.einsum("bhjd,bhje->bhde", k * until[..., None], v)
            return state * (decay**4)[:, None, None] + more, out

        state, y = lax.scan(step, jnp.zeros((x.shape[0], 2, 4, 4)), (q, k, v))
        y = y.transpose(1, 0, 3, 2, 4)
        y = y * lax.rsqrt((y**2).mean(-1, keepdims=True) + 1e-5) * p["scale"]
        return jax.nn.silu(x @ p["g"]) * y.reshape(x.shape) @ p["o"], state

    return params, apply


@model("jax", "batch, 4*blocks, 8", constraints=("blocks >= 3",), differentiable=True)
def block_sparse_attention():
    """Each block of four sees itself, its neighbours on both sides, and the first one."""
    w = weights(4)
    params = {name: w(8, 8) for name in "qkvo"}

    def apply(p, x):
        batch, length, width = x.shape
        count = length // 4
        q, k, v = ((x @ p[name]).reshape(batch, count, 4, width) for name in "qkv")

        def around(a):
            before, after = jnp.roll(a, 1, axis=1), jnp.roll(a, -1, axis=1)
            first = jnp.broadcast_to(a[:, :1], a.shape)
            return jnp.concatenate([first, before, a, after], axis=2)

        here = jnp.arange(count)
        seen = jnp.stack([here > 1, here > 0, here >= 0, here < count - 1], -1)
        like = jnp.einsum("bnid,bnjd->bnij", q, around(k)) / jnp.sqrt(8.0)
        like = jnp.where(jnp.repeat(seen, 4, axis=1)[:, None], like, -jnp.inf)
        out = jnp.einsum("bnij,bnjd->bnid", jax.nn.softmax(like), around(v))
        return out.reshape(x.shape) @ p["o"]

    return params, apply


@model("jax", "batch, 8", ints(20, "batch, length"))
def nearest_words():
    """A language model beside a store of what it has seen: neighbours vote for their words."""
    w = weights(5)
    words = np.random.default_rng(5).integers(0, 20, 40)
    params = {
        "keys": w(40, 8, scale=1.0), "next": jnp.asarray(words), "out": w(8, 20), "mix": w(8),
    }  # fmt: skip

    def apply(p, state, before):
        apart = ((state[:, None] - p["keys"]) ** 2).sum(-1)
        near, which = lax.top_k(-apart, 6)
        shares = jax.nn.softmax(near)
        rows = jnp.arange(state.shape[0])[:, None]
        from_store = jnp.zeros((state.shape[0], 20)).at[rows, p["next"][which]].add(shares)
        said = jnp.zeros((state.shape[0], 20), bool).at[rows, before].set(True)
        from_model = jax.nn.softmax(jnp.where(said, -1e9, state @ p["out"]))
        gate = jax.nn.sigmoid(state @ p["mix"])[:, None]
        mixed = gate * from_store + (1 - gate) * from_model
        return jnp.log(mixed + 1e-9), mixed.argmax(-1)

    return params, apply


@model("jax", "batch, 6", ints(7, "batch"), differentiable=True)
def hierarchical_softmax():
    """Words are leaves of a tree of decisions: that of one word, and of all."""
    w = weights(6)
    nodes, turns, used = np.zeros((7, 3), int), np.zeros((7, 3)), np.zeros((7, 3))
    for leaf in range(7):
        node, path = leaf + 6, []
        while node:
            node, right = (node - 1) // 2, node % 2 == 0
            path.append((node, 1.0 if right else -1.0))
        for place, (inner, turn) in enumerate(reversed(path)):
            nodes[leaf, place], turns[leaf, place], used[leaf, place] = inner, turn, 1
    params = {"nodes": w(6, 6, scale=1.0)}

    def apply(p, x, word):
        def of(leaf):
            asked = jnp.einsum("...ni,...i->...n", p["nodes"][jnp.asarray(nodes)[leaf]], x)
            turn, counts = jnp.asarray(turns)[leaf], jnp.asarray(used)[leaf]
            return (jax.nn.log_sigmoid(turn * asked) * counts).sum(-1)

        each = lax.map(lambda leaf: of(jnp.full(x.shape[0], leaf)), jnp.arange(7))
        return of(word), jax.nn.logsumexp(each, axis=0), each.T

    return params, apply


@model("jax", "batch, 9, 4", differentiable=True)
def capsules():
    """Three rounds in which capsules choose whom they agree with."""
    w = weights(7)

    def squash(x):
        size = (x**2).sum(-1, keepdims=True)
        return size / (1 + size) * x * lax.rsqrt(size + 1e-7)

    def apply(p, x):
        votes = jnp.einsum("bid,iodk->biok", x, p["w"])

        def route(_, logits):
            shares = jax.nn.softmax(logits, axis=2)
            out = squash((shares[..., None] * votes).sum(1))
            return logits + jnp.einsum("biok,bok->bio", votes, out)

        logits = lax.fori_loop(0, 3, route, jnp.zeros(votes.shape[:-1]))
        out = squash((jax.nn.softmax(logits, axis=2)[..., None] * votes).sum(1))
        return jnp.sqrt((out**2).sum(-1) + 1e-9), out

    return {"w": w(9, 3, 4, 5, scale=0.5)}, apply


@model("jax", ints(30, "batch, history"), yes_or_no("batch, history"), "batch, 4")
def two_towers():
    """The ten best of fifty things that a user has not had yet."""
    w = weights(8)
    params = {"things": w(50, 8, scale=1.0), "user": w(12, 8), "mine": w(8, 8), "bias": w(50)}

    def apply(p, had, counts, about):
        seen = jnp.where(counts[..., None], p["things"][had], 0.0)
        mean = seen.sum(1) / jnp.maximum(counts.sum(1, keepdims=True), 1)
        user = jnp.tanh(jnp.concatenate([mean, about], -1) @ p["user"])
        things = p["things"] @ p["mine"]
        things = things / jnp.linalg.norm(things, axis=-1, keepdims=True)
        like = user @ things.T + p["bias"]
        rows = jnp.broadcast_to(jnp.arange(had.shape[0])[:, None], had.shape)
        like = like.at[rows, jnp.where(counts, had, 50)].set(-jnp.inf, mode="drop")
        best, which = lax.top_k(like, 10)
        return {"things": which, "scores": best, "shares": jax.nn.softmax(best)}

    return params, apply


@model("jax", "batch, length, 8", ints(50, "batch"), differentiable=True)
def turned_by_complex_numbers():
    """Rotary places as products of complex numbers, from any start, with grouped heads."""
    w = weights(9)
    params = {"q": w(8, 16), "k": w(8, 8), "v": w(8, 8), "o": w(16, 8)}
    speed = 1.0 / 100 ** (jnp.arange(2) / 2)

    def turned(x, at):
        pairs = lax.complex(x[..., 0::2], x[..., 1::2])
        turns = jnp.exp(1j * at[..., None] * speed)[:, :, None]
        both = pairs * turns
        return jnp.stack([both.real, both.imag], -1).reshape(x.shape)

    def apply(p, x, start):
        batch, length, _ = x.shape
        at = (start[:, None] + jnp.arange(length)).astype(jnp.float32)
        q = turned((x @ p["q"]).reshape(batch, length, 4, 4), at)
        k = turned((x @ p["k"]).reshape(batch, length, 2, 4), at)
        v = (x @ p["v"]).reshape(batch, length, 2, 4)
        k, v = jnp.repeat(k, 2, axis=2), jnp.repeat(v, 2, axis=2)
        like = jnp.einsum("bihd,bjhd->bhij", q, k) / 2
        like = jnp.where(jnp.tri(length, dtype=bool), like, -jnp.inf)
        out = jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(like), v)
        return out.reshape(batch, length, 16) @ p["o"]

    return params, apply
