"""Stacks a list of equal layers, and unstacks it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves, tree_structure

from pax_export._foundations.check import checked_integer
from pax_export._foundations.errors import InvalidArgumentError, StructureMismatchError
from pax_export._foundations.types import Array
from pax_export.core import Module, is_node, leaves_of
from pax_export.transforms._checks import check_axis_fits, tree_differences
from pax_export.transforms._sharding import with_stacked_axis, without_stacked_axis


def stack_layers(layers: Sequence[Any], *, axis: int = 0, axis_label: str | None = None) -> Any:
    """Stacks a list of equal modules into one, as in `Scan` and `Vmap`.

    A checkpoint of a network with a list of layers loads into one with scanned layers: load it into
    the former, then stack.

    Args:
        layers: modules of one structure, whose leaves have the same shapes and
            dtypes.
        axis: the position of the new axis of layers.
        axis_label: the name of that axis in partition specs.

    Returns:
        A module of the class of the layers.

    Raises:
        InvalidArgumentError: (a ValueError) the list is empty, or the axis out of bounds.
        StructureMismatchError: (a ValueError) two layers differ.

    Example:
        >>> import pax_export as pax
        >>> from pax_export import transforms as T
        >>> layers = [pax.Linear(3, 4) for _ in range(5)]
        >>> stacked = T.stack_layers(layers)
        >>> stacked.weight.shape
        (5, 3, 4)
        >>> bool((T.unstack_layers(stacked)[2].weight == layers[2].weight).all())
        True
    """
    layers = list(layers)
    if not layers:
        raise InvalidArgumentError(
            "stack_layers needs at least one layer.", got="an empty list", write="a list of modules"
        )
    first = layers[0]
    for number, layer in enumerate(layers):
        if lines := tree_differences(first, layer, "the layer"):
            raise StructureMismatchError(
                "Only equal layers can be stacked.",
                where=f"layer {number}",
                got="; ".join(lines[:3]),
                write="layers of one recipe, in one mode (train or eval); for adapters of "
                "different ranks, adapters.pad_ranks(net) before",
            )
    axis = checked_integer(axis, "stack_layers.axis", write="axis=0")
    for name, leaf in _leaves_with_names(first):
        check_axis_fits("stack_layers", axis, jnp.ndim(leaf) + 1, jnp.shape(leaf), name)
    columns = zip(*map(tree_leaves, layers))
    leaves = [jnp.stack(column, axis) for column in columns]
    stacked = tree_structure(first).unflatten(leaves)
    return with_stacked_axis(stacked, [axis] * len(leaves), axis_label)


def _leaves_with_names(layer: Module) -> list[tuple[str, Any]]:
    if is_node(layer):
        return [(leaf.name, leaf.value) for leaf in leaves_of(layer)]
    return [(f"leaf {i}", leaf) for i, leaf in enumerate(tree_leaves(layer))]


def unstack_layers(stacked: Module, *, axis: int = 0) -> list[Any]:
    """Splits a stacked module into a list of layers: the inverse of `stack_layers`.

    Args:
        stacked: a module whose leaves all have an axis of layers, such as
            ``Scan(...)(...).scan_module``.
        axis: the position of that axis.

    Returns:
        The layers, each a module of the same class; numpy arrays are views of the stacked ones.

    Raises:
        InvalidArgumentError: (a ValueError) the leaves have no such axis, or
            differ in its length.

    Example:
        >>> import pax_export as pax
        >>> from pax_export import transforms as T
        >>> net = T.Vmap(pax.Linear, axis_size=5)(3, 4)
        >>> [layer.weight.shape for layer in T.unstack_layers(net.vmap_module)][:2]
        [(3, 4), (3, 4)]
    """
    axis = checked_integer(axis, "unstack_layers.axis", write="axis=0")
    leaves = tree_leaves(stacked)
    sizes: dict[Any, str] = {}
    for name, leaf in _leaves_with_names(stacked):
        shape = jnp.shape(leaf)
        fits = -len(shape) <= axis < len(shape)
        sizes.setdefault(shape[axis] if fits else None, name)
    if len(sizes) != 1 or None in sizes:
        raise InvalidArgumentError(
            "A module can be split into layers only if every leaf has an axis of layers.",
            where=" and ".join(list(sizes.values())[:2]) or None,
            got=f"lengths {', '.join(str(size) for size in sizes) or 'of no leaf'} on axis {axis}",
            write="a module whose leaves are all stacked, without shared state",
        )
    treedef = tree_structure(without_stacked_axis(stacked, [axis] * len(leaves)))
    columns = [_unstack_leaf(leaf, axis) for leaf in leaves]
    return [treedef.unflatten(row) for row in zip(*columns)]


def _unstack_leaf(leaf: Array, axis: int) -> Sequence[Any]:
    """Splits a leaf into layers; numpy arrays into views."""
    if isinstance(leaf, np.ndarray):
        moved = np.moveaxis(leaf, axis, 0)
        return [moved[index, ...] for index in range(len(moved))]
    # All layers at once: one by one, each would be a program to compile.
    return jnp.unstack(leaf, axis=axis)
