"""Networks with a state, over sequences of any length."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pax_export.export import symbolic_numpy
from tests.models.registry import ints, lengths, model, weights


@model("linen", "batch, length, 4", lengths("length"), differentiable=True)
def lstm_with_lengths():
    """Two layers; what is behind the end of a row changes nothing."""
    import flax.linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, length):
            x = nn.RNN(nn.LSTMCell(8))(x, seq_lengths=length)
            carry, x = nn.RNN(nn.LSTMCell(8), return_carry=True)(x, seq_lengths=length)
            return nn.Dense(3)(carry[1]), x

    net = Net()
    sample = jnp.zeros((1, 4, 4)), jnp.full(1, 4)
    return net.init(jax.random.key(0), *sample), net.apply


@model("linen", "batch, length, 4", lengths("length"), differentiable=True)
def bidirectional_gru():
    import flax.linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, length):
            both = nn.Bidirectional(nn.RNN(nn.GRUCell(6)), nn.RNN(nn.GRUCell(6)))
            return nn.Dense(3)(both(x, seq_lengths=length))

    net = Net()
    sample = jnp.zeros((1, 4, 4)), jnp.full(1, 4)
    return net.init(jax.random.key(1), *sample), net.apply


@model("nnx", "batch, length, 4", differentiable=True)
def nnx_lstm():
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.rnn = nnx.RNN(nnx.OptimizedLSTMCell(4, 8, rngs=rngs))
            self.out = nnx.Linear(8, 2, rngs=rngs)

        def __call__(self, x):
            return self.out(self.rnn(x)[:, -1])

    graph, state = nnx.split(Net(nnx.Rngs(0)))
    return state, lambda state, x: nnx.merge(graph, state)(x)


@model("haiku", "7, batch, 4", differentiable=True)
def haiku_deep_rnn():
    import haiku as hk

    def forward(x):
        core = hk.DeepRNN([hk.LSTM(6), jax.nn.relu, hk.GRU(5)])
        out, state = hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))
        return hk.Linear(2)(out), state[1]

    net = hk.without_apply_rng(hk.transform(forward))
    return net.init(jax.random.key(2), jnp.zeros((3, 1, 4))), net.apply


@model("equinox", ints(20, "batch, source"), ints(20, "batch, target"))
def translator():
    """A GRU reads, another writes and looks back with attention."""
    import equinox as eqx

    class Net(eqx.Module):
        words: eqx.nn.Embedding
        reader: eqx.nn.GRUCell
        writer: eqx.nn.GRUCell
        out: eqx.nn.Linear

        def __init__(self, key):
            a, b, c, d = jax.random.split(key, 4)
            self.words = eqx.nn.Embedding(20, 6, key=a)
            self.reader = eqx.nn.GRUCell(6, 8, key=b)
            self.writer = eqx.nn.GRUCell(14, 8, key=c)
            self.out = eqx.nn.Linear(16, 20, key=d)

        def __call__(self, source, target):
            def read(h, x):
                h = self.reader(x, h)
                return h, h

            last, memory = lax.scan(read, jnp.zeros(8), jax.vmap(self.words)(source))

            def write(carry, x):
                h, seen = carry
                h = self.writer(jnp.concatenate([x, seen]), h)
                seen = jax.nn.softmax(memory @ h) @ memory
                return (h, seen), self.out(jnp.concatenate([h, seen]))

            start = (last, jnp.zeros(8))
            return lax.scan(write, start, jax.vmap(self.words)(target))[1]

    arrays, rest = eqx.partition(Net(jax.random.key(3)), eqx.is_array)
    return arrays, lambda arrays, s, t: jax.vmap(eqx.combine(arrays, rest))(s, t)


@model("jax", "batch, frames, 6, 6, 2", differentiable=True)
def conv_lstm():
    w = weights(4)

    def apply(p, x):
        def conv(a, kernel):
            return lax.conv_general_dilated(
                a, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )

        def step(carry, frame):
            h, c = carry
            gates = conv(frame, p["x"]) + conv(h, p["h"]) + p["b"]
            i, f, g, o = jnp.split(gates, 4, -1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), None

        zero = jnp.zeros((x.shape[0], 6, 6, 3))
        (h, _), _ = lax.scan(step, (zero, zero), jnp.moveaxis(x, 1, 0))
        return h

    return {"x": w(3, 3, 2, 12), "h": w(3, 3, 3, 12), "b": w(12)}, apply


@model("jax", "batch, 24, 4", differentiable=True)
def state_space_by_fft():
    """S4D: its kernel is computed, and applied by an FFT."""
    w = weights(5)
    rates = jnp.tile(jnp.arange(1.0, 9.0), (4, 1))
    params = {"rate": jnp.log(rates * 0.1), "turn": rates, "c": w(4, 8), "d": w(4)}

    def apply(p, x):
        pole = -jnp.exp(p["rate"]) + 1j * p["turn"]
        powers = jnp.exp(pole[..., None] * 0.1 * jnp.arange(x.shape[1]))
        kernel = 2 * jnp.real(jnp.einsum("ds,dsl->dl", p["c"], powers))
        size = 2 * x.shape[1]
        line = jnp.fft.rfft(x, size, axis=1) * jnp.fft.rfft(kernel.T, size, axis=0)
        return jnp.fft.irfft(line, size, axis=1)[:, : x.shape[1]] + p["d"] * x

    return params, apply


@model("jax", "batch, length, 4", differentiable=True)
def long_convolution():
    """The same with a symbolic length: an FFT over an axis of any size."""
    w = weights(6)

    def apply(p, x):
        length = x.shape[1]
        kernel = jnp.exp(-jnp.exp(p["rate"]) * jnp.arange(length)[:, None]) * p["gain"]
        line = jnp.fft.rfft(x, axis=1) * jnp.fft.rfft(kernel, axis=0)
        return symbolic_numpy.irfft(line, length, axis=1)

    return {"rate": w(4), "gain": w(4)}, apply


@model("jax", "batch, length, 8", differentiable=True)
def rwkv():
    """Time mixing of RWKV, its sums kept small by the largest exponent so far."""
    w = weights(7)
    params = {"k": w(8, 8), "v": w(8, 8), "r": w(8, 8), "decay": w(8), "first": w(8), "mix": w(8)}

    def apply(p, x):
        before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        mixed = x * jax.nn.sigmoid(p["mix"]) + before * (1 - jax.nn.sigmoid(p["mix"]))
        k, v, r = mixed @ p["k"], mixed @ p["v"], jax.nn.sigmoid(mixed @ p["r"])

        def step(state, at):
            top, under, most = state
            k, v = at
            here = jnp.maximum(most, p["first"] + k)
            a, b = jnp.exp(most - here), jnp.exp(p["first"] + k - here)
            out = (a * top + b * v) / (a * under + b)
            new = jnp.maximum(most - jnp.exp(p["decay"]), k)
            a, b = jnp.exp(most - jnp.exp(p["decay"]) - new), jnp.exp(k - new)
            return (a * top + b * v, a * under + b, new), out

        zero = jnp.zeros((x.shape[0], 8))
        start = (zero, zero, zero - 1e30)
        _, y = lax.scan(step, start, (k.swapaxes(0, 1), v.swapaxes(0, 1)))
        return r * y.swapaxes(0, 1)

    return params, apply


@model("pax", "batch, length, 4", differentiable=True)
def pax_lstm():
    import pax_export as pax

    pax.seed_rng_key(6)

    class Net(pax.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.out = pax.LSTM(4, 8), pax.Linear(8, 3)

        def __call__(self, x):
            state = self.lstm.initial_state(x.shape[0])
            _, y = pax.scan(self.lstm, state, x, time_major=False)
            return self.out(y)

    return Net().eval()
