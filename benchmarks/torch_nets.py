"""The nets of `file_nets` in torch, for files of its exporter."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn as tn

from benchmarks.file_nets import DIM, EFFICIENT, FEATURES_FIRST, HEADS, LENGTH, MOBILE


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


def _resnet(counts: tuple[int, ...], deep: bool) -> Any:
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
    return tn.Sequential(*layers)


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


class _Last(tn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = tn.LSTM(64, 128, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.lstm(x)[0]


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


def _transformer(causal: bool) -> Any:
    return tn.Sequential(*(_TorchLayer(causal) for _ in range(6)))


NETS: dict[str, Callable[[], Any]] = {
    "resnet18": lambda: _resnet((2, 2, 2, 2), False),
    "resnet50": lambda: _resnet((3, 4, 6, 3), True),
    "mobilenet_v2": lambda: _torch_inverted(MOBILE, tn.ReLU6, False),
    "like_efficientnet": lambda: _torch_inverted(EFFICIENT, tn.SiLU, True),
    "encoder": lambda: _transformer(False),
    "causal_transformer": lambda: _transformer(True),
    "lstm": _Last,
    "unet": _TorchUNet,
}


def write(name: str, path: str, x: np.ndarray) -> np.ndarray:
    """Writes the file of torch's exporter, for a batch of any size; gives its input for `x`."""
    if x.ndim == 4 and name not in FEATURES_FIRST:
        x = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            NETS[name]().eval(), (torch.from_numpy(x),), path, dynamo=False, opset_version=17,
            input_names=["x"], dynamic_axes={"x": {0: "batch"}},
        )  # fmt: skip
    return x
