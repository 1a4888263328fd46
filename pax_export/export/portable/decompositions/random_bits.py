"""Threefry rounds, and numbers that jax draws by a primitive."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core.primitives import random_gamma_p

from pax_export._types import Array
from pax_export.export.portable.decompositions.registry import decomposes

_TURNS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


@decomposes("threefry2x32")
def threefry2x32(first: Array, second: Array, one: Array, two: Array) -> tuple[Any, Any]:
    """Twenty rounds of sums and rotations of 32 bits."""
    keys = (first, second, first ^ second ^ jnp.uint32(_PARITY))
    one, two = one + keys[0], two + keys[1]
    for turn in range(5):
        for places in _TURNS[turn % 2]:
            one = one + two
            two = one ^ ((two << places) | (two >> (32 - places)))
        one = one + keys[(turn + 1) % 3]
        two = two + keys[(turn + 2) % 3] + jnp.uint32(turn + 1)
    return one, two


@decomposes("iota_2x32_shape")
def iota_2x32_shape(*, shape: Any, **_: object) -> tuple[Any, Any]:
    """The index of each element in two words; the upper one is 0 below 2**32."""
    low = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    return jnp.zeros_like(low), low


@decomposes("random_gamma")
def random_gamma(keys: Any, shapes: Array, *, log_space: bool) -> Any:
    """Samples as jax does, by rejection; its operations on keys are replaced in turn."""
    return random_gamma_p.impl(keys, shapes, log_space=log_space)
