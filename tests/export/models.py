"""Small models that the tests of the exporter share."""

import hashlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import pax_export as pax


class Net(pax.Module):
    """A layer, and a second method."""

    def __init__(self):
        super().__init__()
        self.layer = pax.Linear(3, 4, rng_key=jax.random.key_data(jax.random.key(0)))

    def __call__(self, x):
        return jnp.tanh(self.layer(x))

    def encode(self, x, *, scale):
        return {"code": self.layer(x) * scale, "total": x.sum(axis=-1)}


class Counter(pax.Module):
    """Counts its calls, and adds the count to what it returns."""

    def __init__(self):
        super().__init__()
        self.steps = jnp.zeros((), jnp.int32)

    def __call__(self, x):
        self.steps = self.steps + 1
        return x + self.steps


class UnreadCounter(Counter):
    """Counts its calls, and nobody reads the count."""

    def __call__(self, x):
        self.steps = self.steps + 1
        return 2 * x


def rehash(folder: Path) -> Path:
    """Gives the listed files the hashes that they have now, as an author of changes would."""
    names = [line[66:] for line in (folder / "SHA256SUMS").read_text().splitlines()]
    lines = [f"{hashlib.sha256((folder / n).read_bytes()).hexdigest()}  {n}\n" for n in names]
    (folder / "SHA256SUMS").write_text("".join(lines))
    return folder


def affine(params, x):
    return x @ params["w"] + params["b"]


def affine_params():
    return {"w": np.arange(12, dtype=np.float32).reshape(3, 4) / 7, "b": np.ones(4, np.float32)}


def random(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)
