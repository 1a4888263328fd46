"""Methods older than networks: Gaussian processes, filters, neighbours, trees, clusters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import cho_factor, cho_solve, solve_triangular

from tests.models.registry import between, ints, model, real, weights


def _kernel(a, b, size=1.0):
    apart = ((a[:, None] - b[None]) ** 2).sum(-1)
    return jnp.exp(-0.5 * apart / size**2)


@model("jax", "batch, 2", differentiable=True)
def gaussian_process():
    """What 12 points say of others: means and variances."""
    w = weights(1)
    points = w(12, 2, scale=1.0)
    params = {"points": points, "values": jnp.sin(points.sum(1)), "size": jnp.float32(0.8)}

    def apply(p, x):
        kernel = _kernel(p["points"], p["points"], p["size"]) + 0.1 * jnp.eye(12)
        lower = jnp.linalg.cholesky(kernel)
        solved = cho_solve((lower, True), p["values"])
        cross = _kernel(x, p["points"], p["size"])
        inside = solve_triangular(lower, cross.T, lower=True)
        return cross @ solved, 1.1 - (inside**2).sum(0)

    return params, apply


@model("jax", "points, 2", "points", "batch, 2", odd=("ties",))
def gaussian_process_any_data():
    """The same, with data that come along, however many."""

    def apply(p, points, values, x):
        kernel = _kernel(points, points) + p["noise"] * jnp.eye(points.shape[0])
        solved = cho_solve(cho_factor(kernel, lower=True), values)
        return _kernel(x, points) @ solved

    return {"noise": jnp.float32(0.3)}, apply


_SYSTEM = {
    "a": np.array([[1, 0.1], [0, 0.95]], np.float32),
    "c": np.array([[1.0, 0.0]], np.float32),
    "q": np.eye(2, dtype=np.float32) * 0.05,
    "r": np.eye(1, dtype=np.float32) * 0.2,
}


def _kalman_step(p, state, seen):
    mean, cov = state
    mean, cov = p["a"] @ mean, p["a"] @ cov @ p["a"].T + p["q"]
    spread = p["c"] @ cov @ p["c"].T + p["r"]
    gain = jnp.linalg.solve(spread, p["c"] @ cov).T
    after = mean + gain @ (seen - p["c"] @ mean)
    return (after, cov - gain @ p["c"] @ cov), (after, cov - gain @ p["c"] @ cov, mean, cov)


@model("jax", "batch, time, 1", differentiable=True)
def kalman_filter():
    def one(p, seen):
        start = (jnp.zeros(2), jnp.eye(2))
        _, (means, covs, _, _) = lax.scan(lambda s, y: _kalman_step(p, s, y), start, seen)
        return means, covs

    params = jax.tree.map(jnp.asarray, _SYSTEM)
    return params, lambda p, seen: jax.vmap(lambda y: one(p, y))(seen)


@model("jax", "batch, time, 1", constraints=("time >= 2",))
def kalman_smoother():
    """There, and back with a scan in reverse."""

    def one(p, seen):
        start = (jnp.zeros(2), jnp.eye(2))
        last, (means, covs, before, wide) = lax.scan(
            lambda s, y: _kalman_step(p, s, y), start, seen
        )

        def back(state, at):
            mean, cov, before, wide = at
            later_mean, later_cov, later_before, later_wide = state
            gain = jnp.linalg.solve(later_wide, p["a"] @ cov).T
            new_mean = mean + gain @ (later_mean - later_before)
            new_cov = cov + gain @ (later_cov - later_wide) @ gain.T
            return (new_mean, new_cov, before, wide), new_mean

        end = (last[0], last[1], before[-1], wide[-1])
        rest = jax.tree.map(lambda a: a[:-1], (means, covs, before, wide))
        _, smooth = lax.scan(back, end, rest, reverse=True)
        return jnp.concatenate([smooth, last[0][None]])

    params = jax.tree.map(jnp.asarray, _SYSTEM)
    return params, lambda p, seen: jax.vmap(lambda y: one(p, y))(seen)


@model("jax", "batch, 3", odd=("ties", "nan", "empty"))
def nearest_neighbours():
    """The classes of the five nearest of thirty points vote."""
    w = weights(2)
    points = w(30, 3, scale=1.0)
    params = {"points": points, "labels": jnp.arange(30) % 4}

    def apply(p, x):
        apart = (x**2).sum(1)[:, None] - 2 * x @ p["points"].T + (p["points"] ** 2).sum(1)
        near, which = lax.top_k(-apart, 5)
        votes = jax.nn.one_hot(p["labels"][which], 4).sum(1)
        return jnp.argmax(votes, -1), votes, jnp.sqrt(jnp.maximum(-near, 0))

    return params, apply


@model(
    "jax", "points, 3", ints(4, "points"), "batch, 3", odd=("ties",), constraints=("points >= 3",)
)
def nearest_in_a_store():
    """The same in a store of any size that comes along."""

    def apply(p, points, labels, x):
        like = x @ points.T / jnp.sqrt((points**2).sum(1) + 1e-6)
        best, which = lax.top_k(like, 3)
        shares = jax.nn.softmax(best / p["heat"])
        return (jax.nn.one_hot(labels[which], 4) * shares[..., None]).sum(1)

    return {"heat": jnp.float32(0.5)}, apply


def _trees(seed, count, depth):
    rng = np.random.default_rng(seed)
    inner, leaves = 2**depth - 1, 2**depth
    return {
        "feature": jnp.asarray(rng.integers(0, 6, (count, inner)), jnp.int32),
        "split": jnp.asarray(rng.normal(0, 0.7, (count, inner)), jnp.float32),
        "leaf": jnp.asarray(rng.normal(0, 0.2, (count, leaves)), jnp.float32),
    }


@model("jax", "batch, 6", odd=("ties", "nan", "extreme", "empty"))
def boosted_trees():
    """Ten trees: each row goes down left or right, NaN to the left."""

    def tree(feature, split, leaf, x):
        node = jnp.zeros(x.shape[0], jnp.int32)
        for _ in range(3):
            value = jnp.take_along_axis(x, feature[node][:, None], axis=1)[:, 0]
            node = 2 * node + 1 + (value > split[node]).astype(jnp.int32)
        return leaf[node - 7]

    def apply(p, x):
        add = lambda total, t: (total + tree(t["feature"], t["split"], t["leaf"], x), None)  # noqa: E731
        total, _ = lax.scan(add, jnp.zeros(x.shape[0]), p)
        return jax.nn.sigmoid(total)

    return _trees(3, 10, 3), apply


@model("jax", "batch, 6", odd=("ties", "nan", "empty"))
def random_forest():
    """The same as a while loop for each row, the trees by vmap."""

    def down(tree, row):
        going = lambda node: node < 7  # noqa: E731
        step = lambda n: 2 * n + jnp.where(row[tree["feature"][n]] <= tree["split"][n], 1, 2)  # noqa: E731
        return tree["leaf"][lax.while_loop(going, step, 0) - 7]

    def apply(p, x):
        each = jax.vmap(jax.vmap(down, (0, None)), (None, 0))(p, x)
        return each.mean(1), jnp.std(each, axis=1)

    return _trees(4, 6, 3), apply


@model("jax", "count, 2", odd=("ties",), constraints=("count >= 4",))
def k_means():
    """Five rounds; the centres are sums over those that chose them."""

    def apply(p, x):
        def step(centres, _):
            apart = ((x[:, None] - centres[None]) ** 2).sum(-1)
            mine = jnp.argmin(apart, axis=1)
            total = jax.ops.segment_sum(x, mine, 4)
            count = jax.ops.segment_sum(jnp.ones(x.shape[0]), mine, 4)
            moved = total / jnp.maximum(count, 1)[:, None]
            return jnp.where((count > 0)[:, None], moved, centres), apart.min(1).sum()

        return lax.scan(step, p["start"], None, length=5)

    w = weights(5)
    return {"start": w(4, 2, scale=1.0)}, apply


@model("jax", "batch, 20, 4", differentiable=True, odd=("empty",))
def principal_components():
    """The variances along the axes of each cloud of points, and their sum."""

    def one(x):
        x = x - x.mean(0)
        values = jnp.linalg.svd(x, compute_uv=False)
        return values**2 / 19

    return {"scale": jnp.float32(1.0)}, lambda p, x: jax.vmap(one)(p["scale"] * x)


@model("jax", ints(5, "batch, time"))
def hidden_markov():
    """Forward in logarithms, and the state that is most likely at the end."""
    w = weights(6)

    def apply(p, seen):
        moves, shows = jax.nn.log_softmax(p["moves"]), jax.nn.log_softmax(p["shows"])

        def step(alpha, symbol):
            alpha = jax.nn.logsumexp(alpha[:, :, None] + moves, axis=1)
            return alpha + shows[:, symbol].T, None

        start = jnp.full((seen.shape[0], 3), -jnp.log(3.0))
        alpha, _ = lax.scan(step, start, seen.T)
        return jax.nn.logsumexp(alpha, -1), jnp.argmax(alpha, -1)

    return {"moves": w(3, 3, scale=1.0), "shows": w(3, 5, scale=1.0)}, apply


@model("jax", real("time"), ints(2**31, "2", "uint32"), odd=("ties",))
def particle_filter():
    """Thirty-two particles, drawn again after each observation."""

    def apply(p, seen, key):
        key = jax.random.wrap_key_data(key)

        def step(carry, y):
            particles, key = carry
            key, move, draw = jax.random.split(key, 3)
            particles = 0.9 * particles + p["noise"] * jax.random.normal(move, (32,))
            shares = jax.nn.softmax(-0.5 * ((y - particles) / 0.7) ** 2)
            places = (jnp.arange(32) + jax.random.uniform(draw)) / 32
            chosen = jnp.searchsorted(jnp.cumsum(shares), places)
            mean = (shares * particles).sum()
            return (particles[jnp.minimum(chosen, 31)], key), mean

        start = (jnp.linspace(-1, 1, 32), key)
        return lax.scan(step, start, seen)[1]

    return {"noise": jnp.float32(0.5)}, apply


@model("jax", "count, 3", between(0, 1, "count"), odd=())
def logistic_by_newton():
    """A regression is fitted to the data of the call, by six steps of Newton."""

    def loss(w, x, y):
        z = x @ w
        return jnp.mean(jax.nn.softplus(z) - y * z) + 0.05 * w @ w

    def apply(p, x, y):
        def step(_, w):
            return w - jnp.linalg.solve(jax.hessian(loss)(w, x, y), jax.grad(loss)(w, x, y))

        return lax.fori_loop(0, 6, step, p["start"])

    return {"start": jnp.zeros(3)}, apply


@model("jax", between(0, 1, "batch, m, 2"), between(0, 1, "batch, n, 2"), differentiable=True)
def sinkhorn():
    """The cost of carrying one cloud of points to another."""

    def one(p, a, b):
        cost = ((a[:, None] - b[None]) ** 2).sum(-1)
        m, n = cost.shape

        def step(_, fg):
            f, g = fg
            f = -p["heat"] * jax.nn.logsumexp((g[None] - cost) / p["heat"] - jnp.log(n), axis=1)
            g = -p["heat"] * jax.nn.logsumexp((f[:, None] - cost) / p["heat"] - jnp.log(m), axis=0)
            return f, g

        f, g = lax.fori_loop(0, 10, step, (jnp.zeros(m), jnp.zeros(n)))
        return f.mean() + g.mean()

    apply = lambda p, a, b: jax.vmap(lambda x, y: one(p, x, y))(a, b)  # noqa: E731
    return {"heat": jnp.float32(0.1)}, apply


@model("jax", "batch, 15", odd=("ties", "nan", "extreme", "empty"))
def robust_statistics():
    """Medians, quantiles, ranks and counts, with what is missing left out."""

    def apply(p, x):
        middle = jnp.nanmedian(x, axis=1)
        low, high = jnp.nanquantile(x, p["levels"], axis=1)
        ranks = jnp.argsort(jnp.argsort(x, axis=1), axis=1)
        counts = jax.vmap(lambda row: jnp.histogram(row, bins=5, range=(-2.0, 2.0))[0])(x)
        return {"middle": middle, "spread": high - low, "ranks": ranks, "counts": counts}

    return {"levels": jnp.array([0.25, 0.75])}, apply
