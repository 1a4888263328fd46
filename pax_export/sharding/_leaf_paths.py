"""Leaves of a tree with their paths and enclosing modules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from pax_export._types import PyTree
from pax_export.core import FilteredLeaf, Node, Spec, is_random_key, specs_of
from pax_export.transforms import Scan, StateAxes, Vmap


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
    return [_in_a_stack(leaf, tree, len(steps)) for leaf in found] if stacks else found


def _in_a_stack(leaf: LeafPath, module: PyTree, depth: int) -> LeafPath:
    """A leaf of a module that keeps layers stacked by itself, along their first axis."""
    name = leaf.steps[depth]
    is_stacked = name in type(module)._pax_stacked and isinstance(getattr(module, name), Node)
    return replace(leaf, stacked=(0, *leaf.stacked)) if is_stacked else leaf


def _leaf_path(leaf: PyTree, steps: tuple[str, ...], owners: tuple[Owner, ...]) -> LeafPath:
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


def _with_layer_axes(lifted: PyTree, found: list[LeafPath]) -> list[LeafPath]:
    """The leaves in a `Vmap` or `Scan`, with the axis of layers."""
    axes = (dict(lifted.options)["state_axes"] or StateAxes({...: 0})).of(lifted._inner)
    return [replace(leaf, stacked=(axis, *leaf.stacked)) for leaf, axis in zip(found, axes)]
