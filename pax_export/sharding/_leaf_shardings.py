"""The sharding of every leaf on one mesh: checked, and derived for optimizer states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from pax_export._foundations.errors import ShardingError, a_few
from pax_export._foundations.types import AnyMesh, PyTree
from pax_export.core import Spec
from pax_export.sharding._mesh import checked_mesh, mesh_text, parts_of, sizes_of
from pax_export.sharding._rules import (
    LeafPath,
    Match,
    Rules,
    RulesLike,
    Sizes,
    leaf_paths,
)


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


def shardings(tree: PyTree, mesh: AnyMesh, rules: RulesLike = None) -> Any:
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


def shardings_of_leaves(
    tree: PyTree, mesh: AnyMesh | None, rules: RulesLike
) -> list[NamedSharding]:
    """The sharding of each leaf, in tree order."""
    mesh = checked_mesh(mesh)
    found = leaf_shardings(leaf_paths(tree), sizes_of(mesh), Rules.of(rules))
    return [NamedSharding(mesh, PartitionSpec(*each.spec)) for each in found]


# --- rules for what is like the parameters: optimizer states, gradients, averages -----


def following(model: PyTree, rules: RulesLike = None) -> Rules:
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

    def match(self, leaf: LeafPath, sizes: Sizes, before: Spec) -> Match | None:
        for start in range(len(leaf.steps)):  # the longest end first
            leader = self.leaders.get(leaf.steps[start:])
            if leader is not None and leader.leaf.shape == leaf.shape:
                return leader.match
        return None


# --- errors of partition specs and rules ----------------------------------------------


def require_fit(leaf: LeafPath, spec: Spec, source: str, sizes: Sizes) -> None:
    """Raises unless a spec is valid for a leaf on a mesh; jax says why."""
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    try:
        if len(spec) > len(leaf.shape):
            raise ValueError(f"{len(spec)} entries for {len(leaf.shape)} axes")
        NamedSharding(mesh, PartitionSpec(*spec)).shard_shape(leaf.shape)
    except Exception as error:  # jax has several classes for specs that do not fit
        raise ShardingError(
            "A partition spec does not fit its leaf, or the mesh.",
            where=leaf.name,
            got=f"{spec_text(spec)} of {source} for shape {leaf.shape}: {error}",
            write=f"axes of the mesh ({mesh_text(sizes)}) that divide those of the array, each "
            "once; for the state of an optimizer, rules=pax.sharding.following(model, rules)",
        ) from error


def require_axis(name: str, sizes: Sizes, where: str, described: str) -> None:
    """Raises a ShardingError unless a mesh has an axis of this name."""
    if name not in sizes:
        raise ShardingError(
            f"The mesh has no axis {name!r}.",
            where=where,
            got=described,
            write=f"an axis of the mesh: {mesh_text(sizes)}",
        )


def spec_text(spec: Spec) -> str:
    """Formats a spec as in code: ``P(None, 'model')``."""
    return f"P({', '.join(map(repr, PartitionSpec(*spec)))})"


# --- rules that are for no leaf: most often a misspelt path, so they are errors -----------


def require_used(
    rules: Rules, sizes: Sizes, matched: Sequence[tuple[LeafPath, Match | None]]
) -> None:
    """Raises unless every rule matched a leaf, including leaves with declared specs."""
    used = {id(rule) for _, match in matched if match is not None for rule in match.rules}
    for rule in rules.parts():
        if not rule.must_match or id(rule) in used:
            continue
        own = [leaf.name for leaf, _ in matched if rule.match(leaf, sizes, ()) is not None]
        raise ShardingError(
            "A rule matches no leaf, or those of earlier rules alone: the first one counts.",
            where=str(rule),
            got=f"rules before it for {a_few(own, 5)}" if own else _leaves_text(matched),
            write="a class, or a pattern of the whole path ('*.weight'), before other rules; or "
            "pax.sharding.following(model, rules) for what belongs to the model",
        )


def _leaves_text(matched: Sequence[tuple[LeafPath, Match | None]]) -> str:
    names = [leaf.name for leaf, _ in matched]
    classes = {type(each.module).__qualname__: 0 for leaf, _ in matched for each in leaf.owners}
    return f"leaves {a_few(names, 5)} of {', '.join(classes) or 'no module'}"
