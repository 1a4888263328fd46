"""PyTorch's files and layers in numpy alone: what the nets of PyTorch are compared with.

Written apart from the library on purpose: another reader, another layout (channels first, as in
the files), other sums.  It is for the files of this room, not for those of strangers.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

_DTYPES = {"FloatStorage": "<f4", "LongStorage": "<i8"}


def _tensor(storage: Any, start: int, shape: tuple, steps: tuple, *_: Any) -> Any:
    return SimpleNamespace(storage=storage, start=start, shape=shape, steps=steps)


class _Pickle(pickle.Unpickler):
    """Finds dicts, tensors and storages, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        known = {"OrderedDict": OrderedDict, "_rebuild_tensor_v2": _tensor, **_DTYPES}
        return known[name]

    def persistent_load(self, identity: Any) -> tuple[str, str]:
        return identity[2], identity[1]  # key, dtype


def state_dict(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file that ``torch.save`` wrote."""
    content = path.read_bytes()
    if zipfile.is_zipfile(path):
        archive = zipfile.ZipFile(path)
        root = next(name for name in archive.namelist() if name.endswith("data.pkl"))[:-8]
        tensors = _Pickle(io.BytesIO(archive.read(f"{root}data.pkl"))).load()
        storages = {key: archive.read(f"{root}data/{key}") for key, _ in _keys(tensors)}
    else:
        file = io.BytesIO(content)
        for _ in range(3):  # a magic number, a protocol, the machine's sizes
            pickle.load(file)
        tensors, keys = _Pickle(file).load(), pickle.load(file)
        sizes = {key: np.dtype(dtype).itemsize for key, dtype in _keys(tensors)}
        storages = {
            key: file.read(int.from_bytes(file.read(8), "little") * sizes[key]) for key in keys
        }
    return {name: _array(tensor, storages) for name, tensor in tensors.items()}


def _keys(tensors: dict[str, Any]) -> set[tuple[str, str]]:
    return {tensor.storage for tensor in tensors.values()}


def _array(tensor: Any, storages: dict[str, bytes]) -> np.ndarray:
    key, dtype = tensor.storage
    flat = np.frombuffer(storages[key], dtype)[tensor.start :]
    steps = [step * flat.itemsize for step in tensor.steps]
    return np.lib.stride_tricks.as_strided(flat, tensor.shape, steps)


def conv(x: np.ndarray, arrays: dict, name: str, stride: int = 1) -> np.ndarray:
    """A convolution of ``[batch, channels, height, width]`` without padding."""
    weight = arrays[f"{name}.weight"]
    windows = np.lib.stride_tricks.sliding_window_view(x, weight.shape[2:], axis=(2, 3))
    y = np.tensordot(windows[:, :, ::stride], weight, axes=((1, 4, 5), (1, 2, 3)))
    return np.moveaxis(y, -1, 1) + arrays[f"{name}.bias"][:, None, None]


def linear(x: np.ndarray, arrays: dict, name: str) -> np.ndarray:
    return x @ arrays[f"{name}.weight"].T + arrays[f"{name}.bias"]


def prelu(x: np.ndarray, arrays: dict, name: str) -> np.ndarray:
    slope = arrays[f"{name}.weight"].reshape(-1, *(1,) * (x.ndim - 2))
    return np.maximum(x, 0) + slope * np.minimum(x, 0)


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def pooled(x: np.ndarray, width: int) -> np.ndarray:
    """The largest of each window, two steps on; what stands over the end counts (ceil_mode)."""
    sizes = [-(-(size - width) // 2) + 1 for size in x.shape[2:]]
    rows = [x[:, :, 2 * i : 2 * i + width].max(axis=2) for i in range(sizes[0])]
    x = np.stack(rows, axis=2)
    return np.stack([x[..., 2 * j : 2 * j + width].max(axis=3) for j in range(sizes[1])], axis=3)


def mtcnn(path: Path, images: np.ndarray) -> list[np.ndarray]:
    """P-, R- or O-Net, whichever the file has: boxes, points of the O-Net, chances."""
    arrays = {name: array.astype(np.float64) for name, array in state_dict(path).items()}
    widths = {"pnet": (2,), "rnet": (3, 3), "onet": (3, 3, 2)}[path.stem]
    x, layer = images.astype(np.float64).transpose(0, 3, 1, 2), 0
    while f"conv{layer + 1}.weight" in arrays:
        layer += 1
        x = prelu(conv(x, arrays, f"conv{layer}"), arrays, f"prelu{layer}")
        x = pooled(x, widths[layer - 1]) if layer <= len(widths) else x
    if path.stem == "pnet":
        boxes, chances = conv(x, arrays, "conv4_2"), softmax(conv(x, arrays, "conv4_1"))
        return [y.transpose(0, 2, 3, 1) for y in (boxes, chances)]
    x, layer = x.transpose(0, 3, 2, 1).reshape(len(x), -1), layer + 1
    x = prelu(linear(x, arrays, f"dense{layer}"), arrays, f"prelu{layer}")
    heads = [name for name in arrays if name.startswith(f"dense{layer + 1}_")]
    names = [name.removesuffix(".weight") for name in heads if name.endswith(".weight")]
    chances, *others = [linear(x, arrays, name) for name in names]
    return [*others, softmax(chances)]


def crepe(path: Path, frames: np.ndarray) -> list[np.ndarray]:
    """CREPE of the tiny size."""
    arrays = {name: array.astype(np.float64) for name, array in state_dict(path).items()}
    x = frames.astype(np.float64)[:, None, :, None]
    for layer in range(1, 7):
        before, after, stride = (254, 254, 4) if layer == 1 else (31, 32, 1)
        x = np.pad(x, ((0, 0), (0, 0), (before, after), (0, 0)))
        x = np.maximum(conv(x, arrays, f"conv{layer}", stride), 0)
        scale, shift, mean, var = [
            arrays[f"conv{layer}_BN.{name}"][:, None, None]
            for name in ("weight", "bias", "running_mean", "running_var")
        ]
        x = (x - mean) / np.sqrt(var + 0.0010000000474974513) * scale + shift
        x = np.maximum(x[:, :, 0::2], x[:, :, 1::2])
    x = linear(x.transpose(0, 2, 1, 3).reshape(len(x), -1), arrays, "classifier")
    return [1 / (1 + np.exp(-x))]
