"""Declared partition specs of modules, as trees and as constraints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten, tree_map, tree_structure

from pax_export._foundations.types import PyTree
from pax_export.core import (
    SPECS,
    Node,
    Spec,
    flatten,
    is_node,
    leaves_of,
    map_submodules,
    modules_and_leaves,
    specs_of,
    with_static,
)

PARTITION_NAME = "partition_name"
"""The key of ``transform_metadata`` that names the axis a transform stacks along."""


def get_partition_spec(tree: PyTree) -> Any:
    """The partition specs that modules declare.

    Args:
        tree: a module, or a pytree of modules and arrays.

    Returns:
        The same pytree with a `jax.sharding.PartitionSpec` for each array; an
        empty one where none is declared.

    Example:
        >>> import pax_export as pax
        >>> from pax_export import transforms as T
        >>> layer = pax.Linear(4, 2).with_sharding(weight=("data", "model"))
        >>> tuple(T.get_partition_spec(layer).weight), tuple(T.get_partition_spec(layer).bias)
        (('data', 'model'), ())
    """
    return tree_map(
        lambda x: _specs_of_module(x) if is_node(x) else PartitionSpec(), tree, is_leaf=is_node
    )


def _specs_of_module(module: Node) -> Any:
    return tree_structure(module).unflatten(_declared_specs(module))


def _declared_specs(module: Node) -> list[PartitionSpec]:
    """The spec of each leaf."""
    specs = [specs_of(leaf.owners[-1]).get(leaf.attribute) for leaf in leaves_of(module)]
    return [PartitionSpec(*(spec or ())) for spec in specs]


def get_named_sharding(tree: PyTree, mesh: Mesh) -> Any:
    """Returns the shardings on a mesh that modules declare.

    Args:
        tree: a module, or a pytree of modules and arrays.
        mesh: the mesh whose axes the specs name.

    Returns:
        The same pytree with a `jax.sharding.NamedSharding` for each array.

    Raises:
        ValueError: a spec names an axis that the mesh does not have.

    Example:
        >>> import jax, pax_export as pax
        >>> from pax_export import transforms as T
        >>> mesh = jax.make_mesh((1,), ("model",))
        >>> layer = pax.Linear(4, 2).with_sharding(weight=(None, "model"))
        >>> layer = jax.device_put(layer, T.get_named_sharding(layer, mesh))
        >>> tuple(layer.weight.sharding.spec)
        (None, 'model')
    """
    return tree_map(
        lambda spec: NamedSharding(mesh, spec),
        get_partition_spec(tree),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def constrain_leaves(module: Node) -> Any:
    """The module with its leaves constrained to the specs that it declares."""
    leaves, treedef = tree_flatten(module)
    return treedef.unflatten(map(jax.lax.with_sharding_constraint, leaves, _declared_specs(module)))


# --- stacking -----------------------------------------------------------------------------


def with_stacked_axis(module: Node, axes: Sequence[int | None], name: str | None) -> Any:
    """Returns the specs of a module whose leaves got a new axis at these positions, or None."""
    return _change_specs(module, axes, lambda spec, axis: _insert_axis(spec, axis, name))


def without_stacked_axis(module: Node, axes: Sequence[int | None]) -> Any:
    """Returns the specs of a module whose leaves lose this axis."""
    return _change_specs(module, axes, _remove_axis)


def _insert_axis(spec: Spec, axis: int, name: str | None) -> Spec:
    padded = spec + (None,) * (axis - len(spec))
    return (*padded[:axis], name, *padded[axis:])


def _remove_axis(spec: Spec, axis: int) -> Spec:
    return spec[:axis] + spec[axis + 1 :]


def _change_specs(
    module: Node, axes: Sequence[int | None], change: Callable[[Spec, int], Spec]
) -> Any:
    if not is_node(module) or not any(map(specs_of, modules_and_leaves(module)[0])):
        return module
    changes: dict[int, dict[str, int | None]] = {}
    for leaf, axis in zip(leaves_of(module), axes):
        if axis is not None and axis < 0:
            axis += leaf.value.ndim
        changes.setdefault(id(leaf.owners[-1]), {}).setdefault(leaf.attribute, axis)

    def visit(old: Node) -> Any:
        new = map_submodules(old, visit)
        if SPECS not in flatten(old)[1].static:
            return new
        places = changes.get(id(old), {})
        specs = []
        for name, spec in specs_of(old).items():
            axis = places.get(name)
            specs.append((name, spec if axis is None else change(spec, axis)))
        return with_static(new, **{SPECS: tuple(specs)})

    return visit(module)
