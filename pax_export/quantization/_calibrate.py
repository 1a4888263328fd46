"""Scales of the inputs of products, from calibration batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pax_export._quantized import StaticInputs
from pax_export.core import StateModule
from pax_export.quantization._compare import called

#: Calibration methods by the user's word.
METHODS = ("dynamic", "static", "minmax", "percentile", "mse")
_LEVELS = 255
#: The number of elements of a batch that are looked at for each product, evenly spread.
_SAMPLES = 1 << 16
#: The share of elements that a percentile clips at each end.
_CLIPPED = 1e-4
#: Parts of the whole range that are tried.
_PARTS = np.linspace(0.3, 1.0, 36)

_tokens = itertools.count()


class _InputSamples:
    """Elements that products were given, by the numbers of these."""

    def __init__(self) -> None:
        self.samples: dict[int, list[np.ndarray]] = {}
        self.ranges: dict[int, tuple[float, float]] = {}

    def __call__(self, number: Any, x: Any) -> None:
        flat = np.asarray(x, np.float32).reshape(-1)
        low, high = self.ranges.get(int(number), (0.0, 0.0))
        self.ranges[int(number)] = min(low, float(flat.min())), max(high, float(flat.max()))
        kept = flat[:: max(1, flat.size // _SAMPLES)]
        self.samples.setdefault(int(number), []).append(kept)


_recorders: dict[int, Callable[[Any, Any], None]] = {}


class _Observed(StateModule):
    """A stand-in for `StaticInputs` that records inputs unchanged."""

    def __init__(self, number: Any, token: int):
        super().__init__()
        self.number = number
        self.token = token

    def rounded(self, x: Any, axes: Sequence[int]) -> Any:
        jax.debug.callback(partial(_record, self.token), self.number, x)
        return x


def _record(token: int, number: Any, x: Any) -> None:
    _recorders[token](number, x)


def static_inputs(
    arrays: Mapping[str, tuple[Any, int]],
    rebuilt: Callable[[Mapping[str, Any]], Callable[..., Any]],
    calls: Sequence[tuple[Any, ...]],
    method: str,
) -> dict[str, StaticInputs]:
    """The scale and the zero point of the inputs of each product, for those that are called.

    Args:
        arrays: the quantized weights by name, each with its number of axes in one layer.
        rebuilt: the call of the net with others in their place.
        calls: the arguments of each.
        method: one of `METHODS`.
    """
    samples = _InputSamples()
    numbers = observe(arrays, rebuilt, calls, samples)
    found = {number: _scale(samples, number, method) for number in samples.ranges}
    made = {}
    for name, own in numbers.items():
        each = [found.get(int(number)) for number in own.reshape(-1)]
        if None not in each:
            scales, zeros = (np.reshape(of, own.shape) for of in zip(*each))
            made[name] = StaticInputs(jnp.asarray(scales, "float32"), jnp.asarray(zeros, "int8"))
    return made


def observe(
    arrays: Mapping[str, tuple[Any, int]],
    rebuilt: Callable[[Mapping[str, Any]], Callable[..., Any]],
    calls: Sequence[tuple[Any, ...]],
    collect: Callable[[Any, Any], None],
) -> dict[str, np.ndarray]:
    """Calls the net, and hands the inputs of products to `collect`, each with its number.

    Returns:
        The numbers of each weight: one, or one for each layer of a scan.
    """
    token, count = next(_tokens), 0
    numbers, observed = {}, {}
    for name, (array, rank) in arrays.items():
        layers = array.shape[:-rank]  # of a scan
        size = int(np.prod(layers, dtype=np.int64))
        numbers[name] = own = np.arange(count, count + size, dtype=np.int32).reshape(layers)
        observed[name] = array.replace(inputs=_Observed(jnp.asarray(own), token))
        count += size
    _recorders[token] = collect
    try:
        call = rebuilt(observed)
        for batch in calls:
            jax.block_until_ready(called(call, batch))
        jax.effects_barrier()
    finally:
        del _recorders[token]
    return numbers


def _scale(recorder: _InputSamples, number: int, method: str) -> tuple[float, int]:
    low, high = recorder.ranges[number]
    samples = np.concatenate(recorder.samples[number])
    if method == "percentile":
        ends = np.quantile(samples, [_CLIPPED, 1 - _CLIPPED])
        low, high = min(float(ends[0]), 0.0), max(float(ends[1]), 0.0)
    if method in ("static", "mse"):
        tried = [_whole(low * part, high * part) for part in _PARTS]
        return min(tried, key=lambda each: _error(samples, *each))
    return _whole(low, high)


def _whole(low: float, high: float) -> tuple[float, int]:
    """Returns the scale of a range that includes 0, and its zero point."""
    scale = np.float32((high - low) / _LEVELS) or np.float32(1)
    zero = int(np.clip(np.rint(-128 - low / scale), -128, 127))
    return float(scale), zero


def _error(samples: np.ndarray, scale: float, zero: int) -> float:
    integers = np.clip(np.rint(samples / np.float32(scale)) + zero, -128, 127)
    return float(np.mean(((integers - zero) * np.float32(scale) - samples) ** 2))
