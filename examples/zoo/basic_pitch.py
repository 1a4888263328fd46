"""Basic Pitch, the notes of a sound: the net of basic-pitch 0.4.0 (Apache-2.0), a SavedModel.

    net, report = load("basic_pitch/saved_models/icassp_2022/nmp")
    contours, notes, onsets = net(sound)  # [batch, samples] at 22050 Hz, frames of 256 samples

What listens first is a constant-Q transform, which has no trained weights: 36 filters for the
highest octave, and the same filters for the sound at half its rate, nine octaves down.
R. M. Bittner and others, ICASSP 2022.
"""

import jax
import jax.numpy as jnp
import numpy as np
from scipy import signal

import pax_export as pax

RATE, HOP, LOWEST = 22050, 256, 27.5
OCTAVE, BINS = 36, 309  # filters for an octave, and for all octaves
Q = 1 / (2 ** (1 / OCTAVE) - 1)
OCTAVES = -(-BINS // OCTAVE)
HARMONICS = [round(OCTAVE * np.log2(h)) for h in (0.5, 1, 2, 3, 4, 5, 6, 7)]
LOW_PASS = signal.firwin2(256, [0, 0.5 / 1.001, 0.5 * 1.001, 1], [1, 1, 0, 0])


def highest_octave() -> np.ndarray:
    """The filters of the highest octave ``[256, 1, 72]``: cosines, then sines."""
    filters = np.zeros((256, OCTAVE), complex)
    for i in range(OCTAVE):
        frequency = LOWEST * 2 ** ((BINS - OCTAVE + i) / OCTAVE)
        length = int(np.ceil(Q * RATE / frequency))
        times = np.arange(-length // 2, -length // 2 + length)
        wave = signal.get_window("hann", length) * np.exp(2j * np.pi * times * frequency / RATE)
        start = int(np.ceil(128 - length / 2)) - length % 2
        filters[start : start + length, i] = wave / np.abs(wave).sum()
    return np.concatenate((filters.real, filters.imag), axis=1)[:, None].astype(np.float32)


def convolved(x, filters, stride: int):
    """``[batch, time, 1]`` under filters ``[width, 1, filters]``."""
    filters = jnp.asarray(filters, jnp.float32)
    return jax.lax.conv_general_dilated(
        x, filters, (stride,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
    )


def reflected(x, width: int):
    """More at both ends of axis 1, as in a mirror."""
    before, after = x[:, 1 : width + 1], x[:, -width - 1 : -1]
    return jnp.concatenate((before[:, ::-1], x, after[:, ::-1]), axis=1)


def constant_q(sound):
    """How loud each of 309 frequencies is in each frame: ``[batch, frames, 309]``."""
    filters, x, parts = highest_octave(), sound[..., None], []
    for octave in range(OCTAVES):
        parts.insert(0, convolved(reflected(x, 128), filters, HOP >> octave))
        half = jnp.pad(x, ((0, 0), (127, 127), (0, 0)))
        x = convolved(half, LOW_PASS[:, None, None], 2)
    real = jnp.concatenate([part[..., :OCTAVE] for part in parts], axis=-1)[..., -BINS:]
    imaginary = jnp.concatenate([part[..., OCTAVE:] for part in parts], axis=-1)[..., -BINS:]
    lengths = np.ceil(Q * RATE / (LOWEST * 2 ** (np.arange(BINS) / OCTAVE)))
    return (real**2 + imaginary**2) * jnp.asarray(lengths, jnp.float32)


def scaled(power):
    """Decibels, from 0 for the softest to 1 for the loudest of each sound."""
    level = 10 * jnp.log10(power + 1e-10)
    level = level - level.min(axis=(1, 2), keepdims=True)
    loudest = level.max(axis=(1, 2), keepdims=True)
    return jnp.where(loudest == 0, 0, level / jnp.where(loudest == 0, 1, loudest))


def stacked(x):
    """Beside each frequency its harmonics: ``[batch, frames, 264, 8]``."""
    x = jnp.pad(x, ((0, 0), (0, 0), (OCTAVE, max(HARMONICS)), (0, 0)))
    return jnp.concatenate([x[:, :, OCTAVE + h : OCTAVE + h + 264] for h in HARMONICS], axis=-1)


class BasicPitch(pax.Module):
    """Sound to contours ``[batch, frames, 264]``, notes and onsets ``[batch, frames, 88]``."""

    def __init__(self):
        super().__init__()
        self.norm = pax.BatchNorm2D(1, eps=1e-3)
        self.harmonics = pax.Conv2D(8, 8, (3, 39))
        self.harmonics_norm = pax.BatchNorm2D(8, eps=1e-3)
        self.contour = pax.Conv2D(8, 1, 5)
        self.note_features = pax.Conv2D(1, 32, 7, stride=(1, 3))
        self.note = pax.Conv2D(32, 1, (7, 3))
        self.onset_features = pax.Conv2D(8, 32, 5, stride=(1, 3))
        self.onset_norm = pax.BatchNorm2D(32, eps=1e-3)
        self.onset = pax.Conv2D(33, 1, 3)

    def __call__(self, sound):
        x = stacked(self.norm(scaled(constant_q(sound))[..., None]))
        y = jax.nn.relu(self.harmonics_norm(self.harmonics(x)))
        contour = jax.nn.sigmoid(self.contour(y))
        note = jax.nn.sigmoid(self.note(jax.nn.relu(self.note_features(contour))))
        y = jax.nn.relu(self.onset_norm(self.onset_features(x)))
        onset = jax.nn.sigmoid(self.onset(jnp.concatenate((note, y), axis=-1)))
        return contour[..., 0], note[..., 0], onset[..., 0]


def load(path):
    """The trained net in eval mode, and the report of which array went where."""
    net, report = pax.weights.adopt(BasicPitch(), path)
    return net.eval(), report
