"""Initializers: functions of a key and a shape."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pax_export._types import PRNGKey
from pax_export.core import filled_array, sample_padded

Initializer = Callable[[jax.Array, tuple[int, ...]], Any]
"""A function of a key and a shape that makes an array of that shape."""


def normal(stddev: float) -> Initializer:
    """Draws from N(0, stddev²), like `jax.nn.initializers.normal` of jax 0.10."""
    return lambda rng_key, shape: sample_padded(jax.random.normal, rng_key, shape, stddev)


def variance_scaling(scale: float) -> Initializer:
    """Draws from N(0, scale / fan_in), like jax 0.10 with ``"fan_in"`` and ``"normal"``."""

    def draw(rng_key: PRNGKey, shape: tuple[int, ...]) -> jax.Array:
        variance = np.asarray(scale / math.prod(shape[:-1]), jnp.result_type(float))
        return normal(float(np.sqrt(variance)))(rng_key, shape)

    return draw


def zeros(rng_key: PRNGKey, shape: tuple[int, ...]) -> jax.Array:
    """An initializer that ignores its key."""
    return filled_array(shape, 0)


def ones(rng_key: PRNGKey, shape: tuple[int, ...]) -> jax.Array:
    """An initializer that ignores its key."""
    return filled_array(shape, 1)
