"""Agreement: several processes must give the same values, or their parts do not fit."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pax_export._errors import ShardingError


def require_agreement(values: Sequence[Any], mesh: Any) -> None:
    """Raises where processes give different values for one mesh.

    Each sends a digest of 32 bytes.  Nothing happens where this process has all
    devices.

    Raises:
        ShardingError: (in every process) the values differ.
    """
    if not values or _is_ours(mesh):
        return
    digest = hashlib.sha256()
    for value in values:
        digest.update(_bytes_of(value))
    _compare(digest.digest(), "The processes of a mesh must give the same values.")


def require_same_program(text: str, mesh: Any) -> None:
    """Raises where processes would run different programs on one mesh.

    Raises:
        ShardingError: (in every process) the programs differ.
    """
    if _is_ours(mesh):
        return
    digest = hashlib.sha256(text.encode()).digest()
    _compare(digest, "The processes of a mesh must build the same model.")


def _is_ours(mesh: Any) -> bool:
    """True where no other process has devices of the mesh."""
    here = jax.process_index()
    devices = getattr(mesh, "devices", None)
    return devices is None or all(device.process_index == here for device in devices.flat)


def _bytes_of(value: Any) -> bytes:
    if jnp.issubdtype(getattr(value, "dtype", np.float32), jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.ascontiguousarray(value)
    return f"{array.shape}{array.dtype}".encode() + array.tobytes()


def _compare(digest: bytes, what: str) -> None:
    from jax.experimental import multihost_utils

    own = np.frombuffer(digest, np.uint8)
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
