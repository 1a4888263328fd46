"""GroupNorm: normalisation of each example by groups of channels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pax_export._errors import InvalidArgumentError
from pax_export.core import ParameterModule
from pax_export.nn._arguments import (
    Initializer,
    choice,
    integer,
    key_or_next,
    ones,
    require_channels,
    zeros,
)
from pax_export.nn._axes import Axis, axes_of, static_axes
from pax_export.nn._layer_norm import require_created


class GroupNorm(ParameterModule):
    """Splits the channels into groups, and normalises each group.

    Args:
        groups: into how many groups; a divisor of ``num_channels``.
        num_channels: the size of the channel axis.
        axis: the axes of the input over which mean and variance are taken;
            all but the batch by default.  The channel axis stands for the
            channels of one group.  A negative axis counts in the grouped
            array, in which the channel axis has become two, ``groups`` and
            ``num_channels / groups``.
        create_scale: whether there is a trainable scale.
        create_offset: whether there is a trainable offset.
        eps: added to the variance.
        scale_init: ``scale_init(key, shape)`` makes the scale; ones by default.
        offset_init: the same for the offset; zeros by default.
        data_format: ``"channels_last"`` (``"N...C"``) or
            ``"channels_first"`` (``"NC..."``).
        rng_key: the key of the initial values; the next of the ambient stream
            by default.
        name: shown by ``repr`` and ``summary``.

    Attributes:
        scale: ``[num_channels]``; missing if not created.
        offset: ``[num_channels]``; missing if not created.

    Raises:
        InvalidArgumentError: (a ValueError) the groups do not divide the
            channels, an initializer for what is not created, or an unknown
            data format.
        InvalidArgumentTypeError: (a ValueError) ``axis`` is of another kind.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> pax.GroupNorm(2, 6)(jnp.ones((8, 5, 5, 6))).shape
        (8, 5, 5, 6)
    """

    def __init__(
        self,
        groups: int,
        num_channels: int,
        axis: Axis = slice(1, None),
        create_scale: bool = True,
        create_offset: bool = True,
        eps: float = 1e-05,
        scale_init: Initializer | None = None,
        offset_init: Initializer | None = None,
        data_format: str = "channels_last",
        *,
        rng_key: Any = None,
        name: str | None = None,
    ):
        super().__init__(name=name)
        require_created(create_scale, scale_init, "GroupNorm", "scale")
        require_created(create_offset, offset_init, "GroupNorm", "offset")
        choice(data_format, tuple(_DATA_FORMATS), "GroupNorm.data_format")
        self.groups = integer(groups, "GroupNorm.groups", least=1)
        self.num_channels = integer(num_channels, "GroupNorm.num_channels", least=1)
        self._require_divisor()
        self.axis = static_axes(axis, "GroupNorm.axis")
        self.create_scale = bool(create_scale)
        self.create_offset = bool(create_offset)
        self.eps = float(eps)
        self.data_format = _DATA_FORMATS[data_format]
        scale_key, offset_key = jax.random.split(key_or_next(rng_key))
        if self.create_scale:
            self.scale = (scale_init or ones)(scale_key, (self.num_channels,))
        if self.create_offset:
            self.offset = (offset_init or zeros)(offset_key, (self.num_channels,))

    def _require_divisor(self) -> None:
        if self.num_channels % self.groups:
            raise InvalidArgumentError(
                "The channels must be divisible by the number of groups.",
                where="GroupNorm.groups",
                got=f"{self.groups} groups for {self.num_channels} channels",
                write=f"a divisor of {self.num_channels}",
            )

    def __call__(self, x: Any) -> jax.Array:
        """Normalises the input.

        Args:
            x: ``[batch, ..., num_channels]``, or ``[batch, num_channels, ...]``
                if channels are first.

        Returns:
            The shape of the input.

        Raises:
            InvalidArgumentError: (a ValueError) less than two axes, or another
                number of channels.
        """
        x = jnp.asarray(x)
        self._check(x)
        channels = self._channel_axis(x.ndim)
        grouped_channels = (self.groups, self.num_channels // self.groups)
        grouped = x.reshape((*x.shape[:channels], *grouped_channels, *x.shape[channels + 1 :]))
        # An axis at or behind the groups axis has moved by one.
        axes = axes_of(self.axis, x.ndim)
        axes = tuple([axis if axis < channels else axis + 1 for axis in axes])
        mean = jnp.mean(grouped, axes, keepdims=True)
        variance = jnp.var(grouped, axes, keepdims=True)
        y = ((grouped - mean) * jax.lax.rsqrt(variance + self.eps)).reshape(x.shape)
        if self.create_scale:
            y = y * self._beside_channels(self.scale, y)
        if self.create_offset:
            y = y + self._beside_channels(self.offset, y)
        return y

    def _check(self, x: jax.Array) -> None:
        if x.ndim < 2:
            raise InvalidArgumentError(
                "GroupNorm needs an input with a batch axis and a channel axis.",
                where=repr(self),
                got=f"shape {x.shape}",
                write="x[None] to add a batch axis",
            )
        require_channels(x, self._channel_axis(x.ndim), self.num_channels, self)

    def _channel_axis(self, rank: int) -> int:
        return 1 if self.data_format == "channels_first" else rank - 1

    def _beside_channels(self, array: jax.Array, x: jax.Array) -> jax.Array:
        """``[num_channels]`` in the shape that broadcasts to the channel axis."""
        axes_behind = x.ndim - 1 - self._channel_axis(x.ndim)
        return jnp.reshape(array, (self.num_channels, *(1,) * axes_behind))

    def _repr(self, info: dict[str, Any] | None = None) -> str:
        own = {
            "groups": self.groups,
            "num_channels": self.num_channels,
            "axis": self.axis,
            "create_scale": self.create_scale,
            "create_offset": self.create_offset,
            "data_format": self.data_format,
        }
        return super()._repr({**own, **(info or {})})


_DATA_FORMATS = {
    "channels_last": "channels_last",
    "N...C": "channels_last",
    "channels_first": "channels_first",
    "NC...": "channels_first",
}
