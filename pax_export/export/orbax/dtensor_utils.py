"""Converts sharded jax arrays to DTensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import numpy as np

from pax_export._foundations.errors import DTensorStateError, InvalidArgumentError
from pax_export._foundations.optional import require
from pax_export._foundations.types import Array, PyTree

__all__ = [
    "dtensor_initialized",
    "get_current_dtensor_mesh",
    "get_current_mesh",
    "get_pspec_from_jax_arrays",
    "initialize_dtensor",
    "maybe_enable_dtensor_export_on",
    "shutdown_dtensor",
]


#: The classes of this package derive from `tf.Module`.
tf: Any = require("tensorflow", "tensorflow", "pax_export.export.orbax")


class Mesh(NamedTuple):
    """One mesh, for jax and for DTensor."""

    jax_mesh: jax.sharding.Mesh
    dtensor_mesh: Any


_initialized = False
_MESH: ContextVar[Mesh | None] = ContextVar("mesh", default=None)  # of the innermost block


def initialize_dtensor(reset_context: bool = False) -> None:
    """Gives TensorFlow as many virtual CPU devices as jax has; call it before using TensorFlow.

    Args:
        reset_context: restart TensorFlow's runtime; existing objects become invalid.

    Raises:
        DTensorStateError: TensorFlow has other devices or processes than jax.

    Example:
        >>> initialize_dtensor()  # doctest: +SKIP
    """
    dtensor = tf.experimental.dtensor
    dtensor.initialize_accelerator_system(
        device_type="CPU",
        num_logical_cpu_devices=jax.local_device_count(),
        experimental_reset_context=reset_context,
    )
    found = (dtensor.num_clients(), dtensor.num_local_devices("CPU"))
    if found != (jax.process_count(), jax.local_device_count()):
        raise DTensorStateError(
            "DTensor has other processes or devices than jax.",
            got=f"{found[0]} processes, {found[1]} devices in this one",
            write="initialize_dtensor() before anything else uses TensorFlow, with DTensor's "
            "environment variables (DTENSOR_JOBS ...) in every process",
        )
    global _initialized
    _initialized = True


def dtensor_initialized() -> bool:
    """Whether `initialize_dtensor` has been called.

    Example:
        >>> dtensor_initialized()
        False
    """
    return _initialized


def shutdown_dtensor() -> None:
    """Shuts down DTensor after `initialize_dtensor`; a DTensorStateError without it.

    Example:
        >>> shutdown_dtensor()  # doctest: +SKIP
    """
    if not dtensor_initialized():
        raise DTensorStateError("DTensor is not initialized.", write="initialize_dtensor()")
    tf.experimental.dtensor.shutdown_accelerator_system()
    global _initialized
    _initialized = False


def _dtensor_mesh(mesh: jax.sharding.Mesh) -> Any:
    """The DTensor mesh of CPU devices with the shape and axes of a mesh of jax."""
    dtensor = tf.experimental.dtensor
    ids = np.arange(mesh.devices.size).reshape(mesh.devices.shape)
    process = jax.process_index()
    each = zip(ids.flat, mesh.devices.flat)
    local = [int(index) for index, device in each if device.process_index == process]
    devices = dtensor.local_devices(device_type="CPU")
    return dtensor.Mesh(
        list(mesh.axis_names),
        global_device_ids=ids,
        local_device_ids=local,
        local_devices=devices[: len(local)],
    )


def to_dtensor(
    array: Array, pspec: jax.sharding.PartitionSpec | None, mesh: Mesh, consolidate: bool
) -> Any:
    """Converts a jax array to a tensor sharded over a mesh.

    DTensor shards a dimension over one axis: `consolidate` takes the largest of several.
    """
    dtensor = tf.experimental.dtensor
    jax_mesh, dtensor_mesh = mesh
    sizes = {name: dtensor_mesh.dim_size(name) for name in dtensor_mesh.dim_names}
    axes = layout_axes(tuple(array.shape), pspec, sizes, consolidate)
    spec = jax.sharding.PartitionSpec(*axes)
    placed = jax.device_put(array, jax.sharding.NamedSharding(jax_mesh, spec))
    layout = dtensor.Layout([axis or dtensor.UNSHARDED for axis in axes], dtensor_mesh)
    # In the order in which DTensor numbers the devices.
    order = {int(device.id): index for index, device in enumerate(jax_mesh.devices.flat)}
    shards = sorted(placed.addressable_shards, key=lambda shard: order[int(shard.device.id)])
    return dtensor.pack([np.asarray(shard.data) for shard in shards], layout)


def layout_axes(
    shape: tuple[int, ...],
    pspec: jax.sharding.PartitionSpec | None,
    sizes: dict[str, int],
    consolidate: bool,
) -> list[str | None]:
    """Returns one mesh axis or None per dimension."""
    axes: list[str | None] = []
    for dimension, names in enumerate(() if pspec is None else pspec):
        names = (names,) if isinstance(names, str) else names or ()
        dividing = [name for name in names if sizes[name] > 1]
        if len(dividing) > 1 and not consolidate:
            raise InvalidArgumentError(
                f"Dimension {dimension} of the input array (shape={shape}) is sharded across more "
                f"than one axis ({names}, sizes = {tuple(sizes[n] for n in names)}) of the mesh, "
                "which DTensor does not support.",
                write="allow_multi_axis_sharding_consolidation=True, to shard it over the largest",
            )
        axis = max(dividing or names[:1], key=lambda name: sizes[name], default=None)
        axes.append(axis)
    return axes + [None] * (len(shape) - len(axes))


@contextmanager
def maybe_enable_dtensor_export_on(mesh: jax.sharding.Mesh | None) -> Iterator[None]:
    """Context manager in which the variables of a `JaxModule` are sharded over a mesh.

    It does nothing if DTensor is not initialized or the mesh is None.

    Args:
        mesh: a jax mesh.

    Example:
        >>> with maybe_enable_dtensor_export_on(None):
        ...     get_current_mesh() is None
        True
    """
    if not dtensor_initialized() or mesh is None:
        yield
        return
    outer = _MESH.set(Mesh(mesh, _dtensor_mesh(mesh)))
    try:
        yield
    finally:
        _MESH.reset(outer)


def get_current_mesh() -> Mesh | None:
    """Returns the mesh of the innermost context, for jax and DTensor.

    Example:
        >>> get_current_mesh() is None
        True
    """
    return _MESH.get()


def get_current_dtensor_mesh() -> Any:
    """Returns the DTensor mesh of the innermost context.

    Example:
        >>> get_current_dtensor_mesh() is None
        True
    """
    mesh = get_current_mesh()
    return mesh.dtensor_mesh if mesh else None


def get_pspec_from_jax_arrays(nested_jax_arrays: PyTree) -> PyTree:
    """The partition specs of arrays or `jax.ShapeDtypeStruct` with named shardings, as a pytree.

    Arrays without a sharding get `PartitionSpec()`.

    Raises:
        InvalidArgumentError: the shardings have different meshes, or no names.
            (An AssertionError, as in orbax.)

    Example:
        >>> get_pspec_from_jax_arrays({"w": jax.ShapeDtypeStruct((2,), "float32")})
        {'w': P()}
    """
    meshes: list[Any] = []

    def spec(array: Array | jax.ShapeDtypeStruct) -> jax.sharding.PartitionSpec:
        sharding = getattr(array, "sharding", None)
        if sharding is None:
            return jax.sharding.PartitionSpec()
        if not isinstance(sharding, jax.sharding.NamedSharding):
            raise InvalidArgumentError(
                f"Unsupported sharding type: {type(sharding)}, only support NamedSharding",
                write="jax.device_put(array, NamedSharding(mesh, spec))",
            )
        meshes.append(sharding.mesh)
        if sharding.mesh != meshes[0]:
            raise InvalidArgumentError(
                "All those NamedShardings must have the same mesh.",
                got=f"{meshes[0]} != {sharding.mesh}",
            )
        return sharding.spec

    return jax.tree_util.tree_map(spec, nested_jax_arrays)
