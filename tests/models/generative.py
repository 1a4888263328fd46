"""Models that draw: flows, diffusion, autoencoders, generators."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.models.registry import between, ints, model, real, weights

KEY = ints(2**31, "2", "uint32")


@model("equinox", "batch, 12", "batch, 3", differentiable=True)
def vae():
    """Noise comes along; the bound of the likelihood goes out."""
    import equinox as eqx

    class VAE(eqx.Module):
        encode: eqx.nn.MLP
        decode: eqx.nn.MLP

        def __init__(self, key):
            a, b = jax.random.split(key)
            self.encode = eqx.nn.MLP(12, 6, 16, 2, activation=jax.nn.softplus, key=a)
            self.decode = eqx.nn.MLP(3, 12, 16, 2, activation=jax.nn.softplus, key=b)

        def __call__(self, x, noise):
            mean, log = jnp.split(self.encode(x), 2)
            again = self.decode(mean + jnp.exp(0.5 * log) * noise)
            apart = 0.5 * jnp.sum(jnp.exp(log) + mean**2 - 1 - log)
            return again, -jnp.sum((again - x) ** 2) - apart

    arrays, rest = eqx.partition(VAE(jax.random.key(0)), eqx.is_array)
    return arrays, lambda arrays, x, e: jax.vmap(eqx.combine(arrays, rest))(x, e)


def _coupling(seed, count=3):
    w = weights(seed)
    return [{"in": w(2, 16), "bias": w(16), "out": w(16, 4, scale=0.1)} for _ in range(count)]


def _scale_and_shift(p, x):
    log, shift = jnp.split(jnp.tanh(x @ p["in"] + p["bias"]) @ p["out"], 2, -1)
    return jnp.tanh(log), shift


@model("jax", "batch, 4", differentiable=True)
def real_nvp():
    """The log-likelihood of a flow of coupling layers, and what it makes of the data."""

    def apply(params, x):
        total = jnp.zeros(x.shape[0])
        for p in params:
            a, b = jnp.split(x, 2, -1)
            log, shift = _scale_and_shift(p, a)
            x = jnp.concatenate([b * jnp.exp(log) + shift, a], -1)
            total = total + log.sum(-1)
        prior = jax.scipy.stats.norm.logpdf(x).sum(-1)
        return prior + total, x

    return _coupling(1), apply


@model("jax", KEY, between(-1, 1, "batch, 4"), odd=("empty",))
def real_nvp_sample():
    """The flow the other way, from noise that is drawn inside."""

    def apply(params, key, like):
        x = jax.random.normal(jax.random.wrap_key_data(key), like.shape)
        for p in reversed(params):
            b, a = jnp.split(x, 2, -1)
            log, shift = _scale_and_shift(p, a)
            x = jnp.concatenate([a, (b - shift) * jnp.exp(-log)], -1)
        return x

    return _coupling(2), apply


@model("jax", "batch, 6", differentiable=True)
def glow_step():
    """Channels mixed by a matrix whose determinant counts."""
    w = weights(3)

    def apply(p, x):
        y = (x - p["mean"]) * jnp.exp(p["log"])
        sign, size = jnp.linalg.slogdet(p["mix"])
        return y @ p["mix"], p["log"].sum() + size, sign

    return {"mean": w(6), "log": w(6, scale=0.1), "mix": w(6, 6)}, apply


@model("jax", between(-2.5, 2.5, "batch, 3"), differentiable=True)
def spline_flow():
    """Rational quadratic splines: each number finds its bin."""
    w = weights(4)

    def one(x, widths, heights, slopes):
        widths = jax.nn.softmax(widths) * 6
        heights = jax.nn.softmax(heights) * 6
        xs = jnp.concatenate([jnp.array([-3.0]), jnp.cumsum(widths) - 3])
        ys = jnp.concatenate([jnp.array([-3.0]), jnp.cumsum(heights) - 3])
        slopes = jnp.concatenate([jnp.ones(1), jax.nn.softplus(slopes) + 1e-2, jnp.ones(1)])
        i = jnp.clip(jnp.searchsorted(xs, x) - 1, 0, 4)
        t = (x - xs[i]) / widths[i]
        steep = heights[i] / widths[i]
        under = steep + (slopes[i + 1] + slopes[i] - 2 * steep) * t * (1 - t)
        y = ys[i] + heights[i] * (steep * t**2 + slopes[i] * t * (1 - t)) / under
        top = slopes[i + 1] * t**2 + 2 * steep * t * (1 - t) + slopes[i] * (1 - t) ** 2
        return y, 2 * jnp.log(steep) + jnp.log(top) - 2 * jnp.log(under)

    def apply(p, x):
        dims = jax.vmap(one)
        y, log = jax.vmap(lambda row: dims(row, p["w"], p["h"], p["s"]))(x)
        return y, log.sum(-1)

    return {"w": w(3, 5), "h": w(3, 5), "s": w(3, 4)}, apply


@model("jax", "batch, 8", differentiable=True)
def masked_autoregressive():
    """Each number is told from those before it, by masks on the weights."""
    w = weights(5)
    order_in, order_hidden = np.arange(8), np.arange(24) % 7
    first = jnp.asarray(order_in[:, None] <= order_hidden[None], jnp.float32)
    last = jnp.asarray(order_hidden[:, None] < np.tile(order_in, 2)[None], jnp.float32)

    def apply(p, x):
        h = jax.nn.relu(x @ (p["first"] * first) + p["bias"])
        mean, log = jnp.split(h @ (p["last"] * last), 2, -1)
        z = (x - mean) * jnp.exp(-jnp.clip(log, -3, 3))
        return z, -jnp.clip(log, -3, 3).sum(-1)

    return {"first": w(8, 24), "bias": w(24), "last": w(24, 16)}, apply


def _denoiser(seed):
    w = weights(seed)
    return {"in": w(6, 16), "time": w(8, 16), "mid": w(16, 16), "out": w(16, 6, scale=0.1)}


def _noise_in(p, x, t):
    speeds = jnp.exp(-jnp.arange(4) * 1.5)
    wave = jnp.concatenate([jnp.sin(t * speeds), jnp.cos(t * speeds)])
    h = jax.nn.silu(x @ p["in"] + wave @ p["time"])
    return jax.nn.silu(h @ p["mid"]) @ p["out"]


_BETAS = np.linspace(1e-3, 0.2, 10).astype(np.float32)
_KEPT = np.cumprod(1 - _BETAS).astype(np.float32)


@model("jax", "batch, 6", KEY, odd=("empty",))
def ddpm():
    """Ten steps from noise to a sample, each with noise of its own."""

    def apply(p, x, key):
        betas, kept = jnp.asarray(_BETAS), jnp.asarray(_KEPT)

        def step(i, state):
            x, key = state
            t = 9 - i
            key, now = jax.random.split(key)
            noise = _noise_in(p, x, t.astype(jnp.float32))
            mean = (x - betas[t] / jnp.sqrt(1 - kept[t]) * noise) / jnp.sqrt(1 - betas[t])
            fresh = jnp.where(t > 0, jax.random.normal(now, x.shape), 0.0)
            return mean + jnp.sqrt(betas[t]) * fresh, key

        return lax.fori_loop(0, 10, step, (x, jax.random.wrap_key_data(key)))[0]

    return _denoiser(6), apply


@model("jax", "batch, 6", between(1, 3, ""), differentiable=True)
def ddim():
    """Five steps without new noise, guided by a scale that comes along."""

    def apply(p, x, guidance):
        kept = jnp.asarray(_KEPT)[::-2]
        after = jnp.append(kept[1:], 1.0)

        def step(x, at):
            t, now, then = at
            noise = guidance * _noise_in(p, x, t) - (guidance - 1) * _noise_in(p, x, 0.0 * t)
            clean = jnp.clip((x - jnp.sqrt(1 - now) * noise) / jnp.sqrt(now), -3, 3)
            return jnp.sqrt(then) * clean + jnp.sqrt(1 - then) * noise, None

        return lax.scan(step, x, (jnp.arange(9.0, -1.0, -2.0), kept, after))[0]

    return _denoiser(7), apply


@model("linen", "batch, 8, 8, 2", between(0, 1, "batch"), ints(4, "batch"), differentiable=True)
def diffusion_transformer():
    """Time and class shift and scale every norm."""
    import flax.linen as nn

    class DiT(nn.Module):
        @nn.compact
        def __call__(self, image, time, label):
            x = nn.Conv(16, (2, 2), strides=(2, 2))(image).reshape(image.shape[0], 16, 16)
            angle = time[:, None] * jnp.exp(-jnp.arange(4.0))
            c = nn.Dense(16)(jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1))
            c = nn.silu(c + nn.Embed(4, 16)(label))
            for _ in range(2):
                parts = jnp.split(nn.Dense(96)(c)[:, None], 6, -1)
                bare = nn.LayerNorm(use_bias=False, use_scale=False)
                h = bare(x) * (1 + parts[0]) + parts[1]
                x = x + parts[2] * nn.MultiHeadDotProductAttention(num_heads=2)(h, h)
                h = bare(x) * (1 + parts[3]) + parts[4]
                x = x + parts[5] * nn.Dense(16)(nn.gelu(nn.Dense(32)(h)))
            y = nn.Dense(8)(x).reshape(-1, 4, 4, 2, 2, 2)
            return y.transpose(0, 1, 3, 2, 4, 5).reshape(-1, 8, 8, 2)

    net = DiT()
    sample = jnp.zeros((1, 8, 8, 2)), jnp.zeros(1), jnp.zeros(1, jnp.int32)
    return net.init(jax.random.key(1), *sample), net.apply


@model("nnx", "batch, 8", differentiable=True)
def gan_generator():
    """Images out of noise, by transposed convolutions and leaky units."""
    from flax import nnx

    class Generator(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(8, 4 * 4 * 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, use_running_average=True, rngs=rngs)
            self.up = nnx.ConvTranspose(8, 6, (4, 4), strides=(2, 2), rngs=rngs)
            self.last = nnx.ConvTranspose(6, 3, (4, 4), strides=(2, 2), rngs=rngs)

        def __call__(self, z):
            x = self.norm(self.first(z).reshape(-1, 4, 4, 8))
            x = nnx.leaky_relu(self.up(nnx.leaky_relu(x, 0.2)), 0.2)
            return jnp.tanh(self.last(x))

    graph, state = nnx.split(Generator(nnx.Rngs(2)))
    return state, lambda state, z: nnx.merge(graph, state)(z)


@model("haiku", "batch, 8, 8, 3")
def vq_vae():
    """The nearest of 16 codes at each place, and an image of these."""
    import haiku as hk

    def forward(x):
        h = hk.Conv2D(8, 4, stride=2)(x)
        flat = hk.Conv2D(6, 3)(jax.nn.relu(h)).reshape(-1, 6)
        book = hk.get_parameter("book", (16, 6), init=hk.initializers.RandomNormal())
        apart = (flat**2).sum(1, keepdims=True) - 2 * flat @ book.T + (book**2).sum(1)
        codes = jnp.argmin(apart, axis=1)
        q = flat + lax.stop_gradient(book[codes] - flat)
        q = q.reshape(x.shape[0], 4, 4, 6)
        y = hk.Conv2DTranspose(3, 4, stride=2)(jax.nn.relu(q))
        used = jax.nn.one_hot(codes, 16).mean(0)
        spread = jnp.exp(-jnp.sum(used * jnp.log(used + 1e-10)))
        return {"image": y, "codes": codes.reshape(x.shape[0], 4, 4), "spread": spread}

    net = hk.without_apply_rng(hk.transform(forward))
    return net.init(jax.random.key(3), jnp.zeros((1, 8, 8, 3))), net.apply


@model("jax", real("batch, 2"), KEY, odd=("empty",))
def langevin():
    """Steps along the slope of an energy, with a fresh key for each row and step."""
    w = weights(8)

    def energy(p, x):
        return jnp.tanh(x @ p["in"]) @ p["out"] + 0.5 * x @ x

    def apply(p, x, key):
        keys = jax.random.split(jax.random.wrap_key_data(key), 8)

        def step(x, key):
            noise = jax.random.normal(key, x.shape)
            slope = jax.vmap(jax.grad(energy, 1), (None, 0))(p, x)
            return x - 0.05 * slope + jnp.sqrt(0.1) * noise, None

        return lax.scan(step, x, keys)[0]

    return {"in": w(2, 8), "out": w(8)}, apply


@model("jax", between(-1, 1, "batch, 4"), KEY, odd=("empty",))
def one_key_each():
    """Every example draws with a key of its own: as many keys as there are rows."""

    def apply(p, x, key):
        keys = jax.random.split(jax.random.wrap_key_data(key), x.shape[0])
        drop = lambda key, row: jnp.where(jax.random.bernoulli(key, 0.8, row.shape), row, 0)  # noqa: E731
        return jax.vmap(drop)(keys, x) * p["scale"]

    return {"scale": jnp.float32(1.25)}, apply
