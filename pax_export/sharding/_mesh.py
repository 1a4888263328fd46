"""Creation of meshes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from pax_export._foundations.check import checked_integer
from pax_export._foundations.errors import InvalidArgumentTypeError, ShardingError
from pax_export._foundations.types import AnyMesh


def make_mesh(devices: Sequence[Any] | None = None, **axes: int) -> Mesh:
    """Creates a mesh with Auto axes, on which the compiler infers shardings.

    Since jax 0.9, `jax.make_mesh` creates Explicit axes, on which ambiguous results need a given
    sharding. On Auto axes, a model written for one device runs unchanged.

    Args:
        devices: the devices; all of `jax.devices()` by default.
        **axes: the size of each axis by name; one of them may be -1, for the remaining devices.

    Raises:
        ShardingError: (a ValueError) the product of the sizes is not the number of devices.
        InvalidArgumentTypeError: (a TypeError) a size is not an integer, or ``devices`` are not
            devices (axes are keywords).

    Example:
        >>> import pax_export as pax
        >>> pax.sharding.make_mesh(data=-1, model=1).axis_names
        ('data', 'model')
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = _complete_sizes(axes, len(devices))
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)


def abstract_mesh(**axes: int) -> AbstractMesh:
    """Creates a mesh without devices, for `table` and for ahead-of-time compilation.

    Args:
        **axes: the size of each axis, by its name.

    Raises:
        ShardingError: (a ValueError) no axes, or a size below one.
        InvalidArgumentTypeError: (a TypeError) a size is not an integer.

    Example:
        >>> import pax_export as pax
        >>> pax.sharding.abstract_mesh(data=64, model=8).size
        512
    """
    sizes = _complete_sizes(axes, None)
    types = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def _complete_sizes(axes: Mapping[str, int], devices: int | None) -> dict[str, int]:
    for name, size in axes.items():
        checked_integer(
            size, name, what="The size of a mesh axis", write="make_mesh(data=4, model=2)"
        )
    sizes = dict(axes)
    unknown = [name for name, size in sizes.items() if size == -1]
    rest = math.prod([size for size in sizes.values() if size != -1])
    if devices is not None and len(unknown) == 1 and rest > 0 and devices % rest == 0:
        sizes[unknown[0]] = devices // rest
    is_mesh = bool(sizes) and all(size >= 1 for size in sizes.values())
    if is_mesh and devices in (None, math.prod(sizes.values())):
        return sizes
    listed = ", ".join([f"{name}={size}" for name, size in axes.items()]) or "no axes"
    raise ShardingError(
        "The sizes of axes must be at least 1, and multiply to the number of devices.",
        got=listed if devices is None else f"{listed} for {devices} devices",
        write="make_mesh(data=-1, model=2), where -1 means the remaining devices, with "
        "devices=jax.devices()[:n] for some of them; abstract_mesh(data=64, model=8)",
    )


def checked_mesh(mesh: AnyMesh | None) -> AnyMesh:
    """The mesh; an InvalidArgumentTypeError if it is none."""
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise InvalidArgumentTypeError(
            "Expected a mesh.",
            where="mesh=",
            got=f"{type(mesh).__name__}: {mesh!r}"[:120],
            write="pax.sharding.make_mesh(data=4, model=2), or a jax.sharding.Mesh",
        )
    return mesh


def sizes_of(mesh: AnyMesh) -> dict[str, int]:
    """The size of each axis of a mesh; an InvalidArgumentTypeError if it is none."""
    return dict(checked_mesh(mesh).shape)


def require_devices(mesh: AnyMesh) -> None:
    """Raises an InvalidArgumentTypeError unless a mesh has devices."""
    if isinstance(mesh, AbstractMesh):
        raise InvalidArgumentTypeError(
            "Arrays need a mesh of devices.",
            got=f"an abstract mesh of {mesh.size}",
            write="pax.sharding.make_mesh(...); only a module of jax.eval_shape needs no devices",
        )


def mesh_text(sizes: Mapping[str, int]) -> str:
    """The axes of a mesh in words: ``data=4, model=2``."""
    return ", ".join([f"{name}={size}" for name, size in sizes.items()])


def names_in(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that an entry of a spec names."""
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def parts_of(entry: str | tuple[str, ...] | None, sizes: Mapping[str, int]) -> int:
    """Into how many parts an entry of a spec splits its axis."""
    return math.prod([sizes[name] for name in names_in(entry)])
