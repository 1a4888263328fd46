"""LayerNorm, GroupNorm and RMSNorm."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pax_export._foundations.check import checked_choice, checked_float, checked_integer
from pax_export._foundations.errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export._foundations.types import Array, PRNGKey
from pax_export.core import Declared, Module, ParameterModule, filled_array
from pax_export.nn import _arguments as arg
from pax_export.nn._arguments import Initializer, ones, zeros
from pax_export.nn._explicit import join_specs, spec_of, under_auto_axes

Axis = int | Sequence[int] | slice


@dataclass(frozen=True)
class AxisSlice:
    """A slice of all axes; static data must have a hash, and slices have one since Python 3.12."""

    start: int | None
    stop: int | None
    step: int | None

    def __repr__(self) -> str:
        return repr(self.slice)

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop, self.step)


def _static_axes(axis: Axis, where: str) -> tuple[int, ...] | AxisSlice:
    """The form in which a layer keeps its axes."""
    try:
        if isinstance(axis, slice):
            return AxisSlice(axis.start, axis.stop, axis.step)
        if isinstance(axis, Sequence) and not isinstance(axis, str):
            return tuple([operator.index(each) for each in axis])
        return (operator.index(axis),)  # pyright: ignore[reportArgumentType]  # text raises
    except TypeError:
        raise InvalidArgumentTypeError(
            "The axes must be an integer, several integers, or a slice.",
            where=where,
            got=f"{type(axis).__name__}: {axis!r}",
            write="-1, (1, 2) or slice(1, None)",
        ) from None


def _axes_of(layer: _Norm, rank: int) -> tuple[int, ...]:
    """The axes as integers, for an array of some rank."""
    if isinstance(layer.axis, AxisSlice):
        return tuple(range(rank))[layer.axis.slice]
    if any(not -rank <= axis < rank for axis in layer.axis):
        raise InvalidArgumentError(
            "The input must have the axes that the layer normalizes.",
            where=repr(layer),
            got=f"axis={layer.axis} for an input of {rank} axes",
        )
    return layer.axis


def _dtype_of_result(x: jax.Array, *factors: Array | None) -> Any:
    """The dtype that input, scale and offset promote to; the arithmetic is in float32 at least."""
    dtype = jnp.result_type(x, *[each for each in factors if each is not None])
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else arg.at_least_float32(dtype)


class _Norm(ParameterModule):
    """The base class of both norms: axes, a scale and an offset per channel."""

    arrays: ClassVar = {
        "scale": Declared("scale", ("channels",), init=lambda layer: ones, optional=True),
        "offset": Declared("bias", ("channels",), init=lambda layer: zeros, optional=True),
    }

    def _set_sizes(
        self, num_channels: int, axis: Axis, create_scale: bool, create_offset: bool, eps: float
    ) -> None:
        where = type(self).__name__
        self.num_channels = checked_integer(num_channels, f"{where}.num_channels", least=1)
        self.axis = _static_axes(axis, f"{where}.axis")
        self.create_scale = bool(create_scale)
        self.create_offset = bool(create_offset)
        self.eps = checked_float(eps, f"{where}.eps")

    def _initial_arrays(
        self,
        scale_init: Initializer | None,
        offset_init: Initializer | None,
        rng_key: PRNGKey | None,
    ) -> list[jax.Array | None]:
        """Scale and offset; None if not created."""
        inits = (
            ("scale", self.create_scale, scale_init, ones),
            ("offset", self.create_offset, offset_init, zeros),
        )
        where = type(self).__name__
        for word, created, init, _ in inits:
            if init is not None and not created:
                raise InvalidArgumentError(
                    f"An initializer of the {word} needs a {word}.",
                    where=f"{where}.{word}_init",
                    got=f"create_{word}=False",
                    write=f"create_{word}=True, or no {word}_init",
                )
        keys = jax.random.split(arg.key_or_next(rng_key, f"{where}.rng_key"))
        size = (self.num_channels,)
        return [
            (init or default)(key, size) if created else None
            for key, (word, created, init, default) in zip(keys, inits)
        ]


class LayerNorm(_Norm):
    """Normalizes over some axes, then scales and shifts each channel.

    Args:
        num_channels: the size of the last axis.
        axis: the axes over which mean and variance are taken: an integer,
            several, or a slice of all axes; the last one by default.
        create_scale: whether there is a trainable scale.
        create_offset: whether there is a trainable offset.
        eps: added to the variance.
        scale_init: ``scale_init(key, shape)`` makes the scale; ones by default.
        offset_init: the same for the offset; zeros by default.
        rng_key: the key of the initial values; the next of the ambient stream by default.
        name: shown by ``repr`` and ``summary``.

    Attributes:
        scale: ``[num_channels]`` or None.
        offset: ``[num_channels]`` or None.

    Raises:
        InvalidArgumentError: (a ValueError) an initializer for an array that is not created, or
            ``num_channels`` less than one.
        InvalidArgumentTypeError: (a ValueError) ``num_channels``, ``axis`` or ``eps`` has
            another type.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> pax.LayerNorm(3)(jnp.ones((8, 5, 3))).shape
        (8, 5, 3)
    """

    def __init__(
        self,
        num_channels: int,
        axis: Axis = -1,
        create_scale: bool = True,
        create_offset: bool = True,
        eps: float = 1e-05,
        scale_init: Initializer | None = None,
        offset_init: Initializer | None = None,
        *,
        rng_key: PRNGKey | None = None,
        name: str | None = None,
    ):
        super().__init__(name=name)
        self._set_sizes(num_channels, axis, create_scale, create_offset, eps)
        self.scale, self.offset = self._initial_arrays(scale_init, offset_init, rng_key)

    def __call__(
        self, inputs: Array, scale: Array | None = None, offset: Array | None = None
    ) -> jax.Array:
        """Normalizes the input, in float32 at least.

        Args:
            inputs: ``[..., num_channels]``.
            scale: a number or an array that broadcasts to the input, if the layer created none.
            offset: the same.

        Returns:
            The shape of the input.

        Raises:
            InvalidArgumentError: (a ValueError) a scale or offset that the
                layer has itself, or another number of channels.
        """
        x = arg.as_array(inputs)
        self._check_input(x, scale, offset)
        scale = self.scale if self.create_scale else scale
        offset = self.offset if self.create_offset else offset
        axes, eps = _axes_of(self, x.ndim), self.eps
        dtype = _dtype_of_result(x, scale, offset)

        def normalised(
            x: jax.Array, scale: jax.Array | None, offset: jax.Array | None
        ) -> jax.Array:
            x = arg.cast(x, arg.at_least_float32(x.dtype))
            mean = jnp.mean(x, axes, keepdims=True)
            variance = jnp.var(x, axes, keepdims=True)
            # Another order of these operations would round differently, and trained
            # weights of other libraries would change in the last bits.
            factor = jax.lax.rsqrt(variance + eps)
            factor = factor if scale is None else scale * factor
            y = factor * (x - mean)
            return arg.cast(y if offset is None else y + offset, dtype)

        return under_auto_axes(normalised, (x, scale, offset), lambda: join_specs(*spec_of(x)))

    def _check_input(self, x: jax.Array, scale: Array | None, offset: Array | None) -> None:
        if self.create_scale or self.create_offset:
            arg.require_channels(x, -1, self.num_channels, self)
        for word, own, passed in (
            ("scale", self.create_scale, scale),
            ("offset", self.create_offset, offset),
        ):
            if own and passed is not None:
                raise InvalidArgumentError(
                    f"This layer has its own {word}.",
                    where=repr(self),
                    got=f"{word} in the call",
                    write=f"LayerNorm(..., create_{word}=False) to pass one",
                )

    _repr = arg.repr_method("num_channels", "axis", "create_scale", "create_offset")


_DATA_FORMATS = {
    "channels_last": "channels_last",
    "N...C": "channels_last",
    "channels_first": "channels_first",
    "NC...": "channels_first",
}


class GroupNorm(_Norm):
    """Splits the channels into groups, and normalizes each group.

    Args:
        groups: the number of groups; a divisor of ``num_channels``.
        num_channels: the size of the channel axis.
        axis: the axes of the input over which mean and variance are taken; all but the batch by
            default.  The channel axis means the channels of one group.  A negative axis
            counts in the grouped array, in which the channel axis has become two, ``groups`` and
            ``num_channels / groups``.
        create_scale: whether there is a trainable scale.
        create_offset: whether there is a trainable offset.
        eps: added to the variance.
        scale_init: ``scale_init(key, shape)`` makes the scale; ones by default.
        offset_init: the same for the offset; zeros by default.
        data_format: ``"channels_last"`` (``"N...C"``) or ``"channels_first"`` (``"NC..."``).
        rng_key: the key of the initial values; the next of the ambient stream by default.
        name: shown by ``repr`` and ``summary``.

    Attributes:
        scale: ``[num_channels]``; missing if not created.
        offset: ``[num_channels]``; missing if not created.

    Raises:
        InvalidArgumentError: (a ValueError) the groups do not divide the channels, an initializer
            for an array that is not created, or an unknown data format.
        InvalidArgumentTypeError: (a ValueError) a size, ``axis`` or ``eps`` has another type.

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
        rng_key: PRNGKey | None = None,
        name: str | None = None,
    ):
        super().__init__(name=name)
        checked_choice(data_format, tuple(_DATA_FORMATS), "GroupNorm.data_format")
        self.groups = checked_integer(groups, "GroupNorm.groups", least=1)
        self._set_sizes(num_channels, axis, create_scale, create_offset, eps)
        arg.require_divisor(
            self.groups, "groups", self.num_channels, "channels", "GroupNorm.groups"
        )
        self.data_format = _DATA_FORMATS[data_format]
        scale, offset = self._initial_arrays(scale_init, offset_init, rng_key)
        if scale is not None:
            self.scale = scale
        if offset is not None:
            self.offset = offset

    def __call__(self, x: Array) -> jax.Array:
        """Normalizes the input, in float32 at least.

        Args:
            x: ``[batch, ..., num_channels]``, or ``[batch, num_channels, ...]``
                if channels are first; ``[num_channels]`` of a single example.

        Returns:
            The shape of the input.

        Raises:
            InvalidArgumentError: (a ValueError) no axis, or another number of channels.
        """
        x = jnp.asarray(x)
        if x.ndim == 1:
            return self._of_a_batch(x[None])[0]
        return self._of_a_batch(x)

    def _of_a_batch(self, x: jax.Array) -> jax.Array:
        self._check_input(x)
        channels = self._channel_axis(x.ndim)
        grouped_channels = (self.groups, self.num_channels // self.groups)
        # An axis at or behind the groups axis has moved by one.
        axes = _axes_of(self, x.ndim)
        axes = tuple([axis if axis < channels else axis + 1 for axis in axes])
        eps = self.eps

        def normalised(
            x: jax.Array, scale: jax.Array | None, offset: jax.Array | None
        ) -> jax.Array:
            shape = (*x.shape[:channels], *grouped_channels, *x.shape[channels + 1 :])
            grouped = arg.cast(x, arg.at_least_float32(x.dtype)).reshape(shape)
            mean = jnp.mean(grouped, axes, keepdims=True)
            variance = jnp.var(grouped, axes, keepdims=True)
            y = ((grouped - mean) * jax.lax.rsqrt(variance + eps)).reshape(x.shape)
            if scale is not None:
                y = y * self._beside_channels(scale, y)
            y = y if offset is None else y + self._beside_channels(offset, y)
            return arg.cast(y, dtype)

        scale = self.scale if self.create_scale else None
        offset = self.offset if self.create_offset else None
        dtype = _dtype_of_result(x, scale, offset)
        return under_auto_axes(normalised, (x, scale, offset), lambda: join_specs(*spec_of(x)))

    def _check_input(self, x: jax.Array) -> None:
        arg.require_batch_axis(x, "[batch, ..., channels]", self)
        arg.require_channels(x, self._channel_axis(x.ndim), self.num_channels, self)

    def _channel_axis(self, rank: int) -> int:
        return 1 if self.data_format == "channels_first" else rank - 1

    def _beside_channels(self, array: jax.Array, x: jax.Array) -> jax.Array:
        """``[num_channels]`` in the shape that broadcasts to the channel axis."""
        axes_behind = x.ndim - 1 - self._channel_axis(x.ndim)
        return jnp.reshape(array, (self.num_channels, *(1,) * axes_behind))

    _repr = arg.repr_method(
        "groups", "num_channels", "axis", "create_scale", "create_offset", "data_format"
    )


# --- RMSNorm --------------------------------------------------------------------------


def _scale_init(layer: Module) -> Initializer:
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
            self.scale = scale_init(key, size)

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
