"""Sinusoidal position embeddings and ALiBi slopes."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from pax_export._check import checked_integer, checked_positive
from pax_export._types import Array
from pax_export.nn import _arguments as arg


def sinusoidal_positions(positions: Array, dim: int, base: float = 10000.0) -> jax.Array:
    """The vectors that Vaswani et al. (2017) add for positions: sines, then cosines.

    Args:
        positions: integers ``[...]``.
        dim: the size of a vector; an even number.
        base: the ratio of the longest wave to the shortest.

    Returns:
        ``[..., dim]`` of float32: the sines of all frequencies, then the cosines.

    Raises:
        InvalidArgumentError: ``dim`` is odd or less than two, or ``base`` not positive.
        InvalidArgumentTypeError: an argument is not a number.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> pax.sinusoidal_positions(jnp.arange(3), 4).shape
        (3, 4)
    """
    dim = arg.checked_even(dim, "sinusoidal_positions.dim")
    waves = checked_positive(base, "sinusoidal_positions.base") ** (
        -np.arange(0, dim, 2, dtype=np.float64) / dim
    )
    angles = jnp.asarray(positions, jnp.float32)[..., None] * np.float32(waves)
    return jnp.concatenate((jnp.sin(angles), jnp.cos(angles)), -1)


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Returns the slope by distance of each head's logits (Press et al., 2021).

    Args:
        num_heads: how many heads.  For a number that is not a power of two, those of the power
            below, then every other one of the power above.

    Returns:
        ``[num_heads]`` of float64, in numpy: they are constants of a program.

    Raises:
        InvalidArgumentError: ``num_heads`` is less than one.
        InvalidArgumentTypeError: ``num_heads`` is not an integer.

    Example:
        >>> import pax_export as pax
        >>> pax.alibi_slopes(4).tolist()
        [0.25, 0.0625, 0.015625, 0.00390625]
    """
    num_heads = checked_integer(num_heads, "alibi_slopes.num_heads", least=1)
    power = 2 ** math.floor(math.log2(num_heads))

    def of(power: int) -> np.ndarray:
        return 2.0 ** (-8.0 / power * np.arange(1, power + 1))

    return np.concatenate([of(power), of(2 * power)[::2][: num_heads - power]])
