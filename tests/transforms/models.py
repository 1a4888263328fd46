"""The models of the table of behaviour in the specification of the transforms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import pax_export as pax
from tests.closeness import assert_close

D = 4


class Block(pax.Module):
    """A layer with weights, statistics and a random key."""

    def __init__(self, d: int):
        super().__init__()
        self.linear = pax.Linear(d, d)
        self.bn = pax.BatchNorm1D(d)
        self.dropout = pax.Dropout(0.5)

    def __call__(self, x):
        return jax.nn.gelu(self.dropout(self.bn(self.linear(x)[None])[0]))

    def enc(self, x):
        return self.linear(x)


class Carry(Block):
    """A block as a scan calls it."""

    def __call__(self, x):
        return super().__call__(x), None


def loss_and_module(module, x):
    y = module(x)
    return jnp.sum(y**2), module


def batch(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.RandomState(seed).standard_normal(shape).astype(np.float32))


def at(tree, i):
    """What stands at one index of the first axis of every leaf."""
    return jax.tree_util.tree_map(lambda leaf: leaf[i], tree)


def stacked(trees):
    return jax.tree_util.tree_map(lambda *leaves: jnp.stack(leaves), *trees)


@pax.pure
def in_a_loop(layers, x):
    """The oracle of scan: each layer called once, in order."""
    for layer in layers:
        x, _ = layer(x)
    return layers, x


def assert_trees_close(a, b, tolerance: float = 1e-5):
    pax.assert_structure_equal(a, b)
    jax.tree_util.tree_map(
        lambda x, y: assert_close(_data(x), _data(y), tolerance, tolerance), a, b
    )


def _data(x):
    typed = jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
    return jax.random.key_data(x) if typed else x


def assert_same(a, b):
    pax.assert_structure_equal(a, b)
    jax.tree_util.tree_map(lambda x, y: np.testing.assert_array_equal(_data(x), _data(y)), a, b)
