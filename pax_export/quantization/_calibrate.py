"""Scales of the inputs of products, and ranges of outputs, from calibration batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pax_export._foundations.types import Array
from pax_export.core import StateModule
from pax_export.precision.quantized import OutputRange, StaticInputs, scale_of_range
from pax_export.quantization._compare import called

#: Calibration methods by the user's word.
METHODS = ("dynamic", "static", "minmax", "percentile", "mse")
#: The number of elements of a batch that are looked at for each product, evenly spread.
_SAMPLES = 1 << 16
#: The share of elements that a percentile clips at each end.
_CLIPPED = 1e-4
#: Parts of the whole range that are tried.
_PARTS = np.linspace(0.3, 1.0, 36)

_tokens = itertools.count()


class _Samples:
    """Elements that products were given, and ranges of what they returned, by their numbers."""

    def __init__(self) -> None:
        self.samples: dict[int, list[np.ndarray]] = {}
        self.ranges: dict[int, tuple[float, float]] = {}
        self.outputs: dict[int, np.ndarray] = {}

    def __call__(self, number: Array, x: Array) -> None:
        flat = np.asarray(x, np.float32).reshape(-1)
        low, high = self.ranges.get(int(number), (0.0, 0.0))
        self.ranges[int(number)] = min(low, float(flat.min())), max(high, float(flat.max()))
        kept = flat[:: max(1, flat.size // _SAMPLES)]
        self.samples.setdefault(int(number), []).append(kept)

    def see_outputs(self, number: Array, ends: Array) -> None:
        """Takes the least output of each channel, and the largest ones negated."""
        known = self.outputs.get(int(number), np.inf)
        self.outputs[int(number)] = np.minimum(known, np.asarray(ends, np.float32))


_recorders: dict[int, Any] = {}


class _Observed(StateModule):
    """A stand-in for `StaticInputs` that records inputs unchanged."""

    def __init__(self, number: Array, token: int):
        super().__init__()
        self.number = number
        self.token = token

    def rounded(self, x: Array, axes: Sequence[int]) -> Any:
        jax.debug.callback(partial(_record, self.token), self.number, x)
        return x

    def bounded(self, y: Array, axis: int) -> Any:
        others = tuple(each for each in range(y.ndim) if each != axis % y.ndim)
        ends = jnp.stack([y.min(others), -y.max(others)])
        jax.debug.callback(partial(_record_ends, self.token), self.number, ends)
        return y


def _record(token: int, number: Array, x: Array) -> None:
    _recorders[token](number, x)


def _record_ends(token: int, number: Array, ends: Array) -> None:
    _recorders[token].see_outputs(number, ends)


def static_ranges(
    arrays: Mapping[str, tuple[Any, int]],
    rebuilt: Callable[[Mapping[str, Any]], Callable[..., Any]],
    calls: Sequence[tuple[Any, ...]],
    method: str,
) -> tuple[dict[str, StaticInputs], dict[str, OutputRange]]:
    """The scales of inputs of products that are called, and the ranges of convolutions' outputs.

    Args:
        arrays: the quantized weights by name, each with its number of axes in one layer.
        rebuilt: the call of the net with others in their place.
        calls: the arguments of each.
        method: one of `METHODS`.
    """
    samples = _Samples()
    numbers = observe(arrays, rebuilt, calls, samples, outputs=True)
    found = {number: _scale(samples, number, method) for number in samples.ranges}
    made, outputs = {}, {}
    for name, own in numbers.items():
        each = [found.get(int(number)) for number in own.reshape(-1)]
        if None not in each:
            scales, zeros = (np.reshape(of, own.shape) for of in zip(*each))
            made[name] = StaticInputs(jnp.asarray(scales, "float32"), jnp.asarray(zeros, "int8"))
        numbered = list(map(int, own.reshape(-1)))
        if all(number in samples.outputs for number in numbered):
            both = np.stack([samples.outputs[number] for number in numbered]).reshape(
                *own.shape, 2, -1
            )
            outputs[name] = OutputRange(jnp.asarray(both[..., 0, :]), jnp.asarray(-both[..., 1, :]))
    return made, outputs


def observe(
    arrays: Mapping[str, tuple[Any, int]],
    rebuilt: Callable[[Mapping[str, Any]], Callable[..., Any]],
    calls: Sequence[tuple[Any, ...]],
    collect: Any,
    outputs: bool = False,
) -> dict[str, np.ndarray]:
    """Calls the net, and hands the inputs of products to `collect`, each with its number.

    With `outputs` it also hands the ranges of convolutions' outputs to its `see_outputs`.

    Returns:
        The numbers of each weight: one, or one for each layer of a scan.
    """
    token, count = next(_tokens), 0
    numbers, observed = {}, {}
    for name, (array, rank) in arrays.items():
        layers = array.shape[:-rank]  # of a scan
        size = int(np.prod(layers, dtype=np.int64))
        numbers[name] = own = np.arange(count, count + size, dtype=np.int32).reshape(layers)
        observed[name] = array.replace(
            inputs=_Observed(jnp.asarray(own), token),
            outputs=_Observed(jnp.asarray(own), token) if outputs else None,
        )
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


def _scale(recorder: _Samples, number: int, method: str) -> tuple[float, int]:
    low, high = recorder.ranges[number]
    samples = np.concatenate(recorder.samples[number])
    if method == "percentile":
        ends = np.quantile(samples, [_CLIPPED, 1 - _CLIPPED])
        low, high = min(float(ends[0]), 0.0), max(float(ends[1]), 0.0)
    if method in ("static", "mse"):
        tried = [scale_of_range(low * part, high * part) for part in _PARTS]
        return min(tried, key=lambda each: _error(samples, *each))
    return scale_of_range(low, high)


def _error(samples: np.ndarray, scale: float, zero: int) -> float:
    integers = np.clip(np.rint(samples / np.float32(scale)) + zero, -128, 127)
    return float(np.mean(((integers - zero) * np.float32(scale) - samples) ** 2))
