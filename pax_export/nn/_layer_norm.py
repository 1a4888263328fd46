"""LayerNorm: normalisation of each example by itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pax_export._errors import InvalidArgumentError
from pax_export.core import ParameterModule
from pax_export.nn._arguments import (
    Initializer,
    as_array,
    integer,
    key_or_next,
    ones,
    require_channels,
    zeros,
)
from pax_export.nn._axes import Axis, axes_of, static_axes


class LayerNorm(ParameterModule):
    """Normalises over some axes, then scales and shifts each channel.

    Args:
        num_channels: the size of the last axis.
        axis: the axes over which mean and variance are taken: an integer,
            several, or a slice of all axes.
        create_scale: whether there is a trainable scale.
        create_offset: whether there is a trainable offset.
        eps: added to the variance.
        scale_init: ``scale_init(key, shape)`` makes the scale; ones by default.
        offset_init: the same for the offset; zeros by default.
        rng_key: the key of the initial values; the next of the ambient stream
            by default.
        name: shown by ``repr`` and ``summary``.

    Attributes:
        scale: ``[num_channels]`` or None.
        offset: ``[num_channels]`` or None.

    Raises:
        InvalidArgumentError: (a ValueError) an initializer for what is not
            created, or ``num_channels`` less than one.
        InvalidArgumentTypeError: (a ValueError) ``axis`` is of another kind.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> pax.LayerNorm(3, -1, True, True)(jnp.ones((8, 5, 3))).shape
        (8, 5, 3)
    """

    def __init__(
        self,
        num_channels: int,
        axis: Axis,
        create_scale: bool,
        create_offset: bool,
        eps: float = 1e-05,
        scale_init: Initializer | None = None,
        offset_init: Initializer | None = None,
        *,
        rng_key: Any = None,
        name: str | None = None,
    ):
        super().__init__(name=name)
        require_created(create_scale, scale_init, "LayerNorm", "scale")
        require_created(create_offset, offset_init, "LayerNorm", "offset")
        self.num_channels = integer(num_channels, "LayerNorm.num_channels", least=1)
        self.axis = static_axes(axis, "LayerNorm.axis")
        self.create_scale = bool(create_scale)
        self.create_offset = bool(create_offset)
        self.eps = float(eps)
        scale_key, offset_key = jax.random.split(key_or_next(rng_key))
        shape = (self.num_channels,)
        self.scale = (scale_init or ones)(scale_key, shape) if create_scale else None
        self.offset = (offset_init or zeros)(offset_key, shape) if create_offset else None

    def __call__(self, inputs: Any, scale: Any = None, offset: Any = None) -> jax.Array:
        """Normalises the input.

        Args:
            inputs: ``[..., num_channels]``.
            scale: a number or an array that broadcasts to the input, if the
                layer created none.
            offset: the same.

        Returns:
            The shape of the input.

        Raises:
            InvalidArgumentError: (a ValueError) a scale or offset that the
                layer has itself, or another number of channels.
        """
        x = as_array(inputs)
        self._check(x, scale, offset)
        scale = self.scale if self.create_scale else scale
        offset = self.offset if self.create_offset else offset
        axes = axes_of(self.axis, x.ndim)
        mean = jnp.mean(x, axes, keepdims=True)
        variance = jnp.var(x, axes, keepdims=True)
        # Another order of these operations would round differently, and trained
        # weights of other libraries would give other last bits.
        factor = jax.lax.rsqrt(variance + self.eps)
        factor = factor if scale is None else scale * factor
        y = factor * (x - mean)
        return y if offset is None else y + offset

    def _check(self, x: jax.Array, scale: Any, offset: Any) -> None:
        if self.create_scale or self.create_offset:
            require_channels(x, -1, self.num_channels, self)
        for word, own, given in (
            ("scale", self.create_scale, scale),
            ("offset", self.create_offset, offset),
        ):
            if own and given is not None:
                raise InvalidArgumentError(
                    f"This layer has its own {word}.",
                    where=repr(self),
                    got=f"{word} in the call",
                    write=f"LayerNorm(..., create_{word}=False) to pass one",
                )

    def _repr(self, info: dict[str, Any] | None = None) -> str:
        own = {
            "num_channels": self.num_channels,
            "axis": self.axis,
            "create_scale": self.create_scale,
            "create_offset": self.create_offset,
        }
        return super()._repr({**own, **(info or {})})


def require_created(created: bool, init: Initializer | None, where: str, word: str) -> None:
    """Raises if an array has an initializer and is not to be created."""
    if init is not None and not created:
        raise InvalidArgumentError(
            f"An initializer of the {word} needs a {word}.",
            where=f"{where}.{word}_init",
            got=f"create_{word}=False",
            write=f"create_{word}=True, or no {word}_init",
        )
