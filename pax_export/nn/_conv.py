"""Convolutions and transposed convolutions over one or two spatial axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pax_export._foundations.check import checked_choice, checked_integer
from pax_export._foundations.errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export._foundations.types import Array, PRNGKey
from pax_export.core import Declared, Module, ParameterModule
from pax_export.nn import _arguments as arg
from pax_export.nn._arguments import Initializer, normal, zeros
from pax_export.nn._explicit import join_specs, shard_map_over_batch, spec_of, under_auto_axes
from pax_export.precision.quantized import ArrayLike, QuantizedArray, pointwise_convolution

Padding = str | Sequence[tuple[int, int]]


def _kernel_init(layer: Module) -> Initializer:
    inputs = layer.in_features // layer._groups_of_features()
    return normal(1 / math.sqrt(math.prod(layer.kernel_shape) * inputs))


def _apply_kernel(layer: Module, weight: Array, x: Array) -> Any:
    x = jnp.asarray(x)
    dtype = jnp.result_type(x, weight)
    numbers = layer._dimension_numbers()
    return layer._convolved(layer, x.astype(dtype), weight.astype(dtype), numbers)


def _declared(*axes: str, transposed: bool = False) -> dict[str, Declared]:
    """The arrays of a convolution whose kernel has these axes."""
    return {
        "weight": Declared(
            "kernel",
            axes,
            init=_kernel_init,
            apply=_apply_kernel,
            any_outputs=lambda layer: layer._groups_of_features() == 1,
            output_axis=lambda layer: layer.data_format.index("C") - len(layer.data_format),
            transposed=transposed,
        ),
        "bias": Declared("bias", ("out",), init=lambda layer: zeros),
    }


class Convolution(ParameterModule):
    """The base class of `_Conv` and `_ConvTranspose`."""

    _data_formats = ("NC", "NC")
    _kernel_features = "IO"
    _shown: tuple[str, ...] = ()
    _shown_if_not_one: tuple[str, ...] = ()

    def _set_sizes(
        self,
        in_features: int,
        out_features: int,
        kernel_shape: int | Sequence[int],
        stride: int | Sequence[int],
        padding: str | Sequence[Any],
        data_format: str,
    ) -> None:
        where, axes = type(self).__name__, self._spatial_axes()
        self.data_format = checked_choice(data_format, self._data_formats, f"{where}.data_format")
        self.in_features = checked_integer(in_features, f"{where}.in_features", least=1)
        self.out_features = checked_integer(out_features, f"{where}.out_features", least=1)
        self.kernel_shape = arg.per_axis(kernel_shape, axes, f"{where}.kernel_shape")
        self.stride = arg.per_axis(stride, axes, f"{where}.stride")
        self.padding = _static_padding(padding, axes, f"{where}.padding")

    def _set_arrays(
        self,
        features: dict[str, int],
        w_init: Initializer | None,
        b_init: Initializer | None,
        rng_key: PRNGKey | None,
    ) -> None:
        where = type(self).__name__
        key = arg.key_or_next(rng_key, f"{where}.rng_key")
        weight_key, bias_key = jax.random.split(key)
        shape = (*self.kernel_shape, *[features[each] for each in self._kernel_features])
        self.weight = (w_init or _kernel_init(self))(weight_key, shape)
        self.bias = None
        if self.with_bias:
            size = (self.out_features,)
            self.bias = (b_init or zeros)(bias_key, size)

    def _spatial_axes(self) -> int:
        return len(self._data_formats[0]) - 2  # all but batch and channels

    def __call__(self, x: Array) -> jax.Array:
        """Convolves the input.

        Args:
            x: ``[..., *spatial, in_features]``, or ``[..., in_features, *spatial]`` if
                ``data_format`` begins with NC; with one batch axis as a rule, with none for a
                single example.

        Returns:
            The same form with ``out_features`` channels.

        Raises:
            InvalidArgumentError: (a ValueError and an AssertionError) too few axes, or another
                number of channels.
        """
        x, split = arg.with_one_batch_axis(arg.as_array(x), self.data_format, self)
        return split(self._of_a_batch(x))

    def _of_a_batch(self, x: jax.Array) -> jax.Array:
        x, weight = self._checked_input(x)
        numbers = self._dimension_numbers()

        def convolved(x: jax.Array, weight: jax.Array, bias: Array) -> jax.Array:
            return self._with_bias(self._convolved(self, x, weight, numbers), bias)

        if self._groups_of_features() > 1:
            # XLA returns wrong gradients for these if the batch is split over one of two mesh axes.
            y = shard_map_over_batch(convolved, x, (weight, self.bias))
        else:
            operands = x, weight, self.bias
            y = under_auto_axes(convolved, operands, lambda: join_specs(spec_of(x)[0]))
        if isinstance(self.weight, ArrayLike):
            y = self.weight.bounded_outputs(y, self.data_format.index("C") - y.ndim)
        return y

    def _dimension_numbers(self) -> tuple[str, str, str]:
        kernel_format = "HW"[-self._spatial_axes() :] + self._kernel_features
        return self.data_format, kernel_format, self.data_format

    def _groups_of_features(self) -> int:
        return 1

    # Static because adapters call it from outside, where a mixed-precision policy casts methods.
    @staticmethod
    def _convolved(
        layer: Module, x: jax.Array, weight: jax.Array, numbers: tuple[str, str, str]
    ) -> jax.Array:
        raise NotImplementedError

    def _is_pointwise(self) -> bool:
        """Whether it multiplies channels and does nothing else."""
        return False

    def _checked_input(self, x: jax.Array) -> tuple[jax.Array, Any]:
        """The input and the weight, in one dtype or quantized; raises if channels do not fit."""
        arg.require_channels(x, self.data_format.index("C"), self.in_features, self)
        if isinstance(self.weight, ArrayLike):
            x = self.weight.rounded_inputs(x, range(1 - x.ndim, 0))
        if isinstance(self.weight, QuantizedArray) and self._is_pointwise():
            return x, self.weight
        weight = arg.as_array(self.weight)
        dtype = arg.common_dtype(x, weight)
        return arg.cast(x, dtype), arg.cast(weight, dtype)

    def _with_bias(self, y: jax.Array, bias: Array) -> jax.Array:
        if bias is None:
            return y
        channels_last = self.data_format.endswith("C")
        shape = () if channels_last else (1,) * self._spatial_axes()
        return y + jnp.reshape(bias, (self.out_features, *shape))

    def _repr(self, info: dict[str, Any] | None = None) -> str:
        own = {name: getattr(self, name) for name in self._shown}
        for name in self._shown_if_not_one:
            own[name] = None if own[name] in (1, (1,), (1, 1)) else own[name]
        if not isinstance(self.padding, str):
            own["padding"] = list(self.padding)  # as in a call
        return super()._repr({**own, **(info or {})})


def _static_padding(padding: str | Sequence[Any], axes: int, where: str) -> Padding:
    """``"SAME"``, ``"VALID"``, or a pair of integers for each spatial axis."""
    if isinstance(padding, str):
        return checked_choice(padding, ("SAME", "VALID"), where)
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


class _Conv(Convolution):
    """Conv1D and Conv2D, which differ in the number of spatial axes; the signature is Conv2D's."""

    _shown = (
        "in_features", "out_features", "kernel_shape", "padding", "stride", "rate",
        "with_bias", "data_format", "feature_group_count",
    )  # fmt: skip
    _shown_if_not_one = ("stride", "rate", "feature_group_count")

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
        rng_key: PRNGKey | None = None,
    ):
        super().__init__(name=name)
        where, axes = type(self).__name__, self._spatial_axes()
        if isinstance(padding, tuple):
            raise InvalidArgumentTypeError(
                "The padding of a convolution must be a word or a list of pairs.",
                where=f"{where}.padding",
                got=f"a tuple, {padding!r}",
                write=f"'SAME', 'VALID' or a list such as {[(1, 1)] * axes}",
            )
        self._set_sizes(in_features, out_features, kernel_shape, stride, padding, data_format)
        self.rate = arg.per_axis(rate, axes, f"{where}.rate")
        self.with_bias = bool(with_bias)
        self.feature_group_count = self._groups(feature_group_count)
        features = {"I": self.in_features // self.feature_group_count, "O": self.out_features}
        self._set_arrays(features, w_init, b_init, rng_key)

    def _groups(self, feature_group_count: int) -> int:
        where = f"{type(self).__name__}.feature_group_count"
        groups = checked_integer(feature_group_count, where, least=1)
        for features in (self.in_features, self.out_features):
            arg.require_divisor(groups, "groups", features, "features", where)
        return groups

    def _groups_of_features(self) -> int:
        return self.feature_group_count

    def _is_pointwise(self) -> bool:
        sizes = (*self.kernel_shape, *self.stride, self.feature_group_count)
        padded = not isinstance(self.padding, str) and any(map(any, self.padding))
        return set(sizes) == {1} and not padded

    @staticmethod
    def _convolved(
        layer: Module,
        x: jax.Array,
        weight: jax.Array | QuantizedArray,
        numbers: tuple[str, str, str],
    ) -> jax.Array:
        if isinstance(weight, QuantizedArray):
            channels = layer.data_format.index("C") - x.ndim
            return pointwise_convolution(x, *weight.stored, form=weight.form, channels=channels)
        return jax.lax.conv_general_dilated(
            x,
            weight,
            window_strides=layer.stride,
            padding=layer.padding,
            rhs_dilation=layer.rate,
            dimension_numbers=numbers,
            feature_group_count=layer.feature_group_count,
        )


class _ConvTranspose(Convolution):
    """Conv1DTranspose and Conv2DTranspose. The signature is that of two spatial axes."""

    _kernel_features = "OI"
    _shown = ("in_features", "out_features", "data_format", "padding", "stride", "with_bias")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_shape: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: Padding = "SAME",
        with_bias: bool = True,
        w_init: Initializer | None = None,
        b_init: Initializer | None = None,
        data_format: str = "NHWC",
        *,
        name: str | None = None,
        rng_key: PRNGKey | None = None,
    ):
        super().__init__(name=name)
        self._set_sizes(in_features, out_features, kernel_shape, stride, padding, data_format)
        self.with_bias = bool(with_bias)
        features = {"I": self.in_features, "O": self.out_features}
        self._set_arrays(features, w_init, b_init, rng_key)

    @staticmethod
    def _convolved(
        layer: Module, x: jax.Array, weight: jax.Array, numbers: tuple[str, str, str]
    ) -> jax.Array:
        """Spreads each input element over a window of the output."""
        return jax.lax.conv_transpose(
            x, weight, layer.stride, layer.padding, dimension_numbers=numbers
        )


