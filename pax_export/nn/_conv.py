"""Conv1D and Conv2D: convolutions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pax_export._errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export.core import ParameterModule
from pax_export.nn._arguments import (
    Initializer,
    as_array,
    cast,
    choice,
    common_dtype,
    integer,
    key_or_next,
    normal,
    per_axis,
    require_channels,
    require_rank,
    zeros,
)

Padding = str | tuple[tuple[int, int], ...]


class Convolution(ParameterModule):
    """What the convolutions and their transposes share: sizes, layout, arrays."""

    def _set_sizes(self, in_features, out_features, kernel_shape, stride, padding) -> None:
        where = type(self).__name__
        axes = self._spatial_axes()
        self.in_features = integer(in_features, f"{where}.in_features", least=1)
        self.out_features = integer(out_features, f"{where}.out_features", least=1)
        self.kernel_shape = per_axis(kernel_shape, axes, f"{where}.kernel_shape")
        self.stride = per_axis(stride, axes, f"{where}.stride")
        self.padding = padding_of(padding, axes, f"{where}.padding")

    def _set_arrays(self, shape, fan_in, w_init, b_init, rng_key) -> None:
        weight_key, bias_key = jax.random.split(key_or_next(rng_key))
        default = normal(1 / math.sqrt(fan_in))
        self.weight = (w_init or default)(weight_key, shape)
        bias = (b_init or zeros)(bias_key, (self.out_features,)) if self.with_bias else None
        self.bias = bias

    def _spatial_axes(self) -> int:
        return len(self.data_format) - 2  # all but batch and channels

    def _checked_input(self, x: Any) -> tuple[jax.Array, jax.Array]:
        """The input and the weight, in one dtype; raises if the input does not fit."""
        x = as_array(x)
        require_rank(x, len(self.data_format), self.data_format, self)
        require_channels(x, self.data_format.index("C"), self.in_features, self)
        weight = as_array(self.weight)
        dtype = common_dtype(x, weight)
        return cast(x, dtype), cast(weight, dtype)

    def _with_bias(self, y: jax.Array) -> jax.Array:
        if self.bias is None:
            return y
        channels_last = self.data_format.endswith("C")
        shape = () if channels_last else (1,) * self._spatial_axes()
        return y + jnp.reshape(self.bias, (self.out_features, *shape))


def padding_of(padding: Any, axes: int, where: str) -> Padding:
    """``"SAME"``, ``"VALID"``, or a pair of integers for each spatial axis."""
    if isinstance(padding, str):
        return choice(padding, ("SAME", "VALID"), where)
    try:
        pairs = tuple([(int(before), int(after)) for before, after in padding])
    except (TypeError, ValueError):
        pairs = None
    if pairs is None or len(pairs) != axes:
        raise InvalidArgumentError(
            f"The padding needs a pair (before, after) for each of {axes} spatial axes.",
            where=where,
            got=repr(padding),
            write=f"'SAME', 'VALID' or {[(1, 1)] * axes}",
        )
    return pairs


def padding_text(padding: Padding) -> str:
    """The padding as it is written in a call."""
    return padding if isinstance(padding, str) else str(list(padding))


class _Conv(Convolution):
    """Conv1D and Conv2D; they differ in the number of spatial axes."""

    def _build(
        self,
        in_features: int,
        out_features: int,
        kernel_shape: int | Sequence[int],
        stride: int | Sequence[int],
        rate: int | Sequence[int],
        padding: str | list,
        with_bias: bool,
        w_init: Initializer | None,
        b_init: Initializer | None,
        feature_group_count: int,
        rng_key: Any,
    ) -> None:
        where = type(self).__name__
        if isinstance(padding, tuple):
            raise InvalidArgumentTypeError(
                "The padding of a convolution must be a word or a list of pairs.",
                where=f"{where}.padding",
                got=f"a tuple, {padding!r}",
                write=f"'SAME', 'VALID' or a list such as {[(1, 1)] * self._spatial_axes()}",
            )
        self._set_sizes(in_features, out_features, kernel_shape, stride, padding)
        self.rate = per_axis(rate, self._spatial_axes(), f"{where}.rate")
        self.with_bias = bool(with_bias)
        self.feature_group_count = self._groups(feature_group_count)
        group_size = self.in_features // self.feature_group_count
        shape = (*self.kernel_shape, group_size, self.out_features)
        self._set_arrays(shape, math.prod(shape[:-1]), w_init, b_init, rng_key)

    def _groups(self, feature_group_count: int) -> int:
        where = f"{type(self).__name__}.feature_group_count"
        groups = integer(feature_group_count, where, least=1)
        if self.in_features % groups or self.out_features % groups:
            raise InvalidArgumentError(
                "Input and output features must be divisible by the number of groups.",
                where=where,
                got=f"{groups} groups for {self.in_features} -> {self.out_features} features",
                write="a common divisor of both",
            )
        return groups

    def __call__(self, x: Any) -> jax.Array:
        """Convolves the input.

        Args:
            x: ``[batch, *spatial, in_features]``, or
                ``[batch, in_features, *spatial]`` if ``data_format`` begins
                with NC.

        Returns:
            The same form with ``out_features`` channels.

        Raises:
            InvalidArgumentError: (a ValueError and an AssertionError) another
                number of axes or of channels.
        """
        x, weight = self._checked_input(x)
        kernel_format = "WIO" if self._spatial_axes() == 1 else "HWIO"
        y = jax.lax.conv_general_dilated(
            x,
            weight,
            window_strides=self.stride,
            padding=self.padding,
            rhs_dilation=self.rate,
            dimension_numbers=(self.data_format, kernel_format, self.data_format),
            feature_group_count=self.feature_group_count,
        )
        return self._with_bias(y)

    def _repr(self, info: dict[str, Any] | None = None) -> str:
        groups = self.feature_group_count
        own = {
            "in_features": self.in_features,
            "out_features": self.out_features,
            "kernel_shape": self.kernel_shape,
            "padding": padding_text(self.padding),
            "stride": self.stride if set(self.stride) != {1} else None,
            "rate": self.rate if set(self.rate) != {1} else None,
            "with_bias": self.with_bias,
            "data_format": self.data_format,
            "feature_group_count": groups if groups != 1 else None,
        }
        return super()._repr({**own, **(info or {})})


class Conv1D(_Conv):
    """A convolution over one spatial axis.

    Args:
        in_features: the number of channels of the input.
        out_features: the number of channels of the output.
        kernel_shape: the width of the kernel.
        stride: the step between two windows.
        rate: the step between two elements of one window (dilation).
        padding: ``"SAME"``, ``"VALID"``, or a list with one pair
            ``(before, after)``.
        with_bias: whether there is a bias; ``bias`` is None without one.
        w_init: ``w_init(key, shape)`` makes the weight; N(0, 1/fan_in) by
            default (variance), where fan_in is ``kernel * in_features / groups``.
        b_init: the same for the bias; zeros by default.
        data_format: ``"NWC"`` or ``"NCW"``.
        feature_group_count: into how many groups the channels are split.
        name: shown by ``repr`` and ``summary``.
        rng_key: the key of the initial values; the next of the ambient stream
            by default.

    Attributes:
        weight: ``[width, in_features / groups, out_features]`` in either
            data format.
        bias: ``[out_features]`` or None.

    Raises:
        InvalidArgumentError: a size is less than one, an unknown padding or
            data format, or the groups do not divide the features.
        InvalidArgumentTypeError: a size is no integer, or the padding a tuple.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> pax.Conv1D(3, 8, 5, stride=2)(jnp.ones((2, 16, 3))).shape
        (2, 8, 8)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_shape: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        rate: int | Sequence[int] = 1,
        padding: str | list = "SAME",
        with_bias: bool = True,
        w_init: Initializer | None = None,
        b_init: Initializer | None = None,
        data_format: str = "NWC",
        feature_group_count: int = 1,
        *,
        name: str | None = None,
        rng_key: Any = None,
    ):
        super().__init__(name=name)
        self.data_format = choice(data_format, ("NWC", "NCW"), "Conv1D.data_format")
        self._build(
            in_features, out_features, kernel_shape, stride, rate, padding,
            with_bias, w_init, b_init, feature_group_count, rng_key,
        )  # fmt: skip


