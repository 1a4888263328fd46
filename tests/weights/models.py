"""A module with every kind of leaf and container, and files of it."""

import jax
import jax.numpy as jnp
import numpy as np

import pax_export as pax


class Everything(pax.Module):
    def __init__(self, start=0.0):
        super().__init__()
        self.net = pax.Sequential(pax.Linear(2, 3), jax.nn.relu, pax.BatchNorm1D(3))
        self.mixed = [pax.Linear(1, 1), "text", jnp.full(2, start), None]
        self.pair = (5, jnp.full(2, start))
        self.parts = {"b": jnp.full(3, start + 1), "a": (jnp.full((), start + 2),)}
        self.missing = pax.EmptyNode()
        self.table = np.full((2, 2), start, "float32")
        self.key = jax.random.key(int(start))


NAMES = {
    "net.modules.0.weight", "net.modules.0.bias",
    "net.modules.2.scale", "net.modules.2.offset",
    "net.modules.2.ema_mean.averages", "net.modules.2.ema_mean.debias",
    "net.modules.2.ema_var.averages", "net.modules.2.ema_var.debias",
    "mixed.0.weight", "mixed.0.bias", "mixed.2", "pair.1",
    "parts.a.0", "parts.b", "table", "key",
}  # fmt: skip


def equal(a, b):
    """Whether two trees have one structure, and arrays of one kind, dtype and value."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    return all(map(_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


def _equal(a, b):
    alike = isinstance(a, np.ndarray) == isinstance(b, np.ndarray)
    return alike and a.dtype == b.dtype and a.shape == b.shape and _bytes(a) == _bytes(b)


def _bytes(array):
    is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array).tobytes()
