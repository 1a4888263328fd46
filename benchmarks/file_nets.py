"""Nets in jax, for benchmarks of what their files take; see `torch_nets` and `keras_nets`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import pax_export as pax

#: A model, specs of its inputs, and an input.
Net = tuple[Any, Any, np.ndarray]
NETS: dict[str, Callable[[], Net]] = {}


def net(function: Callable[[], Net]) -> Callable[[], Net]:
    """Puts a net into the table, by the name of its function."""
    NETS[function.__name__] = function
    return function


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def _linen(net: nn.Module, inputs: str, x: np.ndarray) -> Net:
    variables = net.init(jax.random.key(0), jnp.asarray(x))
    model = (variables, lambda variables, x: net.apply(variables, x))
    return model, pax.export.spec(inputs), x


def _image() -> np.ndarray:
    """With features last."""
    return np.ascontiguousarray(_normal(1, 3, 224, 224).transpose(0, 2, 3, 1))


# ResNet.

#: Nets whose images have their features first.
FEATURES_FIRST = frozenset({"resnet18", "resnet50"})


def _resnet(model: Any) -> Net:
    return model.eval(), pax.export.spec("batch, 3, 224, 224"), _normal(1, 3, 224, 224)


@net
def resnet18() -> Net:
    """ResNet18, features first."""
    return _resnet(pax.nets.ResNet18(3, 1000))


@net
def resnet50() -> Net:
    """ResNet50, features first."""
    return _resnet(pax.nets.ResNet50(3, 1000))


# MobileNetV2, and one like EfficientNet: wider by, features, blocks, stride, size of the kernel.

MOBILE = [(1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 32, 3, 2, 3), (6, 64, 4, 2, 3)]
MOBILE += [(6, 96, 3, 1, 3), (6, 160, 3, 2, 3), (6, 320, 1, 1, 3)]
EFFICIENT = [(1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3)]
EFFICIENT += [(6, 112, 3, 1, 5), (6, 192, 4, 2, 5)]


class _Conv(nn.Module):
    features: int
    size: int = 1
    stride: int = 1
    groups: int = 1
    activation: Any = None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Conv(
            self.features,
            (self.size, self.size),
            strides=self.stride,
            padding=self.size // 2,
            feature_group_count=self.groups,
            use_bias=False,
        )(x)
        x = nn.BatchNorm(use_running_average=True)(x)
        return x if self.activation is None else self.activation(x)


class _Inverted(nn.Module):
    table: Any
    activation: Any
    excites: bool

    @nn.compact
    def __call__(self, x: Any) -> Any:
        act = self.activation
        x, inside = _Conv(32, 3, 2, activation=act)(x), 32
        for wider, features, count, stride, size in self.table:
            for number in range(count):
                h, wide, step = x, inside * wider, stride if number == 0 else 1
                if wider != 1:
                    h = _Conv(wide, activation=act)(h)
                h = _Conv(wide, size, step, wide, act)(h)
                if self.excites:
                    gate = act(nn.Conv(max(1, inside // 4), (1, 1))(h.mean((1, 2), keepdims=True)))
                    h = h * nn.sigmoid(nn.Conv(wide, (1, 1))(gate))
                h = _Conv(features)(h)
                x, inside = (x + h if inside == features and step == 1 else h), features
        return nn.Dense(1000)(_Conv(1280, activation=act)(x).mean((1, 2)))


@net
def mobilenet_v2() -> Net:
    """MobileNetV2, features last."""
    net = _Inverted(MOBILE, lambda x: jnp.clip(x, 0.0, 6.0), False)
    return _linen(net, "batch, 224, 224, 3", _image())


@net
def like_efficientnet() -> Net:
    """Depthwise, swish, squeeze and excite."""
    return _linen(_Inverted(EFFICIENT, nn.swish, True), "batch, 224, 224, 3", _image())


# Transformers, of 6 layers.

DIM, HEADS, LENGTH = 256, 4, 128


class _Layers(nn.Module):
    causal: bool

    @nn.compact
    def __call__(self, x: Any) -> Any:
        mask = nn.make_causal_mask(jnp.ones((1, LENGTH))) if self.causal else None
        for _ in range(6):
            h = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(HEADS)(h, h, mask=mask)
            h = nn.gelu(nn.Dense(4 * DIM)(nn.LayerNorm()(x)), approximate=False)
            x = x + nn.Dense(DIM)(h)
        return x


def _transformer(causal: bool) -> Net:
    return _linen(_Layers(causal), f"batch, {LENGTH}, {DIM}", _normal(1, LENGTH, DIM))


@net
def encoder() -> Net:
    """Six layers that see all places."""
    return _transformer(False)


@net
def causal_transformer() -> Net:
    """Six layers that see the places before."""
    return _transformer(True)


# Others.


@net
def lstm() -> Net:
    """A layer over 64 steps."""
    return _linen(nn.RNN(nn.LSTMCell(128)), "batch, 64, 64", _normal(1, 64, 64))


class _UNet(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        kept = []
        for features in (16, 32):
            x = _Conv(features, 3, activation=nn.relu)(x)
            kept.append(x)
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = _Conv(64, 3, activation=nn.relu)(x)
        for features in (32, 16):
            x = nn.ConvTranspose(features, (2, 2), (2, 2))(x)
            x = _Conv(features, 3, activation=nn.relu)(jnp.concatenate([x, kept.pop()], -1))
        return nn.Conv(2, (1, 1))(x)


@net
def unet() -> Net:
    """Down twice, and up by transposed convolutions."""
    return _linen(_UNet(), "batch, 224, 224, 3", _image())
