"""Learners of other kinds: reservoirs, soft trees, densities, teachers, codes, physics."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy import special

from pax_export.export import symbolic_numpy
from tests.models.registry import between, ints, lengths, model, real, weights


@model("jax", "batch, time, 3", lengths("time"))
def echo_state():
    """A reservoir that was never trained; a row gives the state at its end."""
    w = weights(1)
    inside = w(16, 16)
    inside = inside * 0.9 / jnp.abs(jnp.linalg.eigvals(inside)).max()
    params = {"in": w(3, 16), "inside": inside, "out": w(20, 2), "leak": jnp.float32(0.3)}

    def apply(p, x, length):
        def step(state, at):
            x, now = at
            new = jnp.tanh(x @ p["in"] + state @ p["inside"])
            new = (1 - p["leak"]) * state + p["leak"] * new
            state = jnp.where((now < length)[:, None], new, state)
            return state, state

        start = jnp.zeros((x.shape[0], 16))
        _, states = lax.scan(step, start, (x.swapaxes(0, 1), jnp.arange(x.shape[1])))
        last = jnp.take_along_axis(states, (length - 1)[None, :, None], axis=0)[0]
        first = jnp.concatenate([jnp.ones((x.shape[0], 1)), x[:, 0]], -1)
        return jnp.concatenate([first, last], -1) @ p["out"]

    return params, apply


@model("jax", "batch, 6", differentiable=True, odd=("ties", "empty", "extreme"))
def soft_trees():
    """Trees that go left and right at once: a leaf counts as the product of its way."""
    w = weights(2)
    params = {"split": w(5, 6, 7), "bias": w(5, 7), "leaf": w(5, 8, 3)}

    def one(p, x):
        right = jax.nn.sigmoid(x @ p["split"] + p["bias"])
        reached = jnp.ones((x.shape[0], 1))
        for depth in range(3):
            here = right[:, 2**depth - 1 : 2 ** (depth + 1) - 1]
            reached = jnp.stack([reached * (1 - here), reached * here], -1)
            reached = reached.reshape(x.shape[0], 2 ** (depth + 1))
        return reached @ p["leaf"]

    return params, lambda p, x: jax.vmap(one, (0, None))(p, x).mean(0)


def _sparsemax(x):
    """The nearest point where all shares are at least zero and sum to one."""
    ordered = -jnp.sort(-x, axis=-1)
    sums = jnp.cumsum(ordered, axis=-1) - 1
    count = jnp.arange(1, x.shape[-1] + 1)
    chosen = (count * ordered > sums).sum(-1, keepdims=True)
    level = jnp.take_along_axis(sums, chosen - 1, axis=-1) / chosen
    return jnp.maximum(x - level, 0.0)


@model("jax", "batch, 8", differentiable=True, odd=("ties",))
def tab_net():
    """Three looks at a table's row, each at few columns that were not much looked at before."""
    w = weights(3)
    params = {
        "mean": w(8, scale=0.3), "look": w(3, 4, 8), "a": w(8, 16), "b": w(3, 8, 16), "out": w(4, 2)
    }  # fmt: skip

    def apply(p, x):
        x = x - p["mean"]

        def gated(h):
            return h[:, :8] * jax.nn.sigmoid(h[:, 8:])

        h = gated(x @ p["a"])
        left, total, masks = jnp.ones_like(x), 0.0, []
        for step in range(3):
            mask = _sparsemax((h[:, 4:] @ p["look"][step]) * left)
            left = left * (1.3 - mask)
            h = gated((mask * x) @ p["a"])
            h = (h + gated(h @ p["b"][step])) * jnp.sqrt(0.5)
            total = total + jax.nn.relu(h[:, :4])
            masks.append(mask)
        return total @ p["out"], jnp.stack(masks, 1)

    return params, apply


@model("jax", "batch, 2", real("batch"), ints(2**31, "2", "uint32"), odd=("empty",))
def mixture_density():
    """Three bells for each row: how likely a number is, a draw, and shares below zero."""
    w = weights(4)
    params = {"a": w(2, 12), "b": w(12, 9)}

    def apply(p, x, y, key):
        share, mean, size = jnp.split(jnp.tanh(x @ p["a"]) @ p["b"], 3, -1)
        size = jax.nn.softplus(size) + 0.05
        away = (y[:, None] - mean) / size
        each = jax.nn.log_softmax(share) - 0.5 * away**2 - jnp.log(size * jnp.sqrt(2 * jnp.pi))
        key = jax.random.wrap_key_data(key)
        which, noise = jax.random.split(key)
        chosen = jax.random.categorical(which, share)[:, None]
        drawn = jax.random.normal(noise, (x.shape[0],))
        picked = jnp.take_along_axis(mean, chosen, 1) + drawn[:, None] * jnp.take_along_axis(
            size, chosen, 1
        )
        below = (jax.nn.softmax(share) * special.ndtr(-mean / size)).sum(-1)
        return special.logsumexp(each, axis=-1), picked[:, 0], below

    return params, apply


