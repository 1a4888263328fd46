"""Language models of every kind, from BERT to Mamba."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pax_export.export import symbolic_numpy
from tests.models.registry import ints, lengths, model, weights, yes_or_no

TOKENS = ints(40, "batch, length")


@model("linen", TOKENS, yes_or_no("batch, length"))
def bert():
    import flax.linen as nn

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            h = nn.MultiHeadDotProductAttention(num_heads=2)(x, x, mask=mask)
            x = nn.LayerNorm(epsilon=1e-12)(x + h)
            h = nn.Dense(16)(nn.gelu(nn.Dense(32)(x), approximate=False))
            return nn.LayerNorm(epsilon=1e-12)(x + h)

    class Bert(nn.Module):
        @nn.compact
        def __call__(self, tokens, filled):
            embed = nn.Embed(40, 16)
            positions = nn.Embed(32, 16)(jnp.arange(tokens.shape[1]))
            x = nn.LayerNorm(epsilon=1e-12)(embed(tokens) + positions)
            mask = nn.make_attention_mask(filled, filled)
            for _ in range(2):
                x = Layer()(x, mask)
            pooled = nn.tanh(nn.Dense(16)(x[:, 0]))
            return {"pooled": pooled, "words": embed.attend(nn.Dense(16)(x))}

    net = Bert()
    tokens = jnp.zeros((1, 4), jnp.int32)
    return net.init(jax.random.key(0), tokens, tokens > -1), net.apply


@model("nnx", TOKENS)
def gpt():
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm1, self.norm2 = nnx.LayerNorm(16, rngs=rngs), nnx.LayerNorm(16, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
            self.wide, self.back = nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)

        def __call__(self, x, mask):
            x = x + self.attention(self.norm1(x), mask=mask)
            return x + self.back(nnx.gelu(self.wide(self.norm2(x))))

    class GPT(nnx.Module):
        def __init__(self, rngs):
            self.words, self.places = nnx.Embed(40, 16, rngs=rngs), nnx.Embed(32, 16, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(2)])
            self.norm = nnx.LayerNorm(16, rngs=rngs)

        def __call__(self, tokens):
            mask = nnx.make_causal_mask(tokens)
            x = self.words(tokens) + self.places(jnp.arange(tokens.shape[-1]))
            for block in self.blocks:
                x = block(x, mask)
            return self.words.attend(self.norm(x))

    graph, state = nnx.split(GPT(nnx.Rngs(0)))
    return state, lambda state, tokens: nnx.merge(graph, state)(tokens)


_HEADS, _SIZE = 2, 8


def _decoder(seed, layers=2, vocabulary=40):
    w, width = weights(seed), _HEADS * _SIZE
    return {
        "embed": w(vocabulary, width, scale=0.3),
        "layers": [
            {
                "qkv": w(width, 3 * width),
                "out": w(width, width),
                "up": w(width, 2 * width),
                "down": w(2 * width, width),
            }
            for _ in range(layers)
        ],
    }


def _cached_step(params, token, cache, position):
    """One token through the decoder: logits, and the caches with its keys and values in them."""
    x = params["embed"][token]
    new = []
    for p, (keys, values) in zip(params["layers"], cache):
        q, k, v = jnp.split(jax.nn.standardize(x) @ p["qkv"], 3, -1)
        q, k, v = (y.reshape(-1, 1, _HEADS, _SIZE) for y in (q, k, v))
        keys = lax.dynamic_update_slice_in_dim(keys, k, position, axis=1)
        values = lax.dynamic_update_slice_in_dim(values, v, position, axis=1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, keys) * _SIZE**-0.5
        seen = jnp.arange(keys.shape[1]) <= position
        shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", shares, values)
        x = x + mixed.reshape(x.shape) @ p["out"]
        x = x + jax.nn.gelu(jax.nn.standardize(x) @ p["up"]) @ p["down"]
        new.append((keys, values))
    return x @ params["embed"].T, new


@model("jax", ints(40, "batch"), "2, 2, batch, 12, 2, 8", ints(12, ""))
def gpt_step_with_cache():
    """One step of decoding; the caches go in and come out."""

    def apply(params, token, cache, position):
        pairs = [(cache[i, 0], cache[i, 1]) for i in range(2)]
        logits, new = _cached_step(params, token, pairs, position)
        return {"logits": logits, "cache": jnp.stack([jnp.stack(pair) for pair in new])}

    return _decoder(1), apply


@model("jax", ints(40, "batch, prompt"), constraints=("prompt <= 12",))
def gpt_generate():
    """The prompt fills the caches, then six tokens are made greedily, in two scans."""

    def apply(params, prompt):
        batch, length = prompt.shape
        shape = (batch, length + 6, _HEADS, _SIZE)
        cache = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in params["layers"]]

        def read(carry, token):
            cache, position, _ = carry
            logits, cache = _cached_step(params, token, cache, position)
            return (cache, position + 1, jnp.argmax(logits, -1).astype(jnp.int32)), None

        def write(carry, _):
            *_, token = carry
            carry, _ = read(carry, token)
            return carry, token

        start = (cache, jnp.int32(0), jnp.zeros(batch, jnp.int32))
        carry, _ = lax.scan(read, start, prompt.T)
        _, made = lax.scan(write, carry, None, length=6)
        return made.T

    return _decoder(2), apply


@model("haiku", TOKENS)
def t5_encoder():
    """Relative positions in buckets, RMS norms, a gated feed-forward layer."""
    import haiku as hk

    def bucket(apart):
        side = jnp.where(apart > 0, 4, 0)
        size = jnp.abs(apart)
        far = 2 + (jnp.log(jnp.maximum(size, 1) / 2) / jnp.log(16 / 2) * 2).astype(jnp.int32)
        return side + jnp.where(size < 2, size, jnp.minimum(far, 3))

    def forward(tokens):
        x = hk.Embed(40, 16)(tokens)
        places = jnp.arange(tokens.shape[1])
        table = hk.get_parameter("relative", (8, 2), init=hk.initializers.RandomNormal(0.5))
        bias = table[bucket(places[None, :] - places[:, None])].transpose(2, 0, 1)
        for _ in range(2):
            h = hk.RMSNorm(-1)(x)
            q, k, v = (hk.Linear(16, with_bias=False)(h) for _ in range(3))
            q, k, v = (y.reshape(*y.shape[:2], 2, 8) for y in (q, k, v))
            shares = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias)
            mixed = jnp.einsum("bhqk,bkhd->bqhd", shares, v).reshape(h.shape)
            x = x + hk.Linear(16, with_bias=False)(mixed)
            h = hk.RMSNorm(-1)(x)
            x = x + hk.Linear(16)(jax.nn.gelu(hk.Linear(32)(h)) * hk.Linear(32)(h))
        return hk.RMSNorm(-1)(x)

    net = hk.without_apply_rng(hk.transform(forward))
    return net.init(jax.random.key(1), jnp.zeros((1, 4), jnp.int32)), net.apply


@model("jax", TOKENS)
def llama():
    """Rotary positions, grouped queries, SwiGLU, RMS norms."""
    w, width = weights(4), 16

    def layer():
        return {
            "q": w(width, 16), "k": w(width, 8), "v": w(width, 8), "o": w(16, width),
            "gate": w(width, 32), "up": w(width, 32), "down": w(32, width),
            "norm1": jnp.ones(width), "norm2": jnp.ones(width),
        }  # fmt: skip

    params = {"embed": w(40, width, scale=0.5), "layers": [layer(), layer()], "head": w(width, 40)}

    def norm(x, gain):
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain

    def rotate(x):
        half = x.shape[-1] // 2
        speed = 10000.0 ** (-jnp.arange(half) / half)
        angle = jnp.arange(x.shape[1])[:, None] * speed
        sin, cos = jnp.sin(angle)[:, None], jnp.cos(angle)[:, None]
        a, b = x[..., :half], x[..., half:]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def apply(params, tokens):
        x = params["embed"][tokens]
        batch, length = tokens.shape
        causal = jnp.tril(jnp.ones((length, length), bool))
        for p in params["layers"]:
            h = norm(x, p["norm1"])
            q = rotate((h @ p["q"]).reshape(batch, length, 4, 4))
            k = rotate((h @ p["k"]).reshape(batch, length, 2, 4))
            v = (h @ p["v"]).reshape(batch, length, 2, 4)
            k, v = jnp.repeat(k, 2, axis=2), jnp.repeat(v, 2, axis=2)
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2
            shares = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo("float32").min), -1)
            mixed = jnp.einsum("bhqk,bkhd->bqhd", shares, v)
            x = x + mixed.reshape(batch, length, 16) @ p["o"]
            h = norm(x, p["norm2"])
            x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
        return x @ params["head"]

    return params, apply


@model("jax", "batch, length, 8", differentiable=True, odd=("empty",))
def mixture_of_experts():
    """Each token goes to the two best of four experts; the rest of a full expert is dropped."""
    w = weights(5)
    params = {"router": w(8, 4), "up": w(4, 8, 16, scale=0.3), "down": w(4, 16, 8, scale=0.3)}

    def apply(params, x):
        flat = x.reshape(-1, 8)
        shares = jax.nn.softmax(flat @ params["router"])
        best, which = lax.top_k(shares, 2)
        best = best / best.sum(-1, keepdims=True)
        chosen = jax.nn.one_hot(which, 4)
        order = jnp.cumsum(chosen.sum(1), axis=0) - 1
        gates = jnp.einsum("tke,tk->te", chosen, best) * (order < 24)
        hidden = jax.nn.relu(jnp.einsum("td,edh->teh", flat, params["up"]))
        out = jnp.einsum("teh,ehd,te->td", hidden, params["down"], gates)
        return {"out": out.reshape(x.shape), "load": chosen.sum((0, 1))}

    return params, apply


@model("jax", ints(40, "batch, length"))
def expert_dispatch():
    """Experts by capacity: tokens are scattered into the places of their expert, and back."""
    w = weights(6)
    params = {"embed": w(40, 8, scale=1.0), "router": w(8, 4), "experts": w(4, 8, 8, scale=0.3)}

    def apply(params, tokens):
        x = params["embed"][tokens].reshape(-1, 8)
        shares = jax.nn.softmax(x @ params["router"])
        expert = jnp.argmax(shares, -1)
        hot = jax.nn.one_hot(expert, 4, dtype=jnp.int32)
        place = ((jnp.cumsum(hot, 0) - 1) * hot).sum(-1)
        slots = jnp.zeros((4, 16, 8)).at[expert, place].set(x, mode="drop")
        done = jnp.tanh(jnp.einsum("ecd,edf->ecf", slots, params["experts"]))
        back = done.at[expert, place].get(mode="fill", fill_value=0.0)
        back = back * jnp.take_along_axis(shares, expert[:, None], 1)
        return back.reshape(*tokens.shape, 8)

    return params, apply


def _mamba_params(seed):
    w = weights(seed)
    return {
        "in": w(8, 32), "conv": w(4, 1, 16, scale=0.5), "dt": w(16, 16), "bc": w(16, 8),
        "log_a": jnp.log(jnp.tile(jnp.arange(1.0, 5.0), (16, 1))), "d": jnp.ones(16),
        "out": w(16, 8),
    }  # fmt: skip


@model("jax", "batch, 11, 8", differentiable=True)
def mamba():
    """The selective state space of Mamba, all steps at once by an associative scan."""

    def apply(p, x):
        h, gate = jnp.split(x @ p["in"], 2, -1)
        h = lax.conv_general_dilated(
            h, p["conv"], (1,), [(3, 0)], dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=16,
        )  # fmt: skip
        h = jax.nn.silu(h)
        step = jax.nn.softplus(h @ p["dt"])
        b, c = jnp.split(h @ p["bc"], 2, -1)
        decay = jnp.exp(-step[..., None] * jnp.exp(p["log_a"]))
        added = (step * h)[..., None] * b[:, :, None, :]

        def join(left, right):
            return left[0] * right[0], left[1] * right[0] + right[1]

        _, states = symbolic_numpy.associative_scan(join, (decay, added), axis=1)
        y = jnp.einsum("blds,bls->bld", states, c) + p["d"] * h
        return (y * jax.nn.silu(gate)) @ p["out"]

    return _mamba_params(7), apply


@model("jax", "batch, length, 8", differentiable=True)
def mamba_by_scan():
    """The same, step after step, with the last state beside."""

    def apply(p, x):
        h, gate = jnp.split(x @ p["in"], 2, -1)
        h = jax.nn.silu(h)
        step = jax.nn.softplus(h @ p["dt"])
        b, c = jnp.split(h @ p["bc"], 2, -1)

        def one(state, at):
            h, step, b, c = at
            decay = jnp.exp(-step[..., None] * jnp.exp(p["log_a"]))
            state = decay * state + (step * h)[..., None] * b[:, None, :]
            return state, jnp.einsum("bds,bs->bd", state, c)

        steps = jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), (h, step, b, c))
        state, y = lax.scan(one, jnp.zeros((x.shape[0], 16, 4)), steps)
        y = jnp.swapaxes(y, 0, 1) + p["d"] * h
        return (y * jax.nn.silu(gate)) @ p["out"], state

    return _mamba_params(8), apply


@model("equinox", TOKENS, lengths("length"))
def sentence_encoder():
    """The mean over what is filled, of length one, and the likeness of all pairs."""
    import equinox as eqx

    class Encoder(eqx.Module):
        embed: eqx.nn.Embedding
        attention: eqx.nn.MultiheadAttention
        norm: eqx.nn.LayerNorm

        def __init__(self, key):
            a, b = jax.random.split(key)
            self.embed = eqx.nn.Embedding(40, 8, key=a)
            self.attention = eqx.nn.MultiheadAttention(2, 8, key=b)
            self.norm = eqx.nn.LayerNorm(8)

        def __call__(self, tokens, length):
            filled = jnp.arange(tokens.shape[0]) < length
            x = jax.vmap(self.embed)(tokens)
            mask = jnp.broadcast_to(filled, (x.shape[0], x.shape[0]))
            x = jax.vmap(self.norm)(x + self.attention(x, x, x, mask=mask))
            mean = jnp.where(filled[:, None], x, 0).sum(0) / length
            return mean / jnp.linalg.norm(mean)

    arrays, rest = eqx.partition(Encoder(jax.random.key(3)), eqx.is_array)

    def apply(arrays, tokens, length):
        codes = jax.vmap(eqx.combine(arrays, rest))(tokens, length)
        return codes, codes @ codes.T

    return arrays, apply


@model("jax", "batch, length, 8", differentiable=True)
def linear_attention():
    """Attention without softmax: sums of outer products up to each position."""
    w = weights(9)

    def apply(p, x):
        q, k, v = jnp.split(x @ p["qkv"], 3, -1)
        q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
        seen = jnp.cumsum(k[..., :, None] * v[..., None, :], axis=1)
        total = jnp.cumsum(k, axis=1)
        return jnp.einsum("bld,bldv->blv", q, seen) / jnp.sum(q * total, -1, keepdims=True)

    return {"qkv": w(8, 24)}, apply


@model("pax", "batch, length, 16", differentiable=True)
def pax_transformer():
    import pax_export as pax

    pax.seed_rng_key(5)
    return pax.nets.Transformer(16, 2, 2, 0.1).eval()


@model("nnx", ints(60, "batch, 6"), "batch, 4", differentiable=True)
def recommender():
    """Wide and deep: crossed categories, hashed, beside a small network."""
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.table = nnx.Embed(64, 4, rngs=rngs)
            self.wide = nnx.Embed(128, 1, rngs=rngs)
            self.deep = nnx.Sequential(
                nnx.Linear(28, 16, rngs=rngs), nnx.relu, nnx.Linear(16, 1, rngs=rngs)
            )

        def __call__(self, categories, numbers):
            crossed = (categories[:, :-1] * 31 + categories[:, 1:] * 17) % 128
            wide = self.wide(crossed).sum((1, 2))
            codes = self.table(categories)
            pairs = 0.5 * (codes.sum(1) ** 2 - (codes**2).sum(1)).sum(-1)
            deep = jnp.concatenate([codes.reshape(codes.shape[0], -1), numbers], -1)
            return jax.nn.sigmoid(wide + pairs + self.deep(deep)[:, 0])

    graph, state = nnx.split(Net(nnx.Rngs(4)))
    return state, lambda state, c, n: nnx.merge(graph, state)(c, n)
