"""What stands behind a network: searches, alignments, samples."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.models.registry import ints, lengths, model, weights


@model("jax", "batch, length, 6", odd=("ties", "nan", "empty"))
def ctc_greedy():
    """The best class of each frame, without repeats and blanks, to the left."""

    def apply(params, logits):
        best = jnp.argmax(logits, -1).astype(jnp.int32)
        before = jnp.pad(best[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
        keep = (best != 0) & (best != before)
        order = jnp.argsort(~keep, axis=1, stable=True)
        tokens = jnp.take_along_axis(jnp.where(keep, best, 0), order, axis=1)
        return tokens, keep.sum(1)

    return {}, apply


@model(
    "jax",
    "batch, length, 6",
    lengths("length"),
    ints(5, "batch, 3"),
    differentiable=True,
    constraints=("length >= 2",),
)
def ctc_loss():
    """The negative log-likelihood of labels, over all alignments."""

    def one(logits, length, labels):
        logs = jax.nn.log_softmax(logits)
        labels = labels + 1
        spread = jnp.zeros(7, jnp.int32).at[1::2].set(labels)
        skips = (spread != 0) & (spread != jnp.roll(spread, 2))
        start = jnp.full(7, -1e5).at[0].set(logs[0, 0]).at[1].set(logs[0, labels[0]])

        def step(alpha, at):
            index, now = at
            one = jnp.concatenate([jnp.array([-1e5]), alpha[:-1]])
            two = jnp.where(skips, jnp.concatenate([jnp.full(2, -1e5), alpha[:-2]]), -1e5)
            new = jnp.logaddexp(jnp.logaddexp(alpha, one), two) + now[spread]
            return jnp.where(index < length, new, alpha), None

        frames = jnp.arange(1, logits.shape[0])
        alpha, _ = lax.scan(step, start, (frames, logs[1:]))
        return -jnp.logaddexp(alpha[-1], alpha[-2])

    return {"scale": jnp.float32(1.0)}, lambda p, x, n, y: jax.vmap(one)(p["scale"] * x, n, y)


@model("jax", "batch, length, 5", odd=("ties", "empty"))
def crf_viterbi():
    """The best path of a linear chain: forward by a scan, back by one in reverse."""
    w = weights(1)

    def apply(params, scores):
        moves = params["moves"]

        def forward(best, now):
            through = best[:, :, None] + moves
            return through.max(1) + now, jnp.argmax(through, axis=1)

        steps = jnp.swapaxes(scores, 0, 1)
        best, back = lax.scan(forward, steps[0], steps[1:])
        last = jnp.argmax(best, -1)

        def trace(tag, pointers):
            before = jnp.take_along_axis(pointers, tag[:, None], axis=1)[:, 0]
            return before, tag

        first, tags = lax.scan(trace, last, back, reverse=True)
        return jnp.concatenate([first[None], tags]).T, best.max(-1)

    return {"moves": w(5, 5)}, apply


@model(
    "jax",
    "batch, length, 5",
    ints(5, "batch, length"),
    differentiable=True,
    constraints=("length >= 2",),
)
def crf_likelihood():
    """The log-likelihood of tags: the score of a path less the logarithm of all paths."""
    w = weights(2)

    def apply(params, scores, tags):
        moves = params["moves"]

        def forward(alpha, now):
            return jax.nn.logsumexp(alpha[:, :, None] + moves, axis=1) + now, None

        steps = jnp.swapaxes(scores, 0, 1)
        alpha, _ = lax.scan(forward, steps[0], steps[1:])
        unary = jnp.take_along_axis(scores, tags[..., None], -1)[..., 0].sum(-1)
        pairs = moves[tags[:, :-1], tags[:, 1:]].sum(-1)
        return unary + pairs - jax.nn.logsumexp(alpha, -1)

    return {"moves": w(5, 5)}, apply


@model("jax", "batch, 8")
def beam_search():
    """Three beams over a small recurrent network, for five steps."""
    w = weights(3)
    params = {"embed": w(10, 8, scale=0.5), "hidden": w(8, 8), "out": w(8, 10)}

    def apply(params, state):
        batch = state.shape[0]
        state = jnp.repeat(state[:, None], 3, axis=1)
        tokens = jnp.zeros((batch, 3), jnp.int32)
        scores = jnp.tile(jnp.array([0.0, -1e9, -1e9]), (batch, 1))
        words = jnp.zeros((batch, 3, 5), jnp.int32)

        def step(t, carry):
            state, tokens, scores, words = carry
            state = jnp.tanh(state @ params["hidden"] + params["embed"][tokens])
            logs = jax.nn.log_softmax(state @ params["out"])
            done = tokens == 9
            logs = jnp.where(done[..., None], jnp.full(10, -1e9).at[9].set(0.0), logs)
            total = (scores[..., None] + logs).reshape(batch, -1)
            scores, best = lax.top_k(total, 3)
            beam, tokens = best // 10, best % 10
            state = jnp.take_along_axis(state, beam[..., None], axis=1)
            words = jnp.take_along_axis(words, beam[..., None], axis=1)
            return state, tokens, scores, words.at[:, :, t].set(tokens)

        _, _, scores, words = lax.fori_loop(0, 5, step, (state, tokens, scores, words))
        return {"words": words, "scores": scores}

    return params, apply


@model("jax", "batch, 12", ints(2**31, "2", "uint32"), odd=("empty",))
def nucleus_sampling():
    """A token out of the most likely ones that hold 90 %, by a key that comes along."""

    def apply(params, logits, key):
        key = jax.random.wrap_key_data(key)
        order = jnp.argsort(-logits, axis=-1)
        ordered = jnp.take_along_axis(logits, order, -1) / params["temperature"]
        shares = jax.nn.softmax(ordered)
        outside = jnp.cumsum(shares, -1) - shares > 0.9
        kept = jnp.where(outside, -jnp.inf, ordered)
        drawn = jax.random.categorical(key, kept)
        return jnp.take_along_axis(order, drawn[:, None], -1)[:, 0]

    return {"temperature": jnp.float32(0.7)}, apply


@model("jax", ints(20, "batch", "int32"), rtol=1e-4)
def until_the_end():
    """Tokens are made until every row has its end, at most sixteen, in a while loop."""
    w = weights(4)
    params = {"next": w(20, 20, scale=2.0)}

    def apply(params, first):
        words = jnp.full((first.shape[0], 16), 19, jnp.int32).at[:, 0].set(first)

        def going(state):
            t, last, _ = state
            return (t < 16) & jnp.any(last != 19)

        def step(state):
            t, last, words = state
            new = jnp.argmax(params["next"][last], -1).astype(jnp.int32)
            new = jnp.where(last == 19, 19, new)
            return t + 1, new, lax.dynamic_update_slice(words, new[:, None], (0, t))

        _, _, words = lax.while_loop(going, step, (1, first, words))
        return words

    return params, apply


@model("jax", ints(6, "batch, m"), ints(6, "batch, n"))
def edit_distance():
    """Levenshtein's distance of rows of tokens, by a scan in a scan."""

    def one(a, b):
        first = jnp.arange(b.shape[0] + 1)

        def row(before, letter):
            def cell(left, at):
                up, corner, other = at
                new = jnp.minimum(jnp.minimum(left, up) + 1, corner + (letter != other))
                return new, new

            start = before[0] + 1
            _, rest = lax.scan(cell, start, (before[1:], before[:-1], b))
            return jnp.concatenate([start[None], rest]), None

        last, _ = lax.scan(row, first, a)
        return last[-1]

    return {}, lambda params, a, b: jax.vmap(one)(a, b)


@model("linen", "batch, frames, 6", ints(8, "batch, labels"), differentiable=True)
def transducer():
    """The joint network of an RNN transducer: all frames with all labels."""
    import flax.linen as nn

    class Joint(nn.Module):
        @nn.compact
        def __call__(self, frames, labels):
            heard = nn.RNN(nn.GRUCell(8))(frames)
            said = nn.RNN(nn.GRUCell(8))(nn.Embed(8, 8)(labels))
            both = nn.tanh(nn.Dense(8)(heard)[:, :, None] + nn.Dense(8)(said)[:, None])
            return nn.log_softmax(nn.Dense(9)(both))

    net = Joint()
    sample = jnp.zeros((1, 4, 6)), jnp.zeros((1, 3), jnp.int32)
    return net.init(jax.random.key(5), *sample), net.apply
