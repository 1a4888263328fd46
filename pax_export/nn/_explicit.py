"""Output shardings of layers on meshes with Explicit axes.

Layers compute as on Auto axes; results are split like the input along batch axes and replicated
along channels. A `Linear` splits its output like its weight, as jax does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten, tree_leaves, tree_map

from pax_export._foundations.errors import ShardingError
from pax_export._foundations.types import Array, PyTree

Entry = Any  # of a spec: the name of a mesh axis, several, or None
Spec = tuple[Entry, ...]


def explicit_mesh(*arrays: PyTree) -> Any:
    """Returns the mesh with Explicit axes of one of these arrays, or None.

    Some may be None, or trees of arrays, as quantized weights are.
    """
    for array in tree_leaves(arrays):
        mesh = jax.typeof(array).sharding.mesh
        if AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def spec_of(array: Array) -> Spec:
    """Returns the mesh axes along which each axis of an array is split."""
    type_of = jax.typeof(array)
    spec = tuple(type_of.sharding.spec)
    return spec + (None,) * (len(type_of.shape) - len(spec))


def join_specs(*entries: Entry) -> PartitionSpec:
    """A spec of these entries; repeated mesh axes count once, the first time."""
    used: set[str] = set()
    axes = []
    for entry in entries:
        names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        axes.append(entry if used.isdisjoint(names) else None)
        used.update(names)
    return PartitionSpec(*axes)


def under_auto_axes(function: Callable[..., Any], operands: tuple, out: Callable[[], Any]) -> Any:
    """Calls a function of arrays (or None) on any mesh; `out` returns specs for Explicit axes."""
    mesh = explicit_mesh(*operands)
    if mesh is None:
        return function(*operands)
    kinds = zip(mesh.axis_names, mesh.axis_types)
    names = tuple([name for name, kind in kinds if kind == AxisType.Explicit])
    shardings = tree_map(lambda spec: NamedSharding(mesh, spec), out(), is_leaf=_is_spec)
    return jax.sharding.auto_axes(function, axes=names, out_sharding=shardings)(*operands)


def shard_map_over_batch(function: Callable[..., Any], x: Array, weights: tuple) -> Any:
    """Applies a function to examples; on Explicit axes each device computes its own ones.

    The weights, which may be None, are replicated then.
    """
    mesh = explicit_mesh(x, *weights)
    if mesh is None:
        return function(x, *weights)
    present = [weight for weight in weights if weight is not None]

    def of_a_part(x: Array, *present: object) -> Any:
        left = iter(present)
        return function(x, *[None if weight is None else next(left) for weight in weights])

    batch, whole = join_specs(spec_of(x)[0]), PartitionSpec()
    specs = (batch, *(whole for _ in present))
    laid = [
        jax.sharding.reshard(array, NamedSharding(mesh, spec))
        for array, spec in zip((x, *present), specs)
    ]
    return jax.shard_map(of_a_part, mesh=mesh, in_specs=specs, out_specs=batch)(*laid)


def of_a_function(function: Callable[..., Any], args: tuple, kwargs: dict, error: Exception) -> Any:
    """Calls a function whose output sharding jax cannot infer on Explicit axes.

    Results with the size of the batch are split, others replicated; converts jax's error.
    """
    arrays = [leaf for leaf in tree_leaves((args, kwargs)) if hasattr(leaf, "shape")]
    mesh = explicit_mesh(*arrays)
    if type(error).__name__ != "ShardingTypeError" or mesh is None:
        raise error
    first = next(array for array in arrays if explicit_mesh(array) is not None)

    def lies(shape: tuple) -> PartitionSpec:
        is_batch = bool(shape and first.shape) and shape[0] == first.shape[0]
        return join_specs(spec_of(first)[0]) if is_batch else PartitionSpec()

    def call(*leaves: object) -> Any:
        args, kwargs = treedef.unflatten(leaves)
        return function(*args, **kwargs)

    leaves, treedef = tree_flatten((args, kwargs))
    try:
        shapes = jax.eval_shape(call, *map(_without_sharding, leaves))
        return under_auto_axes(
            call, tuple(leaves), lambda: tree_map(lambda s: lies(s.shape), shapes)
        )
    except Exception:  # jax's first error, `error`, says more than that of the second try
        raise ShardingError(
            "jax cannot infer the sharding of the function's result on Explicit axes.",
            got=str(error).split("\n")[0][:300],
            write="jax.sharding.reshard(x, P('data')) of its arguments, out_sharding= where jax "
            "takes it, or a mesh of pax_export.sharding.make_mesh",
        ) from error


def _without_sharding(leaf: Array) -> Any:
    """The shape and dtype of an array, without its sharding."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else leaf


def _is_spec(value: object) -> bool:
    return isinstance(value, PartitionSpec)


def laid_like(array: Array, model: PyTree) -> Any:
    """Shards an array on Explicit axes like another one of its rank."""
    mesh = explicit_mesh(model)
    if mesh is None or (explicit_mesh(array) is not None and spec_of(array) == spec_of(model)):
        return array
    return jax.sharding.reshard(array, NamedSharding(mesh, join_specs(*spec_of(model))))


def with_whole_channels(array: Array) -> Any:
    """The array, on Explicit axes with its last axis on each device."""
    mesh = explicit_mesh(array)
    if mesh is None or spec_of(array)[-1] is None:
        return array
    return jax.sharding.reshard(array, NamedSharding(mesh, join_specs(*spec_of(array)[:-1])))


def on_explicit_mesh(tree: PyTree) -> bool:
    """Whether an array of a tree is on Explicit axes."""
    return explicit_mesh(*tree_leaves(tree)) is not None
