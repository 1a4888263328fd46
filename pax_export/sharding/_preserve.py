"""Training steps that preserve shardings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.tree_util import tree_flatten, tree_leaves, tree_map, tree_structure

from pax_export._errors import ShardingError
from pax_export._types import PyTree

F = Callable[..., Any]


def keep(function: F, *trees: PyTree) -> F:
    """Wraps a function so that its results keep the shardings of these trees.

    The compiler chooses the shardings of results of a jitted function. It mostly keeps those of the
    arguments, but it may split a small replicated array, and then the next call recompiles.

    Args:
        function: for example a training step, to be jitted.
        *trees: placed modules, such as the model and the optimizer.

    Returns:
        A function whose results, also in containers, are constrained to the shardings of the tree
        with the same structure.

    Raises:
        ShardingError: (a ValueError, when called) no result has one of these structures.

    Example:
        >>> import jax, optax, pax_export as pax
        >>> mesh = pax.sharding.make_mesh(data=len(jax.devices()))
        >>> net = pax.sharding.shard(pax.Linear(2, 3), mesh, pax.sharding.data_parallel())
        >>> grow = jax.jit(pax.sharding.keep(lambda net: net.map(lambda x: 2 * x), net))
        >>> grow(net).weight.sharding == net.weight.sharding
        True
    """
    known = [
        (tree_structure(tree), [getattr(leaf, "sharding", None) for leaf in tree_leaves(tree)])
        for tree in trees
    ]

    def shardings_of(value: object) -> list[Any] | None:
        structure = tree_structure(value)
        return next((each for own, each in known if own == structure), None)

    @functools.wraps(function)
    def kept(*args: object, **kwargs: object) -> Any:
        any_known = False

        def constrained(value: object) -> Any:
            nonlocal any_known
            shardings = shardings_of(value)
            if shardings is None:
                return value
            any_known = True
            leaves, treedef = tree_flatten(value)
            return treedef.unflatten([_constrain_leaf(*pair) for pair in zip(leaves, shardings)])

        results = function(*args, **kwargs)
        results = tree_map(constrained, results, is_leaf=lambda x: shardings_of(x) is not None)
        if not any_known:
            raise ShardingError(
                "The function returns none of the trees whose shardings are to be preserved.",
                got=f"results of structure {tree_structure(results)}"[:300],
                write="keep(function, net, optimizer) with both as the function returns them: in "
                "the same mode (train or eval), of the same classes",
            )
        return results

    return kept


def _constrain_leaf(leaf: object, sharding: object) -> Any:
    if not isinstance(sharding, NamedSharding):
        return leaf
    return jax.lax.with_sharding_constraint(leaf, sharding)
