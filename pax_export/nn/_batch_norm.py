"""BatchNorm1D and BatchNorm2D."""

from __future__ import annotations

from typing import ClassVar, NoReturn

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pax_export._foundations.check import (
    checked_choice,
    checked_float,
    checked_fraction,
    checked_integer,
)
from pax_export._foundations.errors import InvalidArgumentError
from pax_export._foundations.types import Array
from pax_export.core import Declared, Module, filled_array, parameters_method, summary_lines
from pax_export.nn import _arguments as arg
from pax_export.nn._arguments import ones, zeros
from pax_export.nn._explicit import join_specs, spec_of, under_auto_axes
from pax_export.nn._state import EMA


def _axes_of_scale(layer: Module) -> tuple[str, ...]:
    names = {"N": "batch", "H": "height", "W": "width", "C": "channels"}
    return tuple([names[letter] for letter in layer.data_format])


class _BatchNorm(Module):
    """BatchNorm1D and BatchNorm2D, which differ in the data format; the signature is for images."""

    arrays: ClassVar = {
        "scale": Declared("scale", _axes_of_scale, init=lambda layer: ones, optional=True),
        "offset": Declared("bias", _axes_of_scale, init=lambda layer: zeros, optional=True),
        "ema_mean.averages": Declared("mean", _axes_of_scale),
        "ema_var.averages": Declared("variance", _axes_of_scale),
    }

    parameters = parameters_method("scale offset")
    _pax_changes = "in train mode"

    _data_formats = ("NC", "NC")
    _features_alone = False  # whether ``[batch, num_channels]`` is an input too

    def __init__(
        self,
        num_channels: int,
        create_scale: bool = True,
        create_offset: bool = True,
        decay_rate: float = 0.9,
        eps: float = 1e-05,
        data_format: str = "NHWC",
        *,
        name: str | None = None,
    ):
        super().__init__(name=name)
        where = type(self).__name__
        checked_choice(data_format, self._data_formats, f"{where}.data_format")
        self.num_channels = checked_integer(num_channels, f"{where}.num_channels", least=1)
        self.create_scale = bool(create_scale)
        self.create_offset = bool(create_offset)
        self.decay_rate = checked_fraction(decay_rate, f"{where}.decay_rate", one_allowed=True)
        self.eps = checked_float(eps, f"{where}.eps")
        self.data_format = data_format
        channels = data_format.index("C")
        shape = [1] * len(data_format)
        shape[channels] = self.num_channels
        self.scale = filled_array(shape, 1) if create_scale else None
        self.offset = filled_array(shape, 0) if create_offset else None
        self.ema_mean = EMA(filled_array(shape, 0), self.decay_rate, debias=True)
        self.ema_var = EMA(filled_array(shape, 1), self.decay_rate, debias=True)

    def __call__(self, x: Array) -> jax.Array:
        """Normalizes each channel.

        Train mode uses mean and variance of the batch, and updates their moving averages; eval mode
        uses these averages, and changes nothing. Statistics are computed in float32 at least.

        Args:
            x: ``[batch, *spatial, num_channels]``, or ``[batch, num_channels, *spatial]`` if
                ``data_format`` begins with NC.  `BatchNorm1D` also takes
                ``[batch, num_channels]``.  More leading axes count as one batch; in eval mode a
                single example needs none.

        Returns:
            The same shape; the dtype that input, scale and offset promote to.

        Raises:
            ImmutableModuleError: in train mode, outside of `pure` and `purecall`.
            InvalidArgumentError: (a ValueError) too few axes, another number of channels, or one
                value for each channel in train mode.
        """
        x = arg.as_array(x)
        features_alone = self._features_alone and x.ndim in (1, 2)
        self._check_input(x, features_alone)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            x = x.astype(jnp.float32)
        if not features_alone:
            return self._of_any_rank(x)
        axis = -2 if self.data_format.endswith("C") else -1  # 1 for the spatial axis
        return jnp.squeeze(self._of_any_rank(jnp.expand_dims(x, axis)), axis)

    def _of_any_rank(self, x: jax.Array) -> jax.Array:
        x, split = arg.with_one_batch_axis(x, self.data_format, self)
        return split(self._normalize_channels(x))

    def _normalize_channels(self, x: jax.Array) -> jax.Array:
        used = [array for array in (x, self.scale, self.offset) if array is not None]
        dtype = arg.common_dtype(*used)
        x = arg.cast(x, arg.at_least_float32(dtype))
        mean, variance = self._mean_and_variance(x)
        eps = self.eps

        def normalised(
            x: jax.Array,
            mean: jax.Array,
            variance: jax.Array,
            scale: Array | None,
            offset: Array | None,
        ) -> jax.Array:
            factor = jax.lax.rsqrt(variance + eps)
            if scale is not None:
                factor = scale * factor
            y = (x - mean) * factor
            return y if offset is None else y + offset

        operands = (x, mean, variance, self.scale, self.offset)
        return arg.cast(
            under_auto_axes(normalised, operands, lambda: join_specs(*spec_of(x))), dtype
        )

    def _check_input(self, x: jax.Array, features_alone: bool) -> None:
        """Raises unless axes and channels fit; in train mode, also for a single example."""
        channels = self.data_format.index("C")
        rank = 2 if features_alone else len(self.data_format)
        if x.ndim < (rank if self.training else rank - 1):
            self._refuse_rank(x)
        axis = x.ndim - 1 if features_alone else x.ndim - len(self.data_format) + channels
        arg.require_channels(x, axis, self.num_channels, self)

    def _refuse_rank(self, x: jax.Array) -> NoReturn:
        rank, form, alone = len(self.data_format), self.data_format, self._features_alone
        write = "x[None] to add a batch axis" if x.ndim == (1 if alone else rank - 1) else None
        if x.ndim == 2:
            write = f"BatchNorm1D({x.shape[1]}) for features without spatial axes"
        raise InvalidArgumentError(
            f"The input must have {rank} axes, {form}"
            + (", or 2 axes, batch and channels." if alone else "."),
            where=repr(self),
            got=f"shape {x.shape}",
            write=write,
        )

    def _mean_and_variance(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        if not self.training:
            return self.ema_mean.averages, self.ema_var.averages
        axes = [axis for axis in range(x.ndim) if axis != self.data_format.index("C")]
        if all(x.shape[axis] == 1 for axis in axes):
            raise InvalidArgumentError(
                "Train mode needs more than one value for each channel: the output would be 0.",
                where=repr(self),
                got=f"shape {x.shape}",
                write="a batch of several examples, outside of vmap; eval() for a single one",
            )

        def statistics(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            mean = jnp.mean(x, axes, keepdims=True)
            # A mean of squares: unlike mean(x²) - mean², it is never negative.
            return mean, jnp.mean(jnp.square(x - mean), axes, keepdims=True)

        mean, variance = under_auto_axes(
            statistics, (x,), lambda: (PartitionSpec(), PartitionSpec())
        )
        self.ema_mean(mean)
        self.ema_var(variance)
        return mean, variance

    _repr = arg.repr_method(
        "num_channels", "create_scale", "create_offset", "data_format", "decay_rate"
    )

    def summary(self, return_list: bool = False) -> str | list[str]:
        """Returns one line: the averages inside are not layers of their own.

        Args:
            return_list: whether to return a list of that line.
        """
        lines = summary_lines(self, below=False)
        return lines if return_list else "\n".join(lines)


class BatchNorm1D(_BatchNorm):
    """Batch normalization of inputs with one spatial axis, or of features alone.

    For an input ``[batch, num_channels]``, statistics are over the batch. The arguments are those
    of `BatchNorm2D`; ``data_format`` is ``"NWC"`` or ``"NCW"``.

    Attributes:
        scale: ``[1, 1, num_channels]`` (or ``[1, num_channels, 1]``) or None.
        offset: the same.
        ema_mean: the moving average of means, an `EMA`.
        ema_var: the moving average of variances, an `EMA`.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> norm = pax.BatchNorm1D(3)
        >>> norm, y = norm % jnp.ones((8, 20, 3))
        >>> norm.eval()(jnp.ones((8, 20, 3))).shape
        (8, 20, 3)
        >>> norm.eval()(jnp.ones((8, 3))).shape
        (8, 3)
    """

    _data_formats = ("NWC", "NCW")
    _features_alone = True

    def __init__(
        self,
        num_channels: int,
        create_scale: bool = True,
        create_offset: bool = True,
        decay_rate: float = 0.9,
        eps: float = 1e-05,
        data_format: str = "NWC",
        *,
        name: str | None = None,
    ):
        super().__init__(
            num_channels, create_scale, create_offset, decay_rate, eps, data_format, name=name
        )


class BatchNorm2D(_BatchNorm):
    """Batch normalization of inputs with two spatial axes.

    Args:
        num_channels: the size of the channel axis.
        create_scale: whether there is a trainable scale for each channel.
        create_offset: whether there is a trainable offset for each channel.
        decay_rate: from 0 to 1; how much of the old averages each step keeps.
        eps: added to the variance.
        data_format: ``"NHWC"`` or ``"NCHW"``.
        name: shown by ``repr`` and ``summary``.

    Attributes:
        scale: ``[1, 1, 1, num_channels]`` (or ``[1, num_channels, 1, 1]``) or None.
        offset: the same.
        ema_mean: the moving average of means, an `EMA`.
        ema_var: the moving average of variances, an `EMA`.

    Raises:
        InvalidArgumentError: (a ValueError and an AssertionError) an argument
            is out of its range.
        InvalidArgumentTypeError: (a TypeError) a size is not an integer, or another argument
            not a number.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> norm = pax.BatchNorm2D(3, data_format="NCHW")
        >>> norm, y = norm % jnp.ones((8, 3, 5, 5))
        >>> norm.eval()(jnp.ones((8, 3, 5, 5))).shape
        (8, 3, 5, 5)
    """

    _data_formats = ("NHWC", "NCHW")
