"""Places: the leaves of a tree as rules see them, with the modules around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from pax_export.core import Node, Spec, specs_of
from pax_export.transforms import Leaf, Scan, StateAxes, Vmap, is_random_key


@dataclass(frozen=True, eq=False)
class Owner:
    """A module around a leaf.

    Attributes:
        module: the module.
        depth: how many steps of the leaf's path lead to it.
    """

    module: Any
    depth: int


@dataclass(frozen=True, eq=False)
class Place:
    """A leaf and where it stands.

    Attributes:
        steps: the path from the root, each step as text.
        shape: of the array.
        dtype: of the array.
        owners: the modules that hold it, the outermost first.
        declared: the spec that its module declares, if any.
        stacked: for each `Vmap` and `Scan` around it, the outermost first, the
            axis along which that stacks it, counted in what the ones further
            out left of its shape; None where it is shared.
        is_key: whether it is a random key.
    """

    steps: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any
    owners: tuple[Owner, ...]
    declared: Spec | None
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
    def size(self) -> int:
        """How many numbers."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return self.dtype.itemsize

    @property
    def own_axes(self) -> tuple[int, ...]:
        """The axes that the innermost module knows: without those of stacked layers."""
        axes = list(range(len(self.shape)))
        for axis in self.stacked:
            if axis is not None and -len(axes) <= axis < len(axes):
                del axes[axis]
        return tuple(axes)


def places(tree: Any) -> list[Place]:
    """The places of all leaves of a tree, in tree order."""
    return _places(tree, (), ())


def _places(tree: Any, steps: tuple[str, ...], owners: tuple[Owner, ...]) -> list[Place]:
    if isinstance(tree, Node):
        owners = (*owners, Owner(tree, len(steps)))
    items, _ = tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree and isinstance(x, Node))
    found: list[Place] = []
    for path, item in items:
        below = (*steps, *[keystr((key,), simple=True) for key in path])
        if isinstance(item, Node) and item is not tree:
            found += _places(item, below, owners)
        else:
            found.append(_place(item, below, owners))
    return _stacked(tree, found) if isinstance(tree, (Vmap, Scan)) else found


def _place(leaf: Any, steps: tuple[str, ...], owners: tuple[Owner, ...]) -> Place:
    dtype = getattr(leaf, "dtype", None)
    declared, is_key = None, dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if owners:
        owner = owners[-1]
        attribute = steps[owner.depth]
        declared = specs_of(owner.module).get(attribute)
        is_key = is_random_key(Leaf(steps, leaf, (owner.module,), attribute))
    return Place(
        steps=steps,
        shape=tuple(np.shape(leaf)),
        dtype=jax.dtypes.canonicalize_dtype(np.result_type(leaf)) if dtype is None else dtype,
        owners=owners,
        declared=declared,
        stacked=(),
        is_key=is_key,
    )


def _stacked(lifted: Any, found: Sequence[Place]) -> list[Place]:
    """The places in a `Vmap` or `Scan`, which know the axis of its layers."""
    axes = dict(lifted.options)["state_axes"] or StateAxes({...: 0})
    each = axes.of(lifted._inner)
    return [
        Place(**{**vars(place), "stacked": (axis, *place.stacked)})
        for place, axis in zip(found, each)
    ]
