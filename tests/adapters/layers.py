"""Layers that can be adapted, and what the tests of this folder do with them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pax_export as pax

LAYERS = {
    "linear": (lambda: pax.Linear(8, 6), (2, 8)),
    "linear without bias": (lambda: pax.Linear(8, 6, with_bias=False), (2, 3, 8)),
    "conv1d": (lambda: pax.Conv1D(4, 6, 3, stride=2, data_format="NCW"), (2, 4, 9)),
    "conv2d": (lambda: pax.Conv2D(4, 6, 3, rate=2), (2, 7, 6, 4)),
    "groups": (lambda: pax.Conv2D(4, 6, 3, feature_group_count=2), (2, 5, 5, 4)),
    "transpose": (lambda: pax.Conv1DTranspose(4, 6, 3, stride=2), (2, 5, 4)),
    "transpose2d": (lambda: pax.Conv2DTranspose(4, 6, 3, data_format="NCHW"), (2, 4, 5, 5)),
    "embed": (lambda: pax.Embed(9, 6), None),
}


def built(name: str) -> tuple[Any, Any]:
    """A layer, and an input of it."""
    make, shape = LAYERS[name]
    if shape is None:
        return make(), jnp.array([[1, 8, 0], [3, 3, 2]])
    return make(), jax.random.normal(jax.random.key(1), shape)


def disturbed(net: Any, seed: int = 0) -> Any:
    """The net with other values of all that is trained."""
    leaves, treedef = jax.tree_util.tree_flatten(net.parameters())
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    new = [leaf + 0.3 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys)]
    return net.update_parameters(treedef.unflatten(new))


def same(one: Any, other: Any) -> bool:
    """True for equal arrays, bit for bit, in equal structures."""
    if jax.tree_util.tree_structure(one) != jax.tree_util.tree_structure(other):
        return False
    pairs = zip(jax.tree_util.tree_leaves(one), jax.tree_util.tree_leaves(other))
    return all(np.array_equal(a, b) for a, b in pairs)


def names_of(tree: Any) -> list[str]:
    return [name for name, _ in pax.core.named_leaves(tree)]
