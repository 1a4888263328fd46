"""The sharding of every leaf on one mesh, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from pax_export._types import AnyMesh, PyTree
from pax_export.core import Spec
from pax_export.sharding._leaf_paths import LeafPath, leaf_paths
from pax_export.sharding._mesh import parts_of, sizes_of
from pax_export.sharding._rules import Match, Rules, Sizes
from pax_export.sharding._spec_errors import require_fit, require_used


@dataclass(frozen=True, eq=False)
class LeafSharding:
    """A leaf and its sharding."""

    leaf: LeafPath
    match: Match | None  # has no rules if the module declares the spec

    @property
    def spec(self) -> Spec:
        """The spec; empty (replicated) by default."""
        return () if self.match is None else self.match.spec

    @property
    def source(self) -> str:
        """The origin of the spec, for messages; empty by default."""
        if self.match is None:
            return ""
        names = " & ".join(map(str, self.match.rules)) or "with_sharding"
        return f"{names}: {self.match.note}" if self.match.note else names

    def shard_shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Returns the shape of one device's shard."""
        shape = list(self.leaf.shape)
        for axis, entry in enumerate(self.spec):
            shape[axis] //= parts_of(entry, sizes)
        return tuple(shape)


def leaf_shardings(leaves: Sequence[LeafPath], sizes: Sizes, rules: Rules) -> list[LeafSharding]:
    """Specs of leaves: declared by modules, by rules, or replicated; or a ShardingError."""
    bound = rules.bound(sizes)
    found = [LeafSharding(leaf, _match_leaf(leaf, sizes, bound)) for leaf in leaves]
    for each in found:
        require_fit(each.leaf, each.spec, each.source, sizes)
    require_used(bound, sizes, [(each.leaf, each.match) for each in found])
    return found


def _match_leaf(leaf: LeafPath, sizes: Sizes, rules: Rules) -> Match | None:
    if leaf.declared is not None and not rules.overrides:
        return Match(leaf.declared, ())
    return rules.match(leaf, sizes, ())


def shardings(tree: PyTree, mesh: AnyMesh, rules: object = None) -> Any:
    """Returns the shardings of the leaves of a tree on a mesh.

    Args:
        tree: a module, or a pytree of modules and arrays; abstract ones of
            `jax.eval_shape` too.
        mesh: a `jax.sharding.Mesh`, or an abstract one.
        rules: `Rules`, or a mapping; see `Rules.of`.  Specs declared with `with_sharding` take
            precedence.

    Returns:
        The same pytree with a `jax.sharding.NamedSharding` for each array, as
        ``in_shardings`` and ``out_shardings`` of `jax.jit` take it.

    Raises:
        ShardingError: (a ValueError) a rule matches no leaf, or a spec does not fit its leaf or the
            mesh.
        InvalidArgumentTypeError: (a TypeError) not a mesh, or not rules.

    Example:
        >>> import pax_export as pax
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = pax.sharding.make_mesh(model=1, devices=jax.devices()[:1])
        >>> tree = pax.sharding.shardings(pax.Linear(4, 8), mesh, {"weight": P(None, "model")})
        >>> tuple(tree.weight.spec), tuple(tree.bias.spec)
        ((None, 'model'), ())
    """
    treedef = jax.tree_util.tree_structure(tree)
    return treedef.unflatten(shardings_of_leaves(tree, mesh, rules))


def shardings_of_leaves(tree: PyTree, mesh: AnyMesh, rules: object) -> list[NamedSharding]:
    """The sharding of each leaf, in tree order."""
    found = leaf_shardings(leaf_paths(tree), sizes_of(mesh), Rules.of(rules))
    return [NamedSharding(mesh, PartitionSpec(*each.spec)) for each in found]
