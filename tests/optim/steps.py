"""A model, data and a loss for the tests of training steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pax_export as pax
from tests.closeness import assert_close

RANDOM = np.random.RandomState(0)
X = jnp.asarray(RANDOM.standard_normal((16, 3)), jnp.float32)
Y = jnp.asarray(RANDOM.standard_normal((16, 1)), jnp.float32)


class Count(pax.StateModule):
    """A state that each call changes, and that no optimizer may touch."""

    def __init__(self):
        super().__init__()
        self.calls = jnp.array(0, jnp.int32)

    def __call__(self, x):
        self.calls = self.calls + 1
        return x


def make_model() -> Any:
    return pax.Sequential(pax.Linear(3, 8), jnp.tanh, Count(), pax.Linear(8, 1))


def loss_fn(model, x, y):
    model, y_hat = model % x
    loss = jnp.mean((y_hat - y) ** 2)
    return loss, (loss, model)


_gradients = jax.jit(pax.grad(loss_fn, has_aux=True))  # compiled once for all tests


def grads_of(model):
    return _gradients(model, X, Y)[0]


def matrices(params):
    """A mask."""
    return jax.tree_util.tree_map(lambda x: x.ndim > 1, params)


def labels(params):
    return jax.tree_util.tree_map(lambda x: "matrix" if x.ndim > 1 else "vector", params)


def kinds(tree):
    """What jax.jit looks at, besides the structure."""
    leaves = jax.tree_util.tree_leaves(tree)
    return [(x.shape, x.dtype, getattr(x, "weak_type", False)) for x in leaves]


def assert_trees_close(a, b, rtol=1e-5, atol=1e-6):
    pax.assert_structure_equal(a, b)
    for x, y in zip(jax.tree_util.tree_leaves(a), jax.tree_util.tree_leaves(b), strict=True):
        assert_close(x, y, rtol=rtol, atol=atol)


def same_objects(a, b):
    pairs = zip(jax.tree_util.tree_leaves(a), jax.tree_util.tree_leaves(b), strict=True)
    return all(x is y for x, y in pairs)