@model("jax", real("points, 3"), ints(4, "points"), differentiable=True, odd=("ties",))
def deep_sets_in_a_row():
    """Four sets of any sizes, one after the other: sums, means, largest, and shares inside."""
    w = weights(5)
    params = {"a": w(3, 8), "score": w(8), "b": w(32, 2)}

    def apply(p, points, of):
        h = jnp.tanh(points @ p["a"])
        count = jax.ops.segment_sum(jnp.ones(points.shape[0]), of, 4)
        total = jax.ops.segment_sum(h, of, 4)
        most = jax.ops.segment_max(h, of, 4)
        most = jnp.where(count[:, None] > 0, most, 0.0)
        score = h @ p["score"]
        score = jnp.exp(score - jax.ops.segment_max(score, of, 4)[of])
        share = score / jax.ops.segment_sum(score, of, 4)[of]
        chosen = jax.ops.segment_sum(share[:, None] * h, of, 4)
        mean = total / jnp.maximum(count, 1)[:, None]
        return jnp.concatenate([total, mean, most, chosen], -1) @ p["b"], share

    return params, apply


@model("jax", "batch, 5, 2", "batch, 6, 2", differentiable=True, odd=("empty",))
def soft_matching():
    """A loss of two sets in no order: shares by Sinkhorn, and a whole matching by greed."""

    def one(p, found, true):
        cost = jnp.abs(found[:, None] - true[None]).sum(-1) * p["weight"]

        def balance(_, log):
            log = log - jax.nn.logsumexp(log, axis=1, keepdims=True)
            return log - jax.nn.logsumexp(log, axis=0, keepdims=True)

        log = lax.fori_loop(0, 8, balance, -cost / 0.2)

        def choose(left, _):
            flat = jnp.argmin(left)
            row, column = flat // 6, flat % 6
            left = left.at[row, :].set(jnp.inf).at[:, column].set(jnp.inf)
            return left, (row, column)

        _, (rows, columns) = lax.scan(choose, lax.stop_gradient(cost), None, length=5)
        return (jnp.exp(log) * cost).sum(), cost[rows, columns].sum(), columns[jnp.argsort(rows)]

    def apply(p, found, true):
        return jax.vmap(lambda a, b: one(p, a, b))(found, true)

    return {"weight": jnp.float32(1.5)}, apply


@model("jax", "batch, count, 2", differentiable=True, odd=("empty",), constraints=("count >= 2",))
def bouncing_chain():
    """Springs between balls that bounce from a floor: twenty steps, and the slope of the end."""

    def roll(p, start):
        def step(state, _):
            at, speed = state
            link = jnp.diff(at, axis=0)
            long = jnp.sqrt((link**2).sum(-1, keepdims=True) + 1e-6)
            pull = p["stiff"] * (long - p["rest"]) * link / long
            force = jnp.pad(pull, ((0, 1), (0, 0))) - jnp.pad(pull, ((1, 0), (0, 0)))
            force = force + jnp.array([0.0, -1.0])
            speed = (speed + 0.02 * force) * (1 - p["drag"])
            at = at + 0.02 * speed
            under = at[:, 1:] < -2.0
            at = jnp.where(under & jnp.array([False, True]), -4.0 - at, at)
            speed = jnp.where(under, speed * jnp.array([1.0, -0.8]), speed)
            return (at, speed), (speed**2).sum()

        (at, _), energy = lax.scan(step, (start, jnp.zeros_like(start)), None, length=20)
        return at, energy

    def apply(p, start):
        at, energy = jax.vmap(lambda x: roll(p, x))(start)
        push = jax.grad(lambda x: roll(p, x)[0][0, 1])
        return at, energy, jax.vmap(push)(start)

    return {"stiff": jnp.float32(3.0), "rest": jnp.float32(0.7), "drag": jnp.float32(0.01)}, apply


