"""Batches: each device gets some of the examples."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten, tree_flatten_with_path

from pax_export._errors import ShardingError
from pax_export.core import path_name
from pax_export.sharding._mesh import (
    mesh_text,
    names_in,
    parts_of,
    require_devices,
    sizes_of,
)
from pax_export.sharding._spec_errors import require_axis

T = TypeVar("T")


def shard_batch(batch: T, mesh: Mesh, axis: str | tuple[str, ...] = "data") -> T:
    """Splits a batch over a mesh, along the first axis of its arrays.

    With several processes each one gives the examples for its own devices, in the
    order of the processes along the axis; together they are one batch.  Processes
    whose devices stand at the same places of the axis give the same examples.

    Args:
        batch: a pytree of arrays ``[batch, ...]``.
        mesh: the mesh.
        axis: the mesh axis, or several as one.

    Returns:
        The same pytree of arrays ``[whole batch, ...]``.

    Raises:
        ShardingError: (a ValueError) the mesh has no such axis, or its part here
            does not divide the batch.

    Example:
        >>> import jax, numpy as np, pax_export as pax
        >>> mesh = pax.sharding.make_mesh(data=len(jax.devices()))
        >>> x = pax.sharding.shard_batch(np.ones((4 * mesh.size, 8)), mesh)
        >>> x.sharding.shard_shape(x.shape)
        (4, 8)
    """
    sizes = sizes_of(mesh)
    require_devices(mesh)
    for name in names_in(axis):
        require_axis(name, sizes, "the batch", f"axis={axis!r}")
    sharding = NamedSharding(mesh, PartitionSpec(axis))
    parts = _parts_here(sharding, parts_of(axis, sizes))
    items, treedef = tree_flatten_with_path(batch)
    for path, leaf in items:
        _require_split(path_name(path), np.shape(leaf), parts, axis, sizes)
    leaves, _ = tree_flatten(batch)
    return treedef.unflatten([_split(leaf, sharding) for leaf in leaves])


def _parts_here(sharding: NamedSharding, parts: int) -> int:
    """How many parts of the batch the devices of this process hold."""
    slices = sharding.addressable_devices_indices_map((parts,)).values()
    return len({index[0].indices(parts) for index in slices if index is not None})


def _require_split(
    name: str, shape: tuple[int, ...], parts: int, axis: Any, sizes: dict[str, int]
) -> None:
    if shape and shape[0] % parts == 0:
        return
    raise ShardingError(
        "The part of a mesh axis that this process has must divide its batch.",
        where=name or "the batch",
        got=f"shape {shape} for {parts} parts of {axis!r}, on a mesh with {mesh_text(sizes)}",
        write=f"a multiple of {parts} examples" if shape else "arrays [batch, ...]",
    )


def _split(leaf: Any, sharding: NamedSharding) -> jax.Array:
    if isinstance(leaf, jax.Array) and sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    value = np.asarray(leaf)
    value = value.astype(jax.dtypes.canonicalize_dtype(value.dtype), copy=False)
    return jax.make_array_from_process_local_data(sharding, value)
