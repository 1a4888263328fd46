"""Rules for trees derived from parameters: optimizer state, gradients, averages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pax_export._types import PyTree
from pax_export.core import Spec
from pax_export.sharding._leaf_paths import LeafPath, leaf_paths
from pax_export.sharding._leaf_shardings import LeafSharding, leaf_shardings
from pax_export.sharding._rules import Match, Rules, Sizes


def following(model: PyTree, rules: object = None) -> Rules:
    """Returns rules that shard the state of an optimizer like the parameters.

    A leaf follows a parameter of its shape if its path ends with that of the parameter: the
    momentum ``state.0.trace.fc.weight`` follows ``fc.weight``. All other leaves, such as counters,
    are replicated.

    Args:
        model: the model, or its abstract module of `jax.eval_shape`.
        rules: the sharding rules of the model.

    Example:
        >>> import jax, optax, pax_export as pax
        >>> mesh = pax.sharding.make_mesh(data=len(jax.devices()))
        >>> rules = pax.sharding.fully_sharded(min_size=1)
        >>> net = pax.sharding.shard(pax.Linear(8, 8 * mesh.size), mesh, rules)
        >>> adam = pax.optim.from_optax(optax.adam(1e-3))(net.parameters())
        >>> adam = pax.sharding.shard(adam, mesh, pax.sharding.following(net, rules))
        >>> adam.state[0].mu.weight.sharding == net.weight.sharding
        True
    """
    return Following(tuple(leaf_paths(model)), Rules.of(rules))


@dataclass(frozen=True)
class Following(Rules):
    """The specs of parameters, for leaves whose path ends with theirs."""

    leaders: tuple[LeafPath, ...]
    rules: Rules
    must_match = False

    def bound(self, sizes: Sizes) -> Rules:  # with the specs that the parameters have there
        found = leaf_shardings(self.leaders, sizes, self.rules)
        return Followers({leader.leaf.steps: leader for leader in found})

    def __str__(self) -> str:
        return f"following({self.rules})"


@dataclass(frozen=True)
class Followers(Rules):
    """The specs of parameters on a mesh."""

    leaders: Mapping[tuple[str, ...], LeafSharding]
    must_match = False
    overrides = True  # of declared specs of the parameters, not for a leaf of another shape

    def match(self, leaf: LeafPath, sizes: Sizes, taken: Spec) -> Match | None:
        for start in range(len(leaf.steps)):  # the longest end first
            leader = self.leaders.get(leaf.steps[start:])
            if leader is not None and leader.leaf.shape == leaf.shape:
                return leader.match
        return None
