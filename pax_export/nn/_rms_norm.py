"""RMSNorm."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp

from pax_export._check import checked_float, checked_integer
from pax_export._types import Array, PRNGKey, PyTree
from pax_export.core import Declared, ParameterModule, filled_array
from pax_export.nn import _arguments as arg
from pax_export.nn._explicit import join_specs, spec_of, under_auto_axes
from pax_export.nn._initializers import Initializer, ones


def _scale_init(layer: PyTree) -> Initializer:
    return lambda key, shape: ones(key, shape) - layer.scale_offset


class RMSNorm(ParameterModule):
    """Divides by the root of the mean square of the last axis, then scales each channel.

    The norm of Zhang and Sennrich (2019), which Llama and its relatives use.  The mean is taken
    in float32 at least; the result has the dtype of the input.

    Args:
        num_channels: the size of the last axis.
        eps: added to the mean square.
        scale_offset: added to the scale; 1 for the weights of Gemma, which are kept around zero.
        scale_init: ``scale_init(key, shape)`` makes the scale; by default the total scale is one.
        rng_key: the key of the initial values; the next of the ambient stream by default.
        name: shown by ``repr`` and ``summary``.

    Attributes:
        scale: ``[num_channels]``.

    Raises:
        InvalidArgumentError: a size is less than one.
        InvalidArgumentTypeError: a size is not an integer, or another argument not a number.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> pax.RMSNorm(2)(jnp.array([[3.0, 3.0]])).round(4).tolist()
        [[1.0, 1.0]]
    """

    arrays: ClassVar = {"scale": Declared("scale", ("channels",), init=_scale_init)}

    def __init__(
        self,
        num_channels: int,
        eps: float = 1e-6,
        scale_offset: float = 0.0,
        scale_init: Initializer | None = None,
        *,
        rng_key: PRNGKey | None = None,
        name: str | None = None,
    ):
        super().__init__(name=name)
        self.num_channels = checked_integer(num_channels, "RMSNorm.num_channels", least=1)
        self.eps = checked_float(eps, "RMSNorm.eps")
        self.scale_offset = checked_float(scale_offset, "RMSNorm.scale_offset")
        if scale_init is None:
            self.scale = filled_array((self.num_channels,), 1 - self.scale_offset, jnp.float32)
        else:
            key = arg.key_or_next(rng_key, "RMSNorm.rng_key")
            size = (self.num_channels,)
            self.scale = arg.draw_initial(scale_init, key, size, "RMSNorm.scale_init")

    def __call__(self, x: Array) -> jax.Array:
        """Normalizes the input.

        Args:
            x: ``[..., num_channels]``.

        Returns:
            The shape and dtype of the input.

        Raises:
            InvalidArgumentError: (a ValueError) another number of channels.
        """
        x = arg.as_array(x)
        arg.require_channels(x, -1, self.num_channels, self)
        eps, offset = self.eps, self.scale_offset

        def normalised(x: jax.Array, scale: Array) -> jax.Array:
            return rms_normalised(x, scale, eps, offset)

        return under_auto_axes(normalised, (x, self.scale), lambda: join_specs(*spec_of(x)))

    _repr = arg.repr_method("num_channels", "eps", "scale_offset")


def rms_normalised(x: jax.Array, scale: Array, eps: float, offset: float) -> jax.Array:
    """The numbers of `RMSNorm`."""
    dtype = arg.at_least_float32(x.dtype)
    y = arg.cast(x, dtype)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    factor = arg.cast(arg.as_array(scale), dtype)
    return arg.cast(y * (factor + offset if offset else factor), x.dtype)
