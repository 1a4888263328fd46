"""Differences between outputs, of two nets or of a net and a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

Arrays = Sequence[np.ndarray]


class Apart(NamedTuple):
    """Differences of all outputs; the last two are None unless they may be logits."""

    largest: float
    mean: float
    scale: float
    kl: float | None
    same_largest: float | None


def apart(pairs: Iterable[tuple[Arrays, Arrays]]) -> Apart:
    """Compares the outputs of calls, reference first; ignores where it is not finite.

    Where only the other output is not finite, they differ by infinity.
    """
    largest, total, size, count = 0.0, 0.0, 0.0, 0
    divergences: list[Any] = []
    same: list[Any] = []
    logits = True
    for old, new in pairs:
        for one, other in zip(old, new):
            known = np.isfinite(one)
            one, other = one[known], other[known]
            found = np.where(np.isfinite(other), np.abs(one - other), np.inf)
            largest = max(largest, float(found.max(initial=0)))
            total, count = total + float(found.sum()), count + found.size
            size += float(np.abs(one).sum())
        if len(old) == 1 and old[0].ndim > 1 and old[0].shape[-1] > 1 and old[0].size:
            divergences.append(_divergence(old[0], new[0]).ravel())
            same.append((old[0].argmax(-1) == new[0].argmax(-1)).ravel())
        else:
            logits = False
    means = [float(np.concatenate(each).mean()) for each in (divergences, same) if each]
    found = means if logits and means else [None, None]
    return Apart(largest, total / max(count, 1), size / max(count, 1), *found)


def _divergence(logits: np.ndarray, others: np.ndarray) -> np.ndarray:
    one, other = _log_softmax(logits), _log_softmax(others)
    return np.sum(np.exp(one) * (one - other), -1)


def _log_softmax(x: np.ndarray) -> np.ndarray:
    below = x - x.max(-1, keepdims=True)
    return below - np.log(np.exp(below).sum(-1, keepdims=True))
