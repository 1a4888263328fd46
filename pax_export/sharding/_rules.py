"""Rules: map leaves to partition specs; combined by ``|`` (first match) and ``&`` (other axes)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path

from pax_export._foundations.errors import InvalidArgumentTypeError
from pax_export._foundations.types import PyTree
from pax_export.core import (
    Chosen,
    FilteredLeaf,
    Node,
    Spec,
    is_random_key,
    path_pattern,
    specs_of,
)
from pax_export.sharding._mesh import names_in
from pax_export.transforms import Scan, StateAxes, Vmap

Sizes = Mapping[str, int]
#: Rules, or a mapping from paths, classes and selections to specs; see `Rules.of`.
RulesLike: TypeAlias = "Rules | Mapping[Any, Any] | None"


@dataclass(frozen=True)
class Match:
    """The result of rules for one leaf."""

    spec: Spec
    rules: tuple[Rules, ...]  # the rules that gave it
    note: str = ""  # why an axis that a rule would split stays whole


class Rules:
    """Maps the leaves of a module to partition specs.

    The functions of this room that take rules take a mapping as well, from
    paths and classes to specs; ``Rules.of(mapping)`` is this as an object, which
    can be put together with others: ``a | b`` is ``a``, and ``b`` for the leaves
    that ``a`` leaves open; ``a & b`` is ``a``, with ``b`` for the axes that
    ``a`` leaves whole.

    Example:
        >>> import pax_export as pax
        >>> from jax.sharding import PartitionSpec as P
        >>> mine = pax.sharding.Rules.of({"*.head.weight": P("model", None)})
        >>> print(mine | pax.sharding.tensor_parallel() & pax.sharding.fully_sharded())
        '*.head.weight' | tensor_parallel & fully_sharded
    """

    @staticmethod
    def of(rules: RulesLike) -> Rules:
        """Converts a mapping to rules.

        Args:
            rules: a mapping, rules, or None for no rules.  Its keys are

                * paths of leaves, or of modules around them, as for `Module.at`:
                  ``"*.attention.*.weight"``.  ``*`` matches one name or a part of it, ``**`` any
                  number of names; a path that begins with ``*`` matches at any depth,
                * classes of modules,
                * selections of ``net.at(...)``.

                The value is a spec, for a class the spec of its ``weight``; or for a class a
                mapping from paths below it to specs. The first key that matches a leaf applies.

        Raises:
            InvalidArgumentTypeError: (a TypeError) another type.
        """
        if isinstance(rules, Rules):
            return rules
        if rules is None:
            return Either(())
        if not isinstance(rules, Mapping):
            raise InvalidArgumentTypeError(
                "Rules must be a mapping from paths and classes to partition specs.",
                got=f"{type(rules).__name__}: {rules!r}"[:120],
                write='{"*.attention.*.weight": P(None, "model"), pax.Embed: P("model", None)}',
            )
        return Either(tuple([rule for pair in rules.items() for rule in _rules_of(*pair)]))

    def match(self, leaf: LeafPath, sizes: Sizes, before: Spec) -> Match | None:
        """The spec for a leaf with the spec `before`; None in `before` is free."""
        raise NotImplementedError

    def parts(self) -> Iterator[Rules]:
        """The parts of a combined rule."""
        yield self

    def bound(self, sizes: Sizes) -> Rules:
        """The same for one mesh."""
        return self

    #: Whether it is a mistake if it is for no leaf.
    must_match = True
    #: Whether it takes precedence over specs declared with `with_sharding`.
    overrides = False

    def __or__(self, other: RulesLike) -> Rules:
        return Either((*_alternatives_of(self), *_alternatives_of(Rules.of(other))))

    def __ror__(self, other: RulesLike) -> Rules:
        return Rules.of(other) | self

    def __and__(self, other: RulesLike) -> Rules:
        return Both(self, Rules.of(other))

    def __rand__(self, other: RulesLike) -> Rules:
        return Both(Rules.of(other), self)


def _alternatives_of(rules: Rules) -> tuple[Rules, ...]:
    return rules.alternatives if isinstance(rules, Either) else (rules,)


@dataclass(frozen=True)
class Either(Rules):
    """The first rule that is for a leaf."""

    alternatives: tuple[Rules, ...]

    def match(self, leaf: LeafPath, sizes: Sizes, before: Spec) -> Match | None:
        matches = (rule.match(leaf, sizes, before) for rule in self.alternatives)
        return next((match for match in matches if match is not None), None)

    def parts(self) -> Iterator[Rules]:
        for rule in self.alternatives:
            yield from rule.parts()

    def bound(self, sizes: Sizes) -> Rules:
        return Either(tuple([rule.bound(sizes) for rule in self.alternatives]))

    def __str__(self) -> str:
        return " | ".join(map(str, self.alternatives)) or "no rules"


@dataclass(frozen=True)
class Both(Rules):
    """One rule, and another for the axes that the first leaves whole."""

    first: Rules
    second: Rules

    def match(self, leaf: LeafPath, sizes: Sizes, before: Spec) -> Match | None:
        a = self.first.match(leaf, sizes, before)
        b = self.second.match(leaf, sizes, before if a is None else a.spec)
        if a is None or b is None:
            return a or b
        if b.spec == a.spec:
            return a
        if not any(entry is not None for entry in a.spec):
            return replace(b, note=b.note or a.note)
        return Match(b.spec, a.rules + b.rules, a.note or b.note)

    def parts(self) -> Iterator[Rules]:
        yield from self.first.parts()
        yield from self.second.parts()

    def bound(self, sizes: Sizes) -> Rules:
        return Both(self.first.bound(sizes), self.second.bound(sizes))

    def __str__(self) -> str:
        return f"{self.first} & {self.second}"


@dataclass(frozen=True)
class PathRule(Rules):
    """A spec for the leaves whose path matches a pattern."""

    pattern: str
    spec: Spec

    def match(self, leaf: LeafPath, sizes: Sizes, before: Spec) -> Match | None:
        if not path_pattern(self.pattern).covers(".".join(leaf.steps)):
            return None
        return Match(merge_specs(before, self.spec), (self,))

    def __str__(self) -> str:
        return repr(self.pattern)


@dataclass(frozen=True)
class ChosenRule(Rules):
    """A spec for selected leaves and the leaves in selected modules."""

    places: Chosen
    spec: Spec

    def match(self, leaf: LeafPath, sizes: Sizes, before: Spec) -> Match | None:
        chosen = _as_text(self.places.paths)
        if not any(leaf.steps[:n] in chosen for n in range(len(leaf.steps) + 1)):
            return None
        return Match(merge_specs(before, self.spec), (self,))

    def __str__(self) -> str:
        names = [".".join(map(str, steps)) for steps in self.places.paths]
        return f"at({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"


@dataclass(frozen=True)
class ClassRule(Rules):
    """A spec for leaves of a class by the pattern of their path; axes of stacks are not split."""

    cls: type
    pattern: str
    spec: Spec

    def match(self, leaf: LeafPath, sizes: Sizes, before: Spec) -> Match | None:
        for owner in reversed(leaf.owners):
            if isinstance(owner.module, self.cls):
                if path_pattern(self.pattern).covers(leaf.name_in(owner)):
                    return Match(merge_specs(before, on_own_axes(leaf, self.spec)), (self,))
        return None

    def __str__(self) -> str:
        return f"{self.cls.__qualname__}.{self.pattern}"


@functools.lru_cache(maxsize=64)
def _as_text(paths: tuple[tuple[Any, ...], ...]) -> frozenset[tuple[str, ...]]:
    return frozenset([tuple(map(str, steps)) for steps in paths])


def _rules_of(key: object, value: object) -> list[Rules]:
    if isinstance(key, str):
        return [PathRule(key, as_spec(value, repr(key)))]
    if isinstance(key, Chosen):
        return [ChosenRule(key, as_spec(value, "a selection"))]
    if not (isinstance(key, type) and issubclass(key, Node)):
        raise InvalidArgumentTypeError(
            "The key of a rule must be a path or a class of modules.",
            got=f"{type(key).__name__}: {key!r}"[:120],
            write='"*.attention.*.weight", or pax.Embed',
        )
    if not isinstance(value, Mapping):
        value = {"weight": value}
    name = key.__qualname__
    return [ClassRule(key, path, as_spec(spec, f"{name}.{path}")) for path, spec in value.items()]


def as_spec(value: object, where: str) -> Spec:
    """Converts a user's value to a partition spec, or raises an InvalidArgumentTypeError."""
    if value is None:
        return ()
    if isinstance(value, (tuple, PartitionSpec)):
        names = [name for entry in value for name in names_in(entry)]
        if all(isinstance(name, str) for name in names):
            return tuple(value)
    raise InvalidArgumentTypeError(
        "A rule must be a partition spec: for each axis of the array the name of a mesh axis, "
        "several names, or None.",
        where=where,
        got=f"{type(value).__name__}: {value!r}"[:120],
        write='P(None, "model"), or P() for a replicated array',
    )