@model("jax", "batch, 8, 2", differentiable=True, odd=("empty",))
def codes_with_straight_gradients():
    """Residual codes of two books; gradients go through the choice, and losses beside it."""
    w = weights(8)
    params = {"in": w(2, 4), "books": w(2, 12, 4, scale=1.0), "out": w(4, 2)}

    def apply(p, x):
        left, codes, losses = x @ p["in"], [], 0.0
        whole = jnp.zeros_like(left)
        for book in p["books"]:
            apart = ((left[..., None, :] - book) ** 2).sum(-1)
            code = jnp.argmin(apart, -1)
            near = book[code]
            losses = losses + ((lax.stop_gradient(left) - near) ** 2).mean((1, 2))
            losses = losses + 0.25 * ((left - lax.stop_gradient(near)) ** 2).mean((1, 2))
            near = left + lax.stop_gradient(near - left)
            whole, left = whole + near, left - near
            codes.append(code)
        used = jax.nn.one_hot(codes[0], 12).mean((0, 1))
        spread = jnp.exp(-(used * jnp.log(used + 1e-9)).sum())
        return whole @ p["out"], jnp.stack(codes, -1), losses, spread

    return params, apply


@model("nnx", "batch, 6", "batch, 6", differentiable=True, odd=("ties",))
def student_and_teacher():
    """Two views: a student learns from a teacher, that is its own past, and centred."""
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.hidden = nnx.Linear(6, 12, rngs=rngs)
            self.out = nnx.Linear(12, 5, use_bias=False, rngs=rngs)

        def __call__(self, x):
            return self.out(nnx.gelu(self.hidden(x)))

    graph, student = nnx.split(Net(nnx.Rngs(0)))
    past = nnx.state(Net(nnx.Rngs(1)))
    params = {"student": student, "past": past, "centre": jnp.linspace(-0.1, 0.1, 5)}

    def apply(p, one, two):
        mixed = jax.tree.map(lambda a, b: 0.99 * a + 0.01 * b, p["past"], p["student"])
        teacher = nnx.merge(graph, mixed)
        learner = nnx.merge(graph, p["student"])
        sure = jax.nn.softmax((teacher(one) - p["centre"]) / 0.04)
        loss = -(lax.stop_gradient(sure) * jax.nn.log_softmax(learner(two) / 0.1)).sum(-1)
        centre = 0.9 * p["centre"] + 0.1 * lax.stop_gradient(teacher(one)).mean(0)
        return loss, centre

    return params, apply


@model("jax", "batch, time, 4", differentiable=True)
def diagonal_states():
    """States that are complex numbers, all at once by an associative scan, both ways."""
    w = weights(10)
    params = {
        "decay": w(6), "turn": w(6, scale=1.0), "in": w(2, 4, 6), "out": w(2, 12, 4), "skip": w(4)
    }  # fmt: skip

    def apply(p, x):
        rate = jnp.exp(lax.complex(-jnp.exp(p["decay"]), p["turn"]))
        given = lax.complex(x @ p["in"][0], x @ p["in"][1])

        def join(one, two):
            return two[0] * one[0], two[0] * one[1] + two[1]

        rates = jnp.broadcast_to(rate, given.shape)
        _, there = symbolic_numpy.associative_scan(join, (rates, given), axis=1)
        _, back = symbolic_numpy.associative_scan(join, (rates, given), axis=1, reverse=True)
        both = jnp.concatenate([there, back], -1)
        return jax.nn.gelu(both.real @ p["out"][0] - both.imag @ p["out"][1] + x * p["skip"])

    return params, apply


@model("jax", ints(16, "batch, samples"))
def wavenet_by_rings():
    """One sample after the other: each layer keeps its past in a ring that is written around."""
    w = weights(11)
    gaps = (1, 2, 4)
    params = {"words": w(16, 6), "old": w(3, 6, 12), "new": w(3, 6, 12), "out": w(6, 16)}

    def apply(p, seen):
        batch = seen.shape[0]

        def step(state, sample):
            rings, at = state
            h, total, kept = p["words"][sample], 0.0, []
            for layer, (gap, ring) in enumerate(zip(gaps, rings)):
                place = at % gap
                past = lax.dynamic_index_in_dim(ring, place, 1, keepdims=False)
                kept.append(lax.dynamic_update_index_in_dim(ring, h, place, 1))
                both = past @ p["old"][layer] + h @ p["new"][layer]
                h = h + jnp.tanh(both[:, :6]) * jax.nn.sigmoid(both[:, 6:])
                total = total + h
            return (tuple(kept), at + 1), total @ p["out"]

        rings = tuple(jnp.zeros((batch, gap, 6)) for gap in gaps)
        (rings, _), logits = lax.scan(step, (rings, 0), seen.T)
        return logits.swapaxes(0, 1), rings[-1]

    return params, apply