class Conv2D(_Conv):
    """A convolution over two spatial axes.

    Args:
        in_features: the number of channels of the input.
        out_features: the number of channels of the output.
        kernel_shape: height and width of the kernel; an integer means both.
        stride: the step between two windows, for both axes or for each.
        rate: the step between two elements of one window (dilation).
        padding: ``"SAME"``, ``"VALID"``, or a list with a pair
            ``(before, after)`` for each of the two axes.
        with_bias: whether there is a bias; ``bias`` is None without one.
        w_init: ``w_init(key, shape)`` makes the weight; N(0, 1/fan_in) by
            default (variance), where fan_in is
            ``height * width * in_features / groups``.
        b_init: the same for the bias; zeros by default.
        data_format: ``"NHWC"`` or ``"NCHW"``.
        feature_group_count: into how many groups the channels are split.
        name: shown by ``repr`` and ``summary``.
        rng_key: the key of the initial values; the next of the ambient stream
            by default.

    Attributes:
        weight: ``[height, width, in_features / groups, out_features]`` in
            either data format.
        bias: ``[out_features]`` or None.

    Raises:
        InvalidArgumentError: a size is less than one, an unknown padding or
            data format, or the groups do not divide the features.
        InvalidArgumentTypeError: a size is no integer, or the padding a tuple.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> pax.Conv2D(1, 8, 3, stride=2)(jnp.ones((2, 28, 28, 1))).shape
        (2, 14, 14, 8)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_shape: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        rate: int | Sequence[int] = 1,
        padding: str | list = "SAME",
        with_bias: bool = True,
        w_init: Initializer | None = None,
        b_init: Initializer | None = None,
        data_format: str = "NHWC",
        feature_group_count: int = 1,
        *,
        name: str | None = None,
        rng_key: Any = None,
    ):
        super().__init__(name=name)
        self.data_format = choice(data_format, ("NHWC", "NCHW"), "Conv2D.data_format")
        self._build(
            in_features, out_features, kernel_shape, stride, rate, padding,
            with_bias, w_init, b_init, feature_group_count, rng_key,
        )  # fmt: skip