def merge_specs(before: Sequence[Any], spec: Sequence[Any]) -> Spec:
    """Fills the None entries of one spec with those of another."""
    if not any(entry is not None for entry in before):
        return tuple(spec)
    length = max(len(before), len(spec))
    first, second = [(*each, *[None] * (length - len(each))) for each in (before, spec)]
    return tuple([b if a is None else a for a, b in zip(first, second)])


def on_own_axes(leaf: LeafPath, spec: Spec) -> Spec:
    """Extends a spec for the axes of a module to all axes of the array."""
    if not any(axis is not None for axis in leaf.stacked) or len(spec) > len(leaf.own_axes):
        return spec
    entries: list[Any] = [None] * len(leaf.shape)
    for axis, entry in zip(leaf.own_axes, spec):
        entries[axis] = entry
    return tuple(entries)


# --- leaves of a tree with their paths and modules ------------------------------------


@dataclass(frozen=True, eq=False)
class Owner:
    """A module around a leaf."""

    module: Any
    depth: int  # how many steps of the leaf's path lead to it


@dataclass(frozen=True, eq=False)
class LeafPath:
    """A leaf and its path."""

    steps: tuple[str, ...]  # from the root, each as text
    shape: tuple[int, ...]
    dtype: Any
    owners: tuple[Owner, ...]  # the modules that contain it, outermost first
    declared: Spec | None  # by its module
    #: For each `Vmap` and `Scan` around it, the outermost first, the axis along which
    #: that stacks it, counted in the shape that outer ones leave; None where it is shared.
    stacked: tuple[int | None, ...]
    is_key: bool

    @property
    def name(self) -> str:
        """The path with dots, as weights are named."""
        return ".".join(self.steps) or "(the array itself)"

    def name_in(self, owner: Owner) -> str:
        """The path from one of the modules around it."""
        return ".".join(self.steps[owner.depth :])

    @property
    def module(self) -> Any:
        """The innermost module around it."""
        return self.owners[-1].module if self.owners else None

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def own_axes(self) -> tuple[int, ...]:
        """The axes of the innermost module, without those of stacked layers."""
        axes = list(range(len(self.shape)))
        for axis in self.stacked:
            if axis is not None and -len(axes) <= axis < len(axes):
                del axes[axis]
        return tuple(axes)


