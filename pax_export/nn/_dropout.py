"""Dropout as a layer with a random key, and as a function of one."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pax_export._foundations.check import checked_fraction
from pax_export._foundations.errors import PaxWarning
from pax_export._foundations.types import Array
from pax_export.core import Declared, StateModule, next_rng_key
from pax_export.nn._arguments import as_array, checked_key, repr_method


def dropout(rng_key: jax.Array, dropout_rate: float, x: Array) -> Any:
    """Sets elements to zero at random, and scales the others up.

    Args:
        rng_key: a key of jax, legacy or typed.
        dropout_rate: the probability of zero, from 0 to below 1.
        x: an array of any shape.

    Returns:
        An array like ``x`` with the same expected values; ``x`` itself if the rate is 0.

    Raises:
        InvalidArgumentError: (an AssertionError too) the rate is out of its range.
        InvalidArgumentTypeError: (a TypeError too) ``rng_key`` is not a random key.

    Example:
        >>> import jax, jax.numpy as jnp, pax_export as pax
        >>> pax.dropout(jax.random.key(0), 0.5, jnp.ones((2, 3))).shape
        (2, 3)
    """
    rate = checked_fraction(dropout_rate, "dropout.dropout_rate", one_allowed=False)
    if rate == 0:
        return x
    x = as_array(x)
    key = _key_of_shard(checked_key(rng_key, "dropout.rng_key"), x)
    dropped = jax.random.bernoulli(key, rate, x.shape)
    return jnp.where(dropped, 0, x / (1 - rate))


def _key_of_shard(key: jax.Array, x: jax.Array) -> jax.Array:
    """Another key for each shard of ``x`` in a `jax.shard_map` that gives all of them one key."""
    for axis in sorted(_varying_axes(x) - _varying_axes(key)):
        key = jax.random.fold_in(key, jax.lax.axis_index(axis))
    for axis in jax.sharding.get_abstract_mesh().manual_axes:
        if not _varying_axes(jax.lax.axis_index(axis)):
            _warn_of_equal_masks(axis)
    return key


def _warn_of_equal_masks(axis: str) -> None:
    warning = PaxWarning(
        "Shards with equal keys have equal dropout masks here, because jax does not tell shards "
        "from copies.",
        where="dropout",
        got=f"the axis {axis!r} of jax.shard_map(check_vma=False), or of jax.pmap",
        write="check_vma=True; or a key for each shard, "
        f"jax.random.fold_in(key, jax.lax.axis_index({axis!r}))",
    )
    warnings.warn(warning, stacklevel=5)


def _varying_axes(x: jax.Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying


class Dropout(StateModule):
    """Dropout in train mode, the identity in eval mode.

    In `jax.shard_map`, shards of one input have masks of their own; with ``check_vma=False`` those
    with equal keys have equal masks, and a warning says so.

    Args:
        dropout_rate: the probability of zero, from 0 to below 1.
        name: shown by ``repr`` and ``summary``.

    Attributes:
        rng_key: the state, drawn from the ambient stream; each call in train mode splits it.

    Raises:
        InvalidArgumentError: (an AssertionError too) the rate is out of its range.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> layer = pax.Dropout(0.5)
        >>> layer, y = layer % jnp.ones((2, 3))
        >>> y.shape
        (2, 3)
    """

    arrays: ClassVar = {"rng_key": Declared("key", ())}
    rng_attributes = ("rng_key",)
    _pax_changes = "in train mode"

    def __init__(self, dropout_rate: float, *, name: str | None = None):
        super().__init__(name=name)
        self.dropout_rate = checked_fraction(
            dropout_rate, "Dropout.dropout_rate", one_allowed=False
        )
        self.rng_key = next_rng_key()

    def __call__(self, x: Array) -> Any:
        """Drops elements in train mode.

        Args:
            x: an array of any shape.

        Returns:
            An array of that shape; ``x`` itself in eval mode or if the rate is 0.

        Raises:
            ImmutableModuleError: in train mode, outside of `pure` and `purecall`.
        """
        if not self.training or self.dropout_rate == 0:
            return x
        next_key, used = jax.random.split(self.rng_key)
        self.rng_key = next_key
        return dropout(used, self.dropout_rate, x)

    _repr = repr_method("dropout_rate")
