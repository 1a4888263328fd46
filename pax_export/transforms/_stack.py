"""A list of equal layers as one stacked layer, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.tree_util import tree_flatten, tree_structure

from pax_export._errors import InvalidArgumentError, StructureMismatchError
from pax_export.core import describe_array, is_node, structure_differences
from pax_export.transforms._filters import leaves_of
from pax_export.transforms._sharding import (
    positive_axis,
    with_stacked_axis,
    without_stacked_axis,
)


def stack_layers(layers: Sequence[Any], *, axis: int = 0, axis_label: str | None = None) -> Any:
    """Makes one module of a list of equal ones, as `Scan` and `Vmap` hold it.

    So a checkpoint of a network with a list of layers loads into one with
    scanned layers: load it into the former, stack.

    Args:
        layers: modules of one structure, whose leaves have the same shapes and
            dtypes.
        axis: where every leaf gets the axis of layers.
        axis_label: the name of that axis in partition specs.

    Returns:
        A module of the class of the layers.

    Raises:
        InvalidArgumentError: (a ValueError) there are no layers.
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
        _require_equal(first, layer, number)
    columns = zip(*[tree_flatten(layer)[0] for layer in layers])
    leaves = [jnp.stack(column, axis) for column in columns]
    stacked = tree_structure(first).unflatten(leaves)
    return _labelled(stacked, leaves, axis, axis_label)


def _labelled(stacked: Any, leaves: list[Any], axis: int, label: str | None) -> Any:
    if not is_node(stacked):
        return stacked
    return with_stacked_axis(stacked, [positive_axis(axis, leaf) for leaf in leaves], label)


def _require_equal(first: Any, layer: Any, number: int) -> None:
    if tree_structure(first) != tree_structure(layer):
        lines = structure_differences(first, layer) or ["the treedefs differ"]
    else:
        pairs = zip(_named(first), _named(layer))
        lines = [
            f"{name}: {describe_array(a)} against {describe_array(b)}"
            for (name, a), (_, b) in pairs
            if jnp.shape(a) != jnp.shape(b) or a.dtype != b.dtype
        ]
    if lines:
        raise StructureMismatchError(
            "Only equal layers can be stacked.",
            where=f"layer {number}",
            got="; ".join(lines[:3]),
            write="layers of one recipe, in one mode (train or eval)",
        )


def _named(layer: Any) -> list[tuple[str, Any]]:
    if is_node(layer):
        return [(leaf.name, leaf.value) for leaf in leaves_of(layer)]
    return [(f"leaf {i}", leaf) for i, leaf in enumerate(tree_flatten(layer)[0])]


def unstack_layers(stacked: Any, *, axis: int = 0) -> list[Any]:
    """The list of layers that `stack_layers` would make one of.

    Args:
        stacked: a module every leaf of which has an axis of layers, such as
            ``Scan(...)(...).scan_module``.
        axis: where that axis is.

    Returns:
        The layers, each a module of the same class.

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
    leaves, treedef = tree_flatten(stacked)
    sizes: dict[Any, str] = {}
    for name, leaf in _named(stacked):
        shape = jnp.shape(leaf)
        fits = -len(shape) <= axis < len(shape)
        sizes.setdefault(shape[axis] if fits else None, name)
    if len(sizes) != 1 or None in sizes:
        raise InvalidArgumentError(
            "To take a module apart into layers, every leaf needs an axis of layers.",
            where=" and ".join(list(sizes.values())[:2]) or None,
            got=f"lengths {', '.join(str(size) for size in sizes) or 'of no leaf'} on axis {axis}",
            write="a module whose leaves all are stacked; one with shared state is not",
        )
    (length,) = sizes
    if is_node(stacked):
        axes = [positive_axis(axis, leaf) for leaf in leaves]
        treedef = tree_structure(without_stacked_axis(stacked, axes))
    rows = [[_take(leaf, i, axis) for leaf in leaves] for i in range(length)]
    return [treedef.unflatten(row) for row in rows]


def _take(leaf: Any, i: int, axis: int) -> Any:
    return jnp.moveaxis(leaf, axis, 0)[i]