def leaf_paths(
    tree: PyTree, steps: tuple[str, ...] = (), owners: tuple[Owner, ...] = ()
) -> list[LeafPath]:
    """Returns the leaves of a tree, with the given prefix of names and modules."""
    if isinstance(tree, Node):
        owners = (*owners, Owner(tree, len(steps)))
    items, _ = tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree and isinstance(x, Node))
    found: list[LeafPath] = []
    for path, item in items:
        below = (*steps, *[keystr((key,), simple=True) for key in path])
        if isinstance(item, Node) and item is not tree:
            found += leaf_paths(item, below, owners)
        else:
            found.append(_leaf_path(item, below, owners))
    if isinstance(tree, (Vmap, Scan)):
        return _with_layer_axes(tree, found)
    stacks = getattr(type(tree), "_pax_stacked", ())
    # A module that keeps layers stacked by itself, along their first axis.
    stacked = [(name,) for name in stacks if isinstance(getattr(tree, name), Node)]
    at = slice(len(steps), len(steps) + 1)
    return [
        replace(leaf, stacked=(0, *leaf.stacked)) if leaf.steps[at] in stacked else leaf
        for leaf in found
    ]


def _leaf_path(leaf: Any, steps: tuple[str, ...], owners: tuple[Owner, ...]) -> LeafPath:
    dtype = getattr(leaf, "dtype", None)
    declared, is_key = None, dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if owners:
        owner = owners[-1]
        attribute = steps[owner.depth]
        declared = specs_of(owner.module).get(attribute)
        is_key = is_random_key(FilteredLeaf(steps, leaf, (owner.module,), attribute))
    if dtype is None:
        dtype = jax.dtypes.canonicalize_dtype(np.result_type(leaf))
    return LeafPath(steps, tuple(np.shape(leaf)), dtype, owners, declared, (), is_key)


def _with_layer_axes(lifted: Vmap | Scan, found: list[LeafPath]) -> list[LeafPath]:
    axes = (dict(lifted.options)["state_axes"] or StateAxes({...: 0})).of(lifted._inner)
    return [replace(leaf, stacked=(axis, *leaf.stacked)) for leaf, axis in zip(found, axes)]
