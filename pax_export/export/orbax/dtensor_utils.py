"""Converts sharded jax arrays to DTensors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pax_export._errors import DTensorStateError, InvalidArgumentError, InvalidArgumentTypeError
from pax_export.export.orbax._tensorflow import tf
from pax_export.export.orbax.typing import PyTree

__all__ = [
    "Mesh",
    "dtensor_initialized",
    "get_current_dtensor_mesh",
    "get_current_mesh",
    "get_pspec_from_jax_arrays",
    "initialize_dtensor",
    "jax_array_to_dtensor",
    "jax_mesh_to_dtensor_mesh",
    "maybe_enable_dtensor_export_on",
    "shutdown_dtensor",
]

DTensor = Any


class _Process:
    initialized = False


class _Thread(threading.local):
    meshes: tuple[Mesh, ...] = ()  # of the blocks that it is in


_THREAD = _Thread()


@dataclass(frozen=True)
class Mesh:
    """One mesh, for jax and for DTensor.

    Example:
        >>> get_current_mesh() is None  # outside of an export over a mesh
        True
    """

    jax_mesh: jax.sharding.Mesh
    dtensor_mesh: Any


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
    if dtensor.num_clients() != jax.process_count():
        raise DTensorStateError(
            f"The number of DTensor clients ({dtensor.num_clients()}) is not equal to the number "
            f"of JAX processes ({jax.process_count()}).",
            write="the environment variables of DTensor (DTENSOR_JOBS ...) in every process",
        )
    found = (dtensor.num_local_devices("CPU"), dtensor.num_global_devices("CPU"))
    if found != (jax.local_device_count(), jax.device_count()):
        raise DTensorStateError(
            "DTensor has other devices than jax.",
            got=f"{found[0]} local and {found[1]} global devices",
            write="initialize_dtensor() before anything else uses TensorFlow",
        )
    _Process.initialized = True


def dtensor_initialized() -> bool:
    """Whether `initialize_dtensor` has been called.

    Example:
        >>> dtensor_initialized()
        False
    """
    return _Process.initialized


def shutdown_dtensor() -> None:
    """Shuts down DTensor after `initialize_dtensor`.

    Raises:
        DTensorStateError: DTensor is not initialized.

    Example:
        >>> shutdown_dtensor()  # doctest: +SKIP
    """
    if not dtensor_initialized():
        raise DTensorStateError("DTensor is not initialized.", write="initialize_dtensor()")
    tf.experimental.dtensor.shutdown_accelerator_system()
    _Process.initialized = False


def jax_mesh_to_dtensor_mesh(mesh: jax.sharding.Mesh) -> Any:
    """The DTensor mesh of CPU devices with the shape and axes of a mesh of jax.

    Example:
        >>> jax_mesh_to_dtensor_mesh(mesh)  # doctest: +SKIP
    """
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


def jax_array_to_dtensor(
    arr: Any,
    pspec: jax.sharding.PartitionSpec | None,
    dmesh: Any,
    jax_mesh: jax.sharding.Mesh | None = None,
    allow_multi_axis_sharding_consolidation: bool = False,
    *,
    allow_multi_axis_sharding_conslidation: bool = False,
) -> Any:
    """Converts a jax array to a tensor sharded over a DTensor mesh.

    Args:
        arr: the array; resharded if `jax_mesh` is given.
        pspec: the sharding of each dimension.
        dmesh: the DTensor mesh.
        jax_mesh: the same mesh in jax.
        allow_multi_axis_sharding_consolidation: shard a dimension with several mesh axes over
            the largest of them; DTensor supports only one.
        allow_multi_axis_sharding_conslidation: the same, with orbax's spelling.

    Raises:
        InvalidArgumentError: the mesh does not divide the array.

    Example:
        >>> jax_array_to_dtensor(array, PartitionSpec("x"), dmesh)  # doctest: +SKIP
    """
    dtensor = tf.experimental.dtensor
    consolidate = allow_multi_axis_sharding_consolidation or allow_multi_axis_sharding_conslidation
    sizes = {name: dmesh.dim_size(name) for name in dmesh.dim_names}
    axes, moved = layout_axes(tuple(arr.shape), pspec, sizes, consolidate)
    if jax_mesh is not None:
        spec = jax.sharding.PartitionSpec(*axes)
        arr = jax.device_put(arr, jax.sharding.NamedSharding(jax_mesh, spec))
    elif moved:
        raise InvalidArgumentError(
            "An array that is sharded over several mesh axes can be sharded over one only where "
            "the mesh of jax is known.",
            write="jax_array_to_dtensor(arr, pspec, dmesh, jax_mesh, True)",
        )
    layout = dtensor.Layout([axis or dtensor.UNSHARDED for axis in axes], dmesh)
    shards = list(arr.addressable_shards)
    if jax_mesh is not None:  # the order in which DTensor numbers the devices
        order = {int(device.id): place for place, device in enumerate(jax_mesh.devices.flat)}
        shards.sort(key=lambda shard: order[int(shard.device.id)])
    return dtensor.pack([np.asarray(shard.data) for shard in shards], layout)


def layout_axes(
    shape: tuple[int, ...], pspec: Any, sizes: dict[str, int], consolidate: bool
) -> tuple[list[str | None], bool]:
    """Returns one mesh axis or None per dimension, and whether the array must be resharded."""
    axes: list[str | None] = []
    moved = False
    for place, names in enumerate(() if pspec is None else pspec):
        if names and not isinstance(names, (str, tuple)):
            raise InvalidArgumentTypeError(
                "An element in a PartitionSpec must be a ``None``, a mesh axis or a tuple of mesh "
                f"axes. Got {names}."
            )
        names = (names,) if isinstance(names, str) else names or ()
        dividing = [name for name in names if sizes[name] > 1]
        if len(dividing) > 1 and not consolidate:
            raise InvalidArgumentError(
                f"Dimension {place} of the input array (shape={shape}) is sharded across more than "
                f"one axis ({names}, sizes = {tuple(sizes[name] for name in names)}) of the mesh, "
                "but jax.Array to DTensor transform does not support partitioning of an array "
                "dimension across multiple mesh axes, unless there is at most one axis with size "
                ">= 1.",
                write="allow_multi_axis_sharding_consolidation=True, to shard it over the largest",
            )
        axis = max(dividing or names[:1], key=lambda name: sizes[name], default=None)
        if axis is not None and shape[place] % sizes[axis]:
            raise InvalidArgumentError(
                f"The size of the dim {place} (={shape[place]}) of the input array (shape={shape})"
                f' must be a multiple of the size of mesh axis "{axis}" (={sizes[axis]}).',
                write="another partition spec, or an array that is padded",
            )
        axes.append(axis)
        moved = moved or len(dividing) > 1
    return axes + [None] * (len(shape) - len(axes)), moved


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
    outer = _THREAD.meshes
    _THREAD.meshes = (*outer, Mesh(jax_mesh=mesh, dtensor_mesh=jax_mesh_to_dtensor_mesh(mesh)))
    try:
        yield
    finally:
        _THREAD.meshes = outer


def get_current_mesh() -> Mesh | None:
    """Returns the mesh of the innermost context, for jax and DTensor.

    Example:
        >>> get_current_mesh() is None
        True
    """
    return _THREAD.meshes[-1] if _THREAD.meshes else None


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

    def spec(array: object) -> jax.sharding.PartitionSpec:
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
