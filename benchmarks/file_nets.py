"""The same nets in jax and in torch, for benchmarks of what their files take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn as tn

import pax_export as pax

#: A model and specs of its inputs, an input, the net of torch, and its input.
Pair = tuple[Any, Any, np.ndarray, Any, Any]
NETS: dict[str, Callable[[], Pair]] = {}


def net(function: Callable[[], Pair]) -> Callable[[], Pair]:
    """Puts a pair into the table, by the name of its function."""
    NETS[function.__name__] = function
    return function


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def _linen(net: nn.Module, inputs: str, x: np.ndarray, other: Any, given: np.ndarray) -> Pair:
    variables = net.init(jax.random.key(0), jnp.asarray(x))
    model = (variables, lambda variables, x: net.apply(variables, x))
    return model, pax.export.spec(inputs), x, other.eval(), torch.from_numpy(given)


def _images() -> tuple[np.ndarray, np.ndarray]:
    """With features last, and first."""
    x = _normal(1, 3, 224, 224)
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1)), x


# ResNet.


class _TorchBlock(tn.Module):
    def __init__(self, inside: int, outside: int, stride: int, deep: bool):
        super().__init__()
        width = outside // 4
        shapes = [(inside, outside, 3, stride), (outside, outside, 3, 1)]
        if deep:
            shapes = [(inside, width, 1, 1), (width, width, 3, stride), (width, outside, 1, 1)]
        layers: list[Any] = []
        for i, o, size, step in shapes:
            layers += [tn.Conv2d(i, o, size, step, size // 2, bias=False), tn.BatchNorm2d(o)]
            layers += [tn.ReLU()]
        self.body = tn.Sequential(*layers[:-1])
        self.short: Any = tn.Identity()
        if inside != outside or stride != 1:
            conv = tn.Conv2d(inside, outside, 1, stride, bias=False)
            self.short = tn.Sequential(conv, tn.BatchNorm2d(outside))

    def forward(self, x: Any) -> Any:
        return torch.relu(self.body(x) + self.short(x))


def _resnet(model: Any, counts: tuple[int, ...], deep: bool) -> Pair:
    layers: list[Any] = [tn.Conv2d(3, 64, 7, 2, 3, bias=False), tn.BatchNorm2d(64), tn.ReLU()]
    layers += [tn.MaxPool2d(3, 2, 1)]
    inside = 64
    for group, count in enumerate(counts):
        outside = (256 if deep else 64) * 2**group
        for number in range(count):
            stride = 2 if number == 0 and group else 1
            layers.append(_TorchBlock(inside, outside, stride, deep))
            inside = outside
    layers += [tn.AdaptiveAvgPool2d(1), tn.Flatten(), tn.Linear(inside, 1000)]
    x = _images()[1]
    inputs = pax.export.spec("batch, 3, 224, 224")
    return model.eval(), inputs, x, tn.Sequential(*layers).eval(), torch.from_numpy(x)


@net
def resnet18() -> Pair:
    """ResNet18, features first in both."""
    return _resnet(pax.nets.ResNet18(3, 1000), (2, 2, 2, 2), False)


@net
def resnet50() -> Pair:
    """ResNet50, features first in both."""
    return _resnet(pax.nets.ResNet50(3, 1000), (3, 4, 6, 3), True)


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


class _TorchExcite(tn.Module):
    def __init__(self, wide: int, narrow: int):
        super().__init__()
        self.squeeze, self.excite = tn.Conv2d(wide, narrow, 1), tn.Conv2d(narrow, wide, 1)

    def forward(self, x: Any) -> Any:
        gate = tn.functional.silu(self.squeeze(x.mean((2, 3), keepdim=True)))
        return x * torch.sigmoid(self.excite(gate))


class _Residual(tn.Module):
    def __init__(self, body: Any, adds: bool):
        super().__init__()
        self.body, self.adds = body, adds

    def forward(self, x: Any) -> Any:
        return x + self.body(x) if self.adds else self.body(x)


def _torch_inverted(table: Any, activation: Any, excites: bool) -> Any:
    def conv(i: int, o: int, size: int = 1, stride: int = 1, groups: int = 1) -> list[Any]:
        made = tn.Conv2d(i, o, size, stride, size // 2, groups=groups, bias=False)
        return [made, tn.BatchNorm2d(o), activation()]

    layers, inside = conv(3, 32, 3, 2), 32
    for wider, features, count, stride, size in table:
        for number in range(count):
            wide, step = inside * wider, stride if number == 0 else 1
            body = conv(inside, wide) if wider != 1 else []
            body += conv(wide, wide, size, step, wide)
            body += [_TorchExcite(wide, max(1, inside // 4))] if excites else []
            body += conv(wide, features)[:-1]
            layers.append(_Residual(tn.Sequential(*body), inside == features and step == 1))
            inside = features
    layers += conv(inside, 1280)
    return tn.Sequential(*layers, tn.AdaptiveAvgPool2d(1), tn.Flatten(), tn.Linear(1280, 1000))


@net
def mobilenet_v2() -> Pair:
    """MobileNetV2, with features last in jax."""
    last, first = _images()
    jaxs = _Inverted(MOBILE, lambda x: jnp.clip(x, 0.0, 6.0), False)
    other = _torch_inverted(MOBILE, tn.ReLU6, False)
    return _linen(jaxs, "batch, 224, 224, 3", last, other, first)


@net
def like_efficientnet() -> Pair:
    """Depthwise, swish, squeeze and excite."""
    last, first = _images()
    other = _torch_inverted(EFFICIENT, tn.SiLU, True)
    return _linen(_Inverted(EFFICIENT, nn.swish, True), "batch, 224, 224, 3", last, other, first)


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


class _TorchLayer(tn.Module):
    def __init__(self, causal: bool):
        super().__init__()
        self.causal = causal
        self.one, self.two = tn.LayerNorm(DIM), tn.LayerNorm(DIM)
        self.parts = tn.ModuleList(tn.Linear(DIM, DIM) for _ in range(3))
        self.out = tn.Linear(DIM, DIM)
        self.mlp = tn.Sequential(tn.Linear(DIM, 4 * DIM), tn.GELU(), tn.Linear(4 * DIM, DIM))

    def forward(self, x: Any) -> Any:
        h = self.one(x)
        q, k, v = (
            part(h).view(-1, LENGTH, HEADS, DIM // HEADS).transpose(1, 2) for part in self.parts
        )
        scores = q @ k.transpose(-1, -2) / (DIM // HEADS) ** 0.5
        if self.causal:
            mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
            scores = scores.masked_fill(~mask, torch.finfo(torch.float32).min)
        h = (scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, LENGTH, DIM)
        x = x + self.out(h)
        return x + self.mlp(self.two(x))


def _transformer(causal: bool) -> Pair:
    x = _normal(1, LENGTH, DIM)
    other = tn.Sequential(*(_TorchLayer(causal) for _ in range(6)))
    return _linen(_Layers(causal), f"batch, {LENGTH}, {DIM}", x, other, x)


@net
def encoder() -> Pair:
    """Six layers that see all places."""
    return _transformer(False)


@net
def causal_transformer() -> Pair:
    """Six layers that see the places before."""
    return _transformer(True)


# Others.


class _Last(tn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = tn.LSTM(64, 128, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.lstm(x)[0]


@net
def lstm() -> Pair:
    """A layer over 64 steps."""
    x = _normal(1, 64, 64)
    return _linen(nn.RNN(nn.LSTMCell(128)), "batch, 64, 64", x, _Last(), x)


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


class _TorchUNet(tn.Module):
    def __init__(self) -> None:
        super().__init__()

        def conv(i: int, o: int) -> Any:
            made = tn.Conv2d(i, o, 3, padding=1, bias=False)
            return tn.Sequential(made, tn.BatchNorm2d(o), tn.ReLU())

        self.down = tn.ModuleList([conv(3, 16), conv(16, 32)])
        self.middle = conv(32, 64)
        self.wide = tn.ModuleList(
            [tn.ConvTranspose2d(64, 32, 2, 2), tn.ConvTranspose2d(32, 16, 2, 2)]
        )
        self.up = tn.ModuleList([conv(64, 32), conv(32, 16)])
        self.out = tn.Conv2d(16, 2, 1)

    def forward(self, x: Any) -> Any:
        kept = []
        for each in self.down:
            x = each(x)
            kept.append(x)
            x = tn.functional.max_pool2d(x, 2)
        x = self.middle(x)
        for wide, each in zip(self.wide, self.up):
            x = each(torch.cat([wide(x), kept.pop()], 1))
        return self.out(x)


@net
def unet() -> Pair:
    """Down twice, and up by transposed convolutions."""
    last, first = _images()
    return _linen(_UNet(), "batch, 224, 224, 3", last, _TorchUNet(), first)
