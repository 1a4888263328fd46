"""Deepcut, where Thai words begin: the net of deepcut 0.7.0.0 (MIT), weights of Keras 2 in HDF5.

    net, report = load("deepcut/weight/cnn_without_ne_ab.h5")
    net(characters, kinds)  # [batch, 21] each -> [batch], the chance that a word begins

Of each character it sees the ten after it, the ten before it from near to far, and itself, by
their numbers and by their kinds.  R. Kittinaradorn and others, 2019.
"""

import jax
import jax.numpy as jnp

import pax_export as pax

WIDTHS = [200] * 8 + [150] * 3 + [100]  # of units that see 1 to 12 characters
WINDOW = 21


class Unit(pax.Module):
    """Features of `width` characters in a row: five numbers at each place."""

    def __init__(self, size: int, width: int):
        super().__init__()
        self.conv = pax.Conv1D(32, width, size, padding="VALID")
        self.dense = pax.Linear(width, 5)

    def __call__(self, x):
        y = self.dense(jax.nn.relu(self.conv(x)))
        return jnp.pad(y, ((0, 0), (0, x.shape[1] - y.shape[1]), (0, 0)))


class Deepcut(pax.Module):
    """Characters and their kinds, ``[batch, 21]`` each, to chances ``[batch]``."""

    def __init__(self):
        super().__init__()
        self.characters = pax.Embed(178, 32)
        self.kinds = pax.Embed(12, 12)
        self.norm1 = pax.BatchNorm1D(32, eps=1e-3)
        self.units = [Unit(size, width) for size, width in enumerate(WIDTHS, start=1)]
        self.norm2 = pax.BatchNorm1D(49, eps=1e-3)
        self.hidden = pax.Linear(WINDOW * 49, 100)
        self.output = pax.Linear(100, 1)

    def __call__(self, characters, kinds):
        x = self.norm1(self.characters(characters))
        seen = jnp.stack([unit(x) for unit in self.units]).max(axis=0)
        x = self.norm2(jnp.concatenate((x, seen, self.kinds(kinds)), axis=-1))
        x = jax.nn.relu(self.hidden(x.reshape(x.shape[0], -1)))
        return jax.nn.sigmoid(self.output(x))[:, 0]


def load(path):
    """The trained net in eval mode, and the report of which array went where."""
    net, report = pax.weights.adopt(Deepcut(), path)
    return net.eval(), report
