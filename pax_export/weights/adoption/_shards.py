"""Places arrays on several devices shard by shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from pax_export._types import DTypeLike

#: Of smaller arrays all parts are made first: one call to jax is quicker than one a device.
_LARGE = 1 << 25


def on_devices(
    shape: tuple[int, ...], dtype: DTypeLike, sharding: Sharding, part: Callable[[Any], np.ndarray]
) -> jax.Array:
    """An array whose parts are made one after the other, and let go of once they are placed.

    `jax.make_array_from_callback` makes the parts for all devices of a process before it puts
    the first one there, so that the host holds the whole array.

    Args:
        shape: of the whole array.
        dtype: of it.
        sharding: where it goes.
        part: gives the part at an index; it is asked once for devices that hold the same.
    """
    if np.prod(shape) * np.dtype(dtype).itemsize < _LARGE:
        return jax.make_array_from_callback(shape, sharding, part)
    by_index: dict[Any, tuple[Any, list[Any]]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        index = index or ()
        key = tuple([(one.start, one.stop) for one in index])
        by_index.setdefault(key, (index, []))[1].append(device)
    shards: list[jax.Array] = []
    before: list[jax.Array] = []
    for index, devices in by_index.values():
        made = part(index)
        for device in devices:
            there = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            shards.append(jax.device_put(made, there))
        # One part is on its way while the next is read, and no more: the others are let go of.
        jax.block_until_ready(before)
        before = shards[-len(devices) :]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards, dtype=dtype)
