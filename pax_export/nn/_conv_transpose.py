"""Conv1DTranspose and Conv2DTranspose: convolutions that enlarge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax

from pax_export.nn._arguments import Initializer, choice
from pax_export.nn._conv import Convolution, padding_text

Padding = str | Sequence[tuple[int, int]]


class _ConvTranspose(Convolution):
    """Conv1DTranspose and Conv2DTranspose; they differ in the number of spatial axes."""

    def _build(
        self,
        in_features: int,
        out_features: int,
        kernel_shape: int | Sequence[int],
        stride: int | Sequence[int],
        padding: Padding,
        with_bias: bool,
        w_init: Initializer | None,
        b_init: Initializer | None,
        rng_key: Any,
    ) -> None:
        self._set_sizes(in_features, out_features, kernel_shape, stride, padding)
        self.with_bias = bool(with_bias)
        shape = (*self.kernel_shape, self.out_features, self.in_features)
        fan_in = math.prod(self.kernel_shape) * self.in_features
        self._set_arrays(shape, fan_in, w_init, b_init, rng_key)

    def __call__(self, x: Any) -> jax.Array:
        """Spreads each input element over a window of the output.

        Args:
            x: ``[batch, *spatial, in_features]``, or
                ``[batch, in_features, *spatial]`` if ``data_format`` begins
                with NC.

        Returns:
            The same form with ``out_features`` channels; with ``"SAME"`` the
            spatial sizes are those of the input times the stride.

        Raises:
            InvalidArgumentError: (a ValueError and an AssertionError) another
                number of axes or of channels.
        """
        x, weight = self._checked_input(x)
        kernel_format = "WOI" if self._spatial_axes() == 1 else "HWOI"
        y = jax.lax.conv_transpose(
            x,
            weight,
            self.stride,
            self.padding,
            dimension_numbers=(self.data_format, kernel_format, self.data_format),
        )
        return self._with_bias(y)

    def _repr(self, info: dict[str, Any] | None = None) -> str:
        own = {
            "in_features": self.in_features,
            "out_features": self.out_features,
            "data_format": self.data_format,
            "padding": padding_text(self.padding),
            "stride": self.stride,
            "with_bias": self.with_bias,
        }
        return super()._repr({**own, **(info or {})})


class Conv1DTranspose(_ConvTranspose):
    """A transposed convolution over one spatial axis.

    Args:
        in_features: the number of channels of the input.
        out_features: the number of channels of the output.
        kernel_shape: the width of the kernel.
        stride: by how much the spatial axis grows.
        padding: ``"SAME"``, ``"VALID"``, or one pair ``(before, after)``.
        with_bias: whether there is a bias; ``bias`` is None without one.
        w_init: ``w_init(key, shape)`` makes the weight; N(0, 1/fan_in) by
            default (variance), where fan_in is ``width * in_features``.
        b_init: the same for the bias; zeros by default.
        data_format: ``"NWC"`` or ``"NCW"``.
        name: shown by ``repr`` and ``summary``.
        rng_key: the key of the initial values; the next of the ambient stream
            by default.

    Attributes:
        weight: ``[width, out_features, in_features]`` in either data format.
        bias: ``[out_features]`` or None.

    Raises:
        InvalidArgumentError: a size is less than one, an unknown padding or
            data format.
        InvalidArgumentTypeError: a size is no integer.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> pax.Conv1DTranspose(3, 8, 4, stride=2)(jnp.ones((2, 16, 3))).shape
        (2, 32, 8)
    """

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
        rng_key: Any = None,
    ):
        super().__init__(name=name)
        self.data_format = choice(data_format, ("NWC", "NCW"), "Conv1DTranspose.data_format")
        self._build(
            in_features, out_features, kernel_shape, stride, padding,
            with_bias, w_init, b_init, rng_key,
        )  # fmt: skip


class Conv2DTranspose(_ConvTranspose):
    """A transposed convolution over two spatial axes.

    Args:
        in_features: the number of channels of the input.
        out_features: the number of channels of the output.
        kernel_shape: height and width of the kernel; an integer means both.
        stride: by how much the spatial axes grow, both or each.
        padding: ``"SAME"``, ``"VALID"``, or a pair ``(before, after)`` for
            each of the two axes.
        with_bias: whether there is a bias; ``bias`` is None without one.
        w_init: ``w_init(key, shape)`` makes the weight; N(0, 1/fan_in) by
            default (variance), where fan_in is ``height * width * in_features``.
        b_init: the same for the bias; zeros by default.
        data_format: ``"NHWC"`` or ``"NCHW"``.
        name: shown by ``repr`` and ``summary``.
        rng_key: the key of the initial values; the next of the ambient stream
            by default.

    Attributes:
        weight: ``[height, width, out_features, in_features]`` in either data
            format.
        bias: ``[out_features]`` or None.

    Raises:
        InvalidArgumentError: a size is less than one, an unknown padding or
            data format.
        InvalidArgumentTypeError: a size is no integer.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> layer = pax.Conv2DTranspose(3, 8, 4, stride=2)
        >>> layer(jnp.ones((2, 7, 7, 3))).shape
        (2, 14, 14, 8)
    """

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
        rng_key: Any = None,
    ):
        super().__init__(name=name)
        self.data_format = choice(data_format, ("NHWC", "NCHW"), "Conv2DTranspose.data_format")
        self._build(
            in_features, out_features, kernel_shape, stride, padding,
            with_bias, w_init, b_init, rng_key,
        )  # fmt: skip
