"""What layers compute, written once more in plain numpy, in float64 and loops."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    """float32 draws from N(1, 4)."""
    return (np.random.RandomState(seed).standard_normal(shape) * 2 + 1).astype(np.float32)


def dense(layer, *parts: np.ndarray) -> np.ndarray:
    """A dense layer of inputs side by side."""
    weight, bias = (np.asarray(each, np.float64) for each in (layer.weight, layer.bias))
    return np.concatenate(parts, axis=-1) @ weight + bias


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def same_padding(size: int, kernel: int, stride: int, rate: int = 1) -> tuple[int, int]:
    """So that the output has ceil(size / stride) elements; the odd one goes behind."""
    reach = (kernel - 1) * rate + 1
    total = max((-(-size // stride) - 1) * stride + reach - size, 0)
    return total // 2, total - total // 2


def pads_of(padding, sizes, kernel, stride, rate) -> list[tuple[int, int]]:
    if padding == "VALID":
        return [(0, 0)] * len(kernel)
    if padding == "SAME":
        return [same_padding(*each) for each in zip(sizes, kernel, stride, rate)]
    return list(padding)


def conv(
    x: np.ndarray,
    weight: np.ndarray,
    stride: Sequence[int],
    rate: Sequence[int],
    padding: str | list,
    groups: int = 1,
) -> np.ndarray:
    """A convolution of ``[batch, *spatial, in]`` with ``[*kernel, in / groups, out]``."""
    *kernel, group_size, features = weight.shape
    pads = pads_of(padding, x.shape[1:-1], kernel, stride, rate)
    x = np.pad(np.asarray(x, np.float64), [(0, 0), *pads, (0, 0)])
    reach = [(k - 1) * r + 1 for k, r in zip(kernel, rate)]
    sizes = [(n - k) // s + 1 for n, k, s in zip(x.shape[1:-1], reach, stride)]
    out = np.zeros((len(x), *sizes, features))
    for place in itertools.product(*map(range, sizes)):
        for tap in itertools.product(*map(range, kernel)):
            at = tuple(p * s + t * r for p, s, t, r in zip(place, stride, tap, rate))
            for f in range(features):
                first = f // (features // groups) * group_size
                channels = x[(slice(None), *at)][:, first : first + group_size]
                out[(slice(None), *place, f)] += channels @ weight[(*tap, slice(None), f)]
    return out


def conv_transpose(
    x: np.ndarray, weight: np.ndarray, stride: Sequence[int], padding: str | list
) -> np.ndarray:
    """A transposed convolution of ``[batch, *spatial, in]`` with ``[*kernel, out, in]``.

    Zeros are put between the elements of the input; then it is an ordinary
    convolution.  ``"SAME"`` and ``"VALID"`` give an output of ``size * stride``
    and of ``size * stride + max(kernel - stride, 0)`` elements.
    """
    *kernel, _, _ = weight.shape
    spread_sizes = [(n - 1) * s + 1 for n, s in zip(x.shape[1:-1], stride)]
    spread = np.zeros((len(x), *spread_sizes, x.shape[-1]))
    spread[(slice(None), *(slice(None, None, s) for s in stride))] = x
    if isinstance(padding, str):
        pads = []
        for k, s in zip(kernel, stride):
            total = k + s - 2 + (max(k - s, 0) if padding == "VALID" else 0)
            before = k - 1 if padding == "VALID" or s > k - 1 else -(-total // 2)
            pads.append((before, total - before))
    else:
        pads = list(padding)
    ones = (1,) * len(kernel)
    return conv(spread, np.swapaxes(weight, -1, -2), ones, ones, pads)


def pool(x: np.ndarray, window, strides, padding: str, reduce) -> np.ndarray:
    """``reduce`` of the real elements of each window; all axes are pooled."""
    ones = (1,) * x.ndim
    pads = pads_of(padding, x.shape, window, strides, ones)
    padded = np.pad(x.astype(np.float64), pads, constant_values=np.nan)
    sizes = [(n - w) // s + 1 for n, w, s in zip(padded.shape, window, strides)]
    out = np.zeros(sizes)
    for place in itertools.product(*map(range, sizes)):
        part = padded[tuple(slice(p * s, p * s + w) for p, s, w in zip(place, strides, window))]
        out[place] = reduce(part[~np.isnan(part)])
    return out


def normalised(x: np.ndarray, axes: tuple[int, ...], eps: float = 1e-5) -> np.ndarray:
    """Mean 0 and variance 1 over some axes."""
    x = np.asarray(x, np.float64)
    mean = x.mean(axes, keepdims=True)
    variance = ((x - mean) ** 2).mean(axes, keepdims=True)
    return (x - mean) / np.sqrt(variance + eps)
