"""Checks that all processes pass equal values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pax_export._errors import ShardingError
from pax_export._types import AnyMesh, PyTree


def require_same_values(values: Sequence[Any], mesh: AnyMesh) -> None:
    """Raises a ShardingError, in every process, where they give different values for a mesh."""
    if values:
        what = "The processes of a mesh must give the same values."
        _require_same(map(_bytes_of, values), mesh, what)


def require_same_program(text: str, mesh: AnyMesh) -> None:
    """Raises a ShardingError, in every process, where they would run different programs."""
    _require_same([text.encode()], mesh, "The processes of a mesh must build the same model.")


def _is_ours(mesh: AnyMesh) -> bool:
    """True where no other process has devices of the mesh."""
    here = jax.process_index()
    devices = getattr(mesh, "devices", None)
    return devices is None or all(device.process_index == here for device in devices.flat)


def _bytes_of(value: PyTree) -> bytes:
    if jnp.issubdtype(getattr(value, "dtype", np.float32), jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.ascontiguousarray(value)
    return f"{array.shape}{array.dtype}".encode() + array.tobytes()


def _require_same(parts: Iterable[bytes], mesh: AnyMesh, what: str) -> None:
    """Each sends a digest of 32 bytes, unless this process has all devices of the mesh."""
    if _is_ours(mesh):
        return
    from jax.experimental import multihost_utils

    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    own = np.frombuffer(digest.digest(), np.uint8)
    all_of_them = np.asarray(multihost_utils.process_allgather(own))
    if (all_of_them == own).all():
        return
    same = [i for i, other in enumerate(all_of_them) if (other == all_of_them[0]).all()]
    raise ShardingError(
        what,
        got=f"values of {len(all_of_them)} processes, of which only "
        f"{', '.join(map(str, same))} agree with process 0",
        write="pax.seed_rng_key(n) with one n in every process, before the model is made",
    )