@model("jax", "nodes, 4", ints(2, "nodes, nodes"), odd=("ties",), constraints=("nodes >= 4",))
def graph_unet():
    """The four best nodes of a graph alone for a while, and put back among the others."""
    w = weights(12)
    params = {"in": w(4, 8), "gate": w(8), "small": w(8, 8), "out": w(8, 3)}

    def spread(edges, h):
        edges = edges + jnp.eye(edges.shape[0])
        scale = lax.rsqrt(jnp.maximum(edges.sum(1), 1e-3))
        return (scale[:, None] * edges * scale) @ h

    def apply(p, nodes, edges):
        edges = jnp.maximum(edges, edges.T).astype(jnp.float32)
        h = jax.nn.relu(spread(edges, nodes @ p["in"]))
        score = h @ p["gate"] / jnp.linalg.norm(p["gate"])
        best, which = lax.top_k(score, 4)
        two = (edges @ edges > 0).astype(jnp.float32)
        small = h[which] * jnp.tanh(best)[:, None]
        small = jax.nn.relu(spread(two[which][:, which], small @ p["small"]))
        back = jnp.zeros_like(h).at[which].set(small)
        return spread(edges, (h + back) @ p["out"]), which

    return params, apply


@model("jax", between(0.1, 3, "batch"), between(0.1, 5, "batch, 2"), differentiable=True, odd=())
def special_functions():
    """Likelihoods of counts, waits and shares, with the functions that statistics need."""

    def apply(p, rate, shape):
        a, b = shape[:, 0], shape[:, 1]
        share = jax.nn.sigmoid(a - b)
        gamma = (a - 1) * jnp.log(rate) - b * rate + a * jnp.log(b) - special.gammaln(a)
        beta = special.xlogy(a, share) + special.xlog1py(b, -share) - special.betaln(a, b)
        return {
            "gamma": gamma, "beta": beta, "digamma": special.digamma(a + p["more"]),
            "bessel": special.i0e(rate) + special.i1e(rate), "erf": special.erfinv(2 * share - 1),
            "normal": special.log_ndtr(-rate), "probit": special.ndtri(share),
            "entropy": special.entr(share), "zeta": special.zeta(a + 1.5, b),
        }  # fmt: skip

    return {"more": jnp.float32(0.5)}, apply


@model("jax", "batch, m, 3", "batch, n, 3", differentiable=True, odd=("empty",))
def soft_time_warp():
    """Two series of other lengths side by side: the softest way, row by row."""

    def one(p, a, b):
        cost = ((a[:, None] - b[None]) ** 2).sum(-1)

        def soft(*options):
            return -p["heat"] * jax.nn.logsumexp(-jnp.stack(options) / p["heat"], axis=0)

        def row(above, costs):
            def cell(left, at):
                cost, up, corner = at
                new = cost + soft(left, up, corner)
                return new, new

            _, new = lax.scan(cell, jnp.float32(1e6), (costs, above[1:], above[:-1]))
            new = jnp.concatenate([jnp.full(1, 1e6), new])
            return new, None

        first = jnp.concatenate([jnp.zeros(1), jnp.full(b.shape[0], 1e6)])
        last, _ = lax.scan(row, first, cost)
        return last[-1]

    apply = lambda p, a, b: jax.vmap(lambda x, y: one(p, x, y))(a, b)  # noqa: E731
    return {"heat": jnp.float32(0.5)}, apply


@model("jax", "points, 2", ints(2**31, "2", "uint32"), odd=("ties",), constraints=("points >= 2",))
def line_by_consensus():
    """Lines through pairs that are drawn; the one that most points are near to wins."""

    def apply(p, points, key):
        keys = jax.random.split(jax.random.wrap_key_data(key), 12)

        def tried(key):
            one, two = jax.random.randint(key, (2,), 0, points.shape[0])
            along = points[two] - points[one]
            normal = jnp.stack([-along[1], along[0]])
            normal = normal / jnp.sqrt((normal**2).sum() + 1e-9)
            apart = jnp.abs((points - points[one]) @ normal)
            return (apart < p["near"]).sum(), normal, points[one] @ normal

        counts, normals, offsets = jax.vmap(tried)(keys)
        best = jnp.argmax(counts)
        inside = jnp.abs(points @ normals[best] - offsets[best]) < p["near"]
        middle = jnp.average(points, axis=0, weights=inside.astype(jnp.float32) + 1e-6)
        return counts, normals[best], middle, jnp.where(inside, 1, 0)

    return {"near": jnp.float32(0.4)}, apply
