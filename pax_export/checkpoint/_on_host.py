"""Copies jax arrays to numpy without keeping a copy in jax."""

from __future__ import annotations

import math
import zlib

import jax
import numpy as np

from pax_export._types import DTypeLike

#: Alignment at which other libraries can use memory without a copy.
_ALIGNMENT = 64


def on_host(array: object) -> np.ndarray:
    """Gathers an array, which is not one of typed keys, into numpy.

    jax caches the result of ``numpy.asarray`` for arrays on other or several devices as
    long as the array exists.  This function does not.
    """
    if not isinstance(array, jax.Array):
        return np.asarray(array)
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    if len(shards) == 1:
        return _on_one_device(shards[0].data)
    whole = _empty(array.shape, array.dtype)
    for shard in shards:
        whole[shard.index] = _on_one_device(shard.data)
    return whole


def _on_one_device(array: jax.Array) -> np.ndarray:
    if next(iter(array.devices())).platform == "cpu":
        return np.asarray(array)  # the same memory
    try:
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # jax was told to see other devices only
        return np.array(array)
    return np.asarray(jax.device_put(array, cpu))


def _empty(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """An array without values."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def checksum(array: object) -> int | None:
    """Returns the CRC-32 of an array; None if other processes hold parts of it."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return None
    flat = np.ascontiguousarray(on_host(array)).reshape(-1)
    return zlib.crc32(flat.view(np.uint8).data)
