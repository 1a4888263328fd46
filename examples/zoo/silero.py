"""Silero VAD, voice activity detection: the net of silero-vad 6.2.3 (MIT), from its ONNX files.

net, report = load("silero_vad/data/silero_vad_16k_op15.onnx")
net(sound)  # [batch, samples] at 16 kHz -> [batch, chunks], for each 512 samples
state, chance = net.step(net.initial_state(1), chunk)  # while the sound comes in
"""

import jax
import jax.numpy as jnp

import pax_export as pax

CHUNK, CONTEXT = 512, 64  # a chunk is heard with the end of the one before it


class SileroVAD(pax.Module):
    """Sound to the chance of speech in each chunk of it."""

    def __init__(self):
        super().__init__()
        # Real and imaginary parts of 129 frequencies, as a convolution.
        self.stft = pax.Conv1D(1, 258, 256, stride=128, padding="VALID", with_bias=False)
        self.encoder = [
            pax.Conv1D(a, b, 3, stride, padding=[(1, 1)])
            for a, b, stride in ((129, 128, 1), (128, 64, 2), (64, 64, 2), (64, 128, 1))
        ]
        self.rnn = pax.LSTM(128, 128)
        self.output = pax.Conv1D(128, 1, 1)

    def initial_state(self, batch_size):
        """The state before the first chunk."""
        return self.rnn.initial_state(batch_size)

    def step(self, state, chunk):
        """One chunk ``[batch, 576]``, its context first: the next state, the chance ``[batch]``."""
        x = jnp.pad(chunk, ((0, 0), (0, CONTEXT)), mode="reflect")
        x = self.stft(x[..., None])
        x = jnp.hypot(x[..., :129], x[..., 129:])
        for conv in self.encoder:
            x = jax.nn.relu(conv(x))
        state, x = self.rnn(state, x[:, 0])
        chance = jax.nn.sigmoid(self.output(jax.nn.relu(x)[:, None]))
        return state, chance[:, 0, 0]

    def __call__(self, sound):
        """The chances of all chunks of ``[batch, samples]``, a multiple of 512."""
        batch, samples = sound.shape
        chunks = sound.reshape(batch, samples // CHUNK, CHUNK)
        ends = jnp.pad(chunks[:, :-1, -CONTEXT:], ((0, 0), (1, 0), (0, 0)))
        heard = jnp.concatenate((ends, chunks), axis=-1)
        state = self.initial_state(batch)
        _, chances = pax.scan(self.step, state, heard, time_major=False)
        return chances


def load(path):
    """The trained net in eval mode, and the report of which array went where."""
    net, report = pax.weights.adopt(SileroVAD(), path)
    return net.eval(), report