class Conv1D(_Conv):
    """A convolution over one spatial axis.

    The arguments are those of `Conv2D`; ``data_format`` is ``"NWC"`` or ``"NCW"``.

    Attributes:
        weight: ``[width, in_features / groups, out_features]`` in either data format.
        bias: ``[out_features]`` or None.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> pax.Conv1D(3, 8, 5, stride=2)(jnp.ones((2, 16, 3))).shape
        (2, 8, 8)
    """

    arrays = _declared("width", "in", "out")
    _data_formats = ("NWC", "NCW")

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
        rng_key: PRNGKey | None = None,
    ):
        super().__init__(
            in_features, out_features, kernel_shape, stride, rate, padding,
            with_bias, w_init, b_init, data_format, feature_group_count, name=name, rng_key=rng_key,
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
        w_init: ``w_init(key, shape)`` makes the weight; N(0, 1/fan_in) by default (variance),
            where fan_in is ``height * width * in_features / groups``.
        b_init: the same for the bias; zeros by default.
        data_format: ``"NHWC"`` or ``"NCHW"``.
        feature_group_count: the number of groups of channels.
        name: shown by ``repr`` and ``summary``.
        rng_key: the key of the initial values; the next of the ambient stream by default.

    Attributes:
        weight: ``[height, width, in_features / groups, out_features]`` in either data format.
        bias: ``[out_features]`` or None.

    Raises:
        InvalidArgumentError: a size is less than one, an unknown padding or
            data format, or the groups do not divide the features.
        InvalidArgumentTypeError: a size is not an integer, or the padding a tuple.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> pax.Conv2D(1, 8, 3, stride=2)(jnp.ones((2, 28, 28, 1))).shape
        (2, 14, 14, 8)
    """

    arrays = _declared("height", "width", "in", "out")
    _data_formats = ("NHWC", "NCHW")


class Conv1DTranspose(_ConvTranspose):
    """A transposed convolution over one spatial axis.

    The arguments are those of `Conv2DTranspose`; ``data_format`` is ``"NWC"`` or ``"NCW"``.

    Attributes:
        weight: ``[width, out_features, in_features]`` in either data format.
        bias: ``[out_features]`` or None.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> pax.Conv1DTranspose(3, 8, 4, stride=2)(jnp.ones((2, 16, 3))).shape
        (2, 32, 8)
    """

    arrays = _declared("width", "out", "in", transposed=True)
    _data_formats = ("NWC", "NCW")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_shape: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: Padding = "SAME",
        with_bias: bool = True,
        w_init: Initializer | None = None,
        b_init: Initializer | None = None,
        data_format: str = "NWC",
        *,
        name: str | None = None,
        rng_key: PRNGKey | None = None,
    ):
        super().__init__(
            in_features, out_features, kernel_shape, stride, padding,
            with_bias, w_init, b_init, data_format, name=name, rng_key=rng_key,
        )  # fmt: skip


class Conv2DTranspose(_ConvTranspose):
    """A transposed convolution over two spatial axes.

    Args:
        in_features: the number of channels of the input.
        out_features: the number of channels of the output.
        kernel_shape: height and width of the kernel; an integer means both.
        stride: the factor by which the spatial axes grow, for both or for each.
        padding: ``"SAME"``, ``"VALID"``, or a pair ``(before, after)`` for each of the two axes.
        with_bias: whether there is a bias; ``bias`` is None without one.
        w_init: ``w_init(key, shape)`` makes the weight; N(0, 1/fan_in) by
            default (variance), where fan_in is ``height * width * in_features``.
        b_init: the same for the bias; zeros by default.
        data_format: ``"NHWC"`` or ``"NCHW"``.
        name: shown by ``repr`` and ``summary``.
        rng_key: the key of the initial values; the next of the ambient stream by default.

    Attributes:
        weight: ``[height, width, out_features, in_features]`` in either data format.
        bias: ``[out_features]`` or None.

    Raises:
        InvalidArgumentError: a size is less than one, an unknown padding or data format.
        InvalidArgumentTypeError: a size is not an integer.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> layer = pax.Conv2DTranspose(3, 8, 4, stride=2)
        >>> layer(jnp.ones((2, 7, 7, 3))).shape
        (2, 14, 14, 8)
    """

    arrays = _declared("height", "width", "out", "in", transposed=True)
    _data_formats = ("NHWC", "NCHW")
