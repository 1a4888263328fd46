"""Sound: spectra, vocoders, filters, recognisers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.models.registry import between, ints, model, weights

_SOUNDS = [{"batch": 2, "samples": 96}, {"batch": 1, "samples": 130}, {"batch": 3, "samples": 64}]


def _mel_bank(bands, bins):
    """Triangles on the mel scale."""
    mel = np.linspace(0, 2595 * np.log10(1 + 4000 / 700), bands + 2)
    hertz = 700 * (10 ** (mel / 2595) - 1)
    at = np.linspace(0, 4000, bins)[:, None]
    up = (at - hertz[:-2]) / (hertz[1:-1] - hertz[:-2])
    down = (hertz[2:] - at) / (hertz[2:] - hertz[1:-1])
    return jnp.asarray(np.maximum(0, np.minimum(up, down)), jnp.float32)


@model("jax", "batch, samples", sizes=_SOUNDS, constraints=("samples >= 32",))
def mel_spectrogram():
    """Frames, a window, a Fourier transform, mel bands, logarithms."""
    params = {"window": jnp.hanning(32).astype(jnp.float32), "bank": _mel_bank(8, 17)}

    def apply(params, sound):
        count = (sound.shape[1] - 32) // 16 + 1
        index = jnp.arange(count)[:, None] * 16 + jnp.arange(32)[None]
        frames = sound[:, index] * params["window"]
        power = jnp.abs(jnp.fft.rfft(frames)) ** 2
        return jnp.log(power @ params["bank"] + 1e-5)

    return params, apply


@model("jax", "batch, 200", differentiable=True)
def mfcc():
    """The same for clips of one length, and the cosine transform of the logarithms."""
    dct = np.cos(np.pi / 8 * (np.arange(8)[:, None] + 0.5) * np.arange(5))
    params = {"bank": _mel_bank(8, 17), "dct": jnp.asarray(dct, jnp.float32)}

    def apply(params, sound):
        louder = jnp.concatenate([sound[:, :1], sound[:, 1:] - 0.97 * sound[:, :-1]], axis=1)
        frames = jnp.stack([louder[:, i : i + 32] for i in range(0, 169, 24)], axis=1)
        lines = jnp.fft.rfft(frames * jnp.hamming(32))
        power = jnp.real(lines) ** 2 + jnp.imag(lines) ** 2
        return jnp.log(jnp.maximum(power @ params["bank"], 1e-6)) @ params["dct"]

    return params, apply


@model("jax", "batch, frames, 17", "batch, frames, 17", differentiable=True)
def inverse_stft():
    """Frames out of lines, added where they overlap, divided by what the windows add up to."""
    params = {"window": jnp.hanning(32).astype(jnp.float32) + 0.1}

    def apply(params, real, imaginary):
        frames = jnp.fft.irfft(lax.complex(real, imaginary), 32) * params["window"]
        count = frames.shape[1]
        index = jnp.arange(count)[:, None] * 8 + jnp.arange(32)
        size = (count - 1) * 8 + 32
        sound = jnp.zeros((frames.shape[0], size)).at[:, index].add(frames)
        weight = jnp.zeros(size).at[index].add(params["window"] ** 2)
        return sound / jnp.maximum(weight, 1e-3)

    return params, apply


@model("nnx", "batch, frames, 8", differentiable=True)
def hifigan():
    """A generator of sound: transposed convolutions, and residual blocks of leaky ones."""
    from flax import nnx

    class Residual(nnx.Module):
        def __init__(self, width, rngs):
            self.convs = nnx.List(
                [nnx.Conv(width, width, (3,), kernel_dilation=d, rngs=rngs) for d in (1, 3)]
            )

        def __call__(self, x):
            for conv in self.convs:
                x = x + conv(nnx.leaky_relu(x, 0.1))
            return x

    class Generator(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Conv(8, 16, (7,), rngs=rngs)
            self.up = nnx.List(
                [
                    nnx.ConvTranspose(16, 8, (4,), strides=(2,), rngs=rngs),
                    nnx.ConvTranspose(8, 4, (4,), strides=(2,), rngs=rngs),
                ]
            )
            self.blocks = nnx.List([Residual(8, rngs), Residual(4, rngs)])
            self.last = nnx.Conv(4, 1, (7,), rngs=rngs)

        def __call__(self, mel):
            x = self.first(mel)
            for up, block in zip(self.up, self.blocks):
                x = block(up(nnx.leaky_relu(x, 0.1)))
            return jnp.tanh(self.last(nnx.leaky_relu(x)))[..., 0]

    graph, state = nnx.split(Generator(nnx.Rngs(1)))
    return state, lambda state, mel: nnx.merge(graph, state)(mel)


@model("linen", "batch, length, 1", differentiable=True)
def wavenet():
    """Causal convolutions with holes, gates, and skips."""
    import flax.linen as nn

    class WaveNet(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(6)(x)
            skips = 0.0
            for hole in (1, 2, 4):
                conv = nn.Conv(12, (2,), kernel_dilation=(hole,), padding=[(hole, 0)])
                a, b = jnp.split(conv(x), 2, -1)
                h = jnp.tanh(a) * nn.sigmoid(b)
                skips = skips + nn.Dense(8)(h)
                x = x + nn.Dense(6)(h)
            return nn.Dense(16)(nn.relu(skips))

    net = WaveNet()
    return net.init(jax.random.key(2), jnp.zeros((1, 8, 1))), net.apply


@model("jax", between(0, 1, "batch, 9, 17"))
def griffin_lim():
    """Phases that fit to magnitudes, by transforms there and back."""
    window = jnp.hanning(33)[:-1].astype(jnp.float32)
    index = jnp.arange(9)[:, None] * 8 + jnp.arange(32)

    def apply(params, size):
        weight = jnp.zeros(96).at[index].add(params["window"] ** 2) + 1e-2

        def sound(lines):
            frames = jnp.fft.irfft(lines, 32) * params["window"]
            return jnp.zeros((size.shape[0], 96)).at[:, index].add(frames) / weight

        def step(_, lines):
            again = jnp.fft.rfft(sound(lines)[:, index] * params["window"])
            return size * again / (jnp.abs(again) + 1e-6)

        return sound(lax.fori_loop(0, 4, step, size.astype(jnp.complex64)))

    return {"window": window}, apply


@model("haiku", "batch, frames, 8", differentiable=True)
def conformer():
    """Half a feed-forward layer, attention, a gated convolution, and the other half."""
    import haiku as hk

    def norm(x):
        return hk.LayerNorm(-1, True, True)(x)

    def feed(x):
        return hk.Linear(8)(jax.nn.swish(hk.Linear(16)(norm(x))))

    def forward(x):
        x = x + 0.5 * feed(x)
        h = norm(x)
        init = hk.initializers.VarianceScaling(1.0)
        x = x + hk.MultiHeadAttention(2, 4, w_init=init, model_size=8)(h, h, h)
        a, b = jnp.split(hk.Linear(16)(norm(x)), 2, -1)
        h = hk.DepthwiseConv1D(1, 5)(a * jax.nn.sigmoid(b))
        x = x + hk.Linear(8)(jax.nn.swish(norm(h)))
        return norm(x + 0.5 * feed(x))

    net = hk.without_apply_rng(hk.transform(forward))
    return net.init(jax.random.key(3), jnp.zeros((1, 4, 8))), net.apply


@model("jax", "batch, samples", differentiable=True)
def biquad_filter():
    """A recursive filter of second order, sample after sample."""
    params = {"b": jnp.array([0.2, 0.4, 0.2]), "a": jnp.array([-0.5, 0.3])}

    def apply(p, sound):
        def step(state, x):
            y = p["b"][0] * x + state[0]
            new = (p["b"][1] * x - p["a"][0] * y + state[1], p["b"][2] * x - p["a"][1] * y)
            return new, y

        zero = jnp.zeros(sound.shape[0])
        return lax.scan(step, (zero, zero), sound.T)[1].T

    return params, apply


@model("jax", "batch, 64", odd=("ties", "nan", "empty"))
def pitch():
    """How high a voice is: the lag at which a sound is most like itself."""

    def apply(params, sound):
        sound = sound - sound.mean(1, keepdims=True)
        lines = jnp.fft.rfft(sound, 128)
        like = jnp.fft.irfft(lines * jnp.conj(lines), 128)[:, :32]
        like = like / (like[:, :1] + 1e-6)
        lag = jnp.argmax(like[:, 4:], axis=1) + 4
        sure = jnp.take_along_axis(like, lag[:, None], axis=1)[:, 0]
        return {"hertz": jnp.where(sure > params["least"], 8000.0 / lag, 0.0), "sure": sure}

    return {"least": jnp.float32(0.2)}, apply


@model("equinox", ints(30, "batch, text"), ints(4, "batch, text"))
def text_to_speech():
    """Letters are repeated as long as each is to sound, up to a limit."""
    import equinox as eqx

    class Net(eqx.Module):
        letters: eqx.nn.Embedding
        out: eqx.nn.MLP

        def __init__(self, key):
            a, b = jax.random.split(key)
            self.letters = eqx.nn.Embedding(30, 8, key=a)
            self.out = eqx.nn.MLP(8, 5, 8, 1, activation=jnp.tanh, key=b)

        def __call__(self, text, lasts):
            ends = jnp.cumsum(lasts)
            frames = jnp.arange(24)
            letter = (ends[None] <= frames[:, None]).sum(1)
            letter = jnp.minimum(letter, text.shape[0] - 1)
            mel = jax.vmap(self.out)(jax.vmap(self.letters)(text)[letter])
            return jnp.where((frames < ends[-1])[:, None], mel, 0.0)

    arrays, rest = eqx.partition(Net(jax.random.key(4)), eqx.is_array)
    return arrays, lambda arrays, t, d: jax.vmap(eqx.combine(arrays, rest))(t, d)


@model("jax", "batch, samples", differentiable=True)
def encodec():
    """A sound as codes: strided convolutions, then residual vector quantisation."""
    w = weights(5)
    params = {"first": w(4, 1, 6), "second": w(4, 6, 6), "books": w(2, 16, 6, scale=0.5)}

    def conv(x, kernel):
        return lax.conv_general_dilated(
            x, kernel, (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )

    def apply(p, sound):
        x = conv(jax.nn.elu(conv(sound[..., None], p["first"])), p["second"])
        rest, codes = x, []
        for book in p["books"]:
            apart = ((rest[..., None, :] - book) ** 2).sum(-1)
            code = jnp.argmin(apart, -1)
            codes.append(code)
            rest = rest - lax.stop_gradient(book[code])
        return {"codes": jnp.stack(codes, -1), "rest": rest, "loud": jnp.sqrt((x**2).mean((1, 2)))}

    return params, apply
