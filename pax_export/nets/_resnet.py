"""ResNet18 to ResNet200: residual networks for images."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pax_export._foundations.check import checked_integer
from pax_export._foundations.errors import InvalidArgumentTypeError
from pax_export._foundations.types import Array
from pax_export.core import Module
from pax_export.nn import BatchNorm2D, Conv2D, Linear, max_pool, zeros

_FORMAT = "NCHW"


class ConvStep(NamedTuple):
    """One convolution of a block."""

    kernel: int
    channels: int
    stride: int


def _basic_steps(channels: int, stride: int) -> list[ConvStep]:
    return [ConvStep(3, channels, stride), ConvStep(3, channels, 1)]


def _bottleneck_steps(channels: int, stride: int) -> list[ConvStep]:
    inner = channels // 4
    return [ConvStep(1, inner, 1), ConvStep(3, inner, stride), ConvStep(1, channels, 1)]


def _make_conv(in_channels: int, step: ConvStep, name: str) -> Conv2D:
    pad = step.kernel // 2
    return Conv2D(
        in_channels, step.channels, step.kernel, step.stride,
        padding=[(pad, pad), (pad, pad)], with_bias=False, data_format=_FORMAT, name=name,
    )  # fmt: skip


def _make_norm(channels: int, name: str) -> BatchNorm2D:
    return BatchNorm2D(channels, True, True, 0.9, data_format=_FORMAT, name=name)


class ResnetBlock(Module):
    """A residual block.

    With a projection, the shortcut has a 1x1 ``proj_conv`` and a ``proj_batchnorm``.
    """

    def __init__(self, in_channels: int, steps: list[ConvStep], use_projection: bool):
        super().__init__()
        self.use_projection = use_projection
        if use_projection:
            channels = steps[-1].channels
            stride = math.prod([step.stride for step in steps])
            self.proj_conv = _make_conv(in_channels, ConvStep(1, channels, stride), "proj_conv")
            self.proj_batchnorm = _make_norm(channels, "proj_bn")
        layers = []
        for number, step in enumerate(steps, start=1):
            conv = _make_conv(in_channels, step, f"conv{number}")
            layers.append((conv, _make_norm(step.channels, f"bn{number}")))
            in_channels = step.channels
        self.layers = tuple(layers)

    def __call__(self, x: jax.Array) -> jax.Array:
        shortcut = self.proj_batchnorm(self.proj_conv(x)) if self.use_projection else x
        for conv, norm in self.layers[:-1]:
            x = jax.nn.relu(norm(conv(x)))
        conv, norm = self.layers[-1]
        return jax.nn.relu(norm(conv(x)) + shortcut)


class BlockGroup(Module):
    """Blocks of one width; the first may change width and resolution."""

    def __init__(self, blocks: list[ResnetBlock]):
        super().__init__()
        self.blocks = blocks

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


class ResNet(Module):
    """The base class of residual networks; a subclass sets the depth and the kind of blocks."""

    blocks_per_group: tuple[int, ...] = ()  # of each of the four groups
    bottleneck = True  # three convolutions, the middle one a quarter as wide, instead of two
    default_name: str | None = None

    def __init__(
        self,
        input_channels: int,
        num_classes: int,
        logits_config: Mapping[str, Any] | None = None,
        initial_conv_config: Mapping[str, Any] | None = None,
    ):
        super().__init__(name=self.default_name)
        where = type(self).__name__
        initial = {
            "in_features": checked_integer(input_channels, f"{where}.input_channels", least=1),
            "out_features": 64,
            "kernel_shape": 7,
            "stride": 2,
            "with_bias": False,
            "padding": [(3, 3), (3, 3)],
            "data_format": _FORMAT,
        } | _check_config(initial_conv_config, f"{where}.initial_conv_config")
        logits = {
            "out_dim": checked_integer(num_classes, f"{where}.num_classes", least=1),
            "w_init": zeros,
        } | _check_config(logits_config, f"{where}.logits_config")
        self.initial_conv = Conv2D(**initial, name="conv1")
        channels = self.initial_conv.out_features
        self.initial_batchnorm = _make_norm(channels, "bn1")
        self.block_groups, channels = self._groups(channels)
        self.logits = Linear(**{"in_dim": channels, **logits}, name="fc")

    def _groups(self, in_channels: int) -> tuple[list[BlockGroup], int]:
        """Returns the groups, and the number of output channels of the last one."""
        steps_of, width = (_bottleneck_steps, 256) if self.bottleneck else (_basic_steps, 64)
        groups = []
        for index, count in enumerate(self.blocks_per_group):
            channels, stride = width * 2**index, 1 if index == 0 else 2
            project = self.bottleneck or index > 0
            blocks = [ResnetBlock(in_channels, steps_of(channels, stride), project)]
            for _ in range(count - 1):
                blocks.append(ResnetBlock(channels, steps_of(channels, 1), False))
            groups.append(BlockGroup(blocks))
            in_channels = channels
        return groups, in_channels

    def __call__(self, x: Array) -> jax.Array:
        """Classifies images.

        Args:
            x: ``[batch, input_channels, height, width]``.

        Returns:
            Logits, ``[batch, num_classes]``.

        Raises:
            ImmutableModuleError: in train mode, outside of `pure` and `purecall`.
            InvalidArgumentError: (a ValueError) another number of axes or of channels.
        """
        x = jax.nn.relu(self.initial_batchnorm(self.initial_conv(x)))
        x = jnp.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        x = max_pool(x, (1, 1, 3, 3), (1, 1, 2, 2), "VALID")
        for group in self.block_groups:
            x = group(x)
        return self.logits(jnp.mean(x, axis=(2, 3)))


def _check_config(config: Mapping[str, Any] | None, where: str) -> dict[str, Any]:
    """Returns the given keywords of a layer, without its name."""
    config = dict(config or {})
    if "name" in config:
        raise InvalidArgumentTypeError(
            "The names of the layers of a network are fixed.",
            where=where,
            got=f"name={config['name']!r}",
            write="the other keywords of the layer",
        )
    return config


class ResNet18(ResNet):
    """A residual network of 18 layers (He et al., 2015), for images NCHW.

    All residual networks here have this form: a 7x7 convolution with stride 2, a max pool with
    stride 2, four groups of blocks of which the last three halve the resolution, a mean over the
    image, and a dense layer whose weight starts at zero.

    Args:
        input_channels: the channels of the images.
        num_classes: the number of logits.
        logits_config: keywords for the last layer, a `Linear`.
        initial_conv_config: keywords for the first layer, a `Conv2D`;
            ``{"kernel_shape": 3, "stride": 1, "padding": "SAME"}`` suits small images.

    Attributes:
        initial_conv: the first `Conv2D`.
        initial_batchnorm: the `BatchNorm2D` after it.
        block_groups: a list of four groups, each with a list ``blocks``, each of
            these with a tuple ``layers`` of pairs of convolution and norm.
        logits: the last `Linear`.

    Raises:
        InvalidArgumentError: a size is less than one.
        InvalidArgumentTypeError: (a TypeError) a size is not an integer, or a
            configuration gives a name.

    Example:
        >>> import jax, jax.numpy as jnp, pax_export as pax
        >>> def logits(images):
        ...     return pax.nets.ResNet18(input_channels=3, num_classes=10).eval()(images)
        >>> jax.eval_shape(logits, jnp.ones((8, 3, 64, 64))).shape
        (8, 10)
    """

    blocks_per_group = (2, 2, 2, 2)
    bottleneck = False
    default_name = "ResNet18"


class ResNet34(ResNet):
    """A residual network of 34 layers (He et al., 2015); see `ResNet18`.

    Example:
        >>> import jax, pax_export as pax
        >>> shapes = jax.eval_shape(lambda: pax.nets.ResNet34(3, 1000))
        >>> sum(leaf.size for leaf in jax.tree.leaves(shapes.parameters()))
        21797672
    """

    blocks_per_group = (3, 4, 6, 3)
    bottleneck = False
    default_name = "ResNet34"


class ResNet50(ResNet):
    """A residual network of 50 layers (He et al., 2015); see `ResNet18`.

    From here on, blocks are bottlenecks: 1x1 to a quarter of the channels, 3x3,
    1x1 back.  The 3x3 convolution has the stride (ResNet v1.5, Goyal et al.,
    2017), and the weights have the published shapes.

    Example:
        >>> import jax, pax_export as pax
        >>> shapes = jax.eval_shape(lambda: pax.nets.ResNet50(3, 1000))
        >>> sum(leaf.size for leaf in jax.tree.leaves(shapes.parameters()))
        25557032
    """

    blocks_per_group = (3, 4, 6, 3)
    default_name = "ResNet50"


class ResNet101(ResNet):
    """A residual network of 101 layers; see `ResNet50`.

    Example:
        >>> import jax, pax_export as pax
        >>> shapes = jax.eval_shape(lambda: pax.nets.ResNet101(3, 1000))
        >>> sum(leaf.size for leaf in jax.tree.leaves(shapes.parameters()))
        44549160
    """

    blocks_per_group = (3, 4, 23, 3)
    default_name = "ResNet101"


class ResNet152(ResNet):
    """A residual network of 152 layers; see `ResNet50`.

    Example:
        >>> import jax, pax_export as pax
        >>> shapes = jax.eval_shape(lambda: pax.nets.ResNet152(3, 1000))
        >>> sum(leaf.size for leaf in jax.tree.leaves(shapes.parameters()))
        60192808
    """

    blocks_per_group = (3, 8, 36, 3)
    default_name = "ResNet152"


class ResNet200(ResNet):
    """A residual network of 200 layers; see `ResNet50`.

    Example:
        >>> import jax, pax_export as pax
        >>> shapes = jax.eval_shape(lambda: pax.nets.ResNet200(3, 1000))
        >>> sum(leaf.size for leaf in jax.tree.leaves(shapes.parameters()))
        64673832
    """

    blocks_per_group = (3, 24, 36, 3)
    default_name = "ResNet200"
