"""Calls of nets with batches: outputs are compared, inputs of products are observed."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pax_export._foundations.errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export._foundations.types import Array, PyTree
from pax_export.core import Module, StateModule
from pax_export.export.validation.integers import apart
from pax_export.precision.quantized import OutputRange, StaticInputs, scale_of_range
from pax_export.quantization._report import Difference
from pax_export.quantization._rounding import InputMoments
from pax_export.quantization._weights import Net

_WHERE = "quantize(batches=...)"
_WRITE = "a list of what the net is called with: an array for each batch, or a tuple of them"
#: The number of timed calls, of which the fastest counts.
_CALLS = 5


def checked(batches: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Returns the arguments of each call; raises for batches unfit for calibration."""
    if hasattr(batches, "shape") or not isinstance(batches, Iterable):
        raise InvalidArgumentTypeError(
            "Batches must be a list.",
            where=_WHERE,
            got=type(batches).__name__,
            write="[x], or " + _WRITE,
        )
    found = [each if isinstance(each, tuple) else (each,) for each in batches]
    if not found:
        raise InvalidArgumentError(
            "The list of batches is empty.", where=_WHERE, got="an empty list", write=_WRITE
        )
    for number, batch in enumerate(found):
        for leaf in jax.tree_util.tree_leaves(batch):
            _check(np.asarray(leaf), number)
    return found


def _check(array: np.ndarray, number: int) -> None:
    problem = ""
    if not array.size:
        problem = "no elements"
    elif array.dtype.kind == "f":
        if not np.isfinite(array).all():
            problem = "NaN or infinite elements"
        elif not array.any():
            problem = "nothing but zeros"
    if problem:
        raise InvalidArgumentError(
            "Batches must be like those that the net is used with.",
            where=f"{_WHERE}, batch {number}",
            got=f"an array {list(array.shape)} with {problem}",
            write="real examples",
        )


def compared(
    before: Callable[..., Any], after: Callable[..., Any], batches: Sequence[tuple[Any, ...]]
) -> Difference:
    """Returns the differences of the outputs of two compiled functions."""
    pairs = [(_floats(called(before, each)), _floats(after(*each))) for each in batches]
    for one, other in ([[each.shape for each in part] for part in pair] for pair in pairs):
        if one != other:
            raise InvalidArgumentError(
                "The nets have outputs of different shapes.",
                where="after",
                got=f"{other}, where the net has {one}",
                write="the loaded export of the same net",
            )
    return Difference(*apart(pairs), (_seconds(before, batches[0]), _seconds(after, batches[0])))


def compare_runtime(
    net: Net, before: Callable[..., Any], after: Callable[..., Any], batches: Sequence[Any]
) -> Difference:
    """Compares the export of a quantized net with the net, and its latency with the float export.

    Args:
        net: the quantized net.
        before: the loaded export of the float net.
        after: the loaded export of the quantized net.
        batches: the arguments of each call.

    Raises:
        InvalidArgumentError: batches that are empty, or that the net cannot be called with; outputs
            of different shapes.
    """
    calls = checked(batches)
    found = compared(call_of(net), after, calls)
    return replace(found, seconds=(_seconds(before, calls[0]), found.seconds[1]))


def call_of(net: Net) -> partial[Any]:
    """Returns a compiled call of a net, with its arrays as first argument."""
    if isinstance(net, Module):
        return partial(jax.jit(lambda net, *batch: net(*batch)), net.eval())
    params, function = net
    return partial(jax.jit(function), params)


def loss_of_outputs(
    function: partial[Any], batches: Sequence[tuple[Any, ...]]
) -> Callable[[Any], float]:
    """The mean difference of outputs in parts of their mean size, for other arrays of a net."""
    right = [_floats(called(function, each)) for each in batches]

    def loss(arrays: PyTree) -> float:
        arrays = arrays.eval() if hasattr(arrays, "eval") else arrays
        got = [_floats(function.func(arrays, *each)) for each in batches]
        found = apart(zip(right, got))
        return found.mean / found.scale if found.scale else found.mean

    return loss


def called(function: Callable[..., Any], batch: tuple[Any, ...]) -> Any:
    """The result of a net for a batch; raises for a batch that it cannot be called with."""
    try:
        return function(*batch)
    except Exception as error:  # of the net; quoted by the error
        shapes = ", ".join(str(list(np.shape(each))) for each in batch)
        raise InvalidArgumentError(
            "The net cannot be called with a batch.",
            where=_WHERE,
            got=f"shapes {shapes}: {type(error).__name__}: {str(error)[:300]}",
            write=_WRITE,
        ) from error


def _floats(output: PyTree) -> list[np.ndarray]:
    leaves = jax.tree_util.tree_leaves(output)
    inexact = [each for each in leaves if jnp.issubdtype(jnp.result_type(each), jnp.inexact)]
    return [np.asarray(each, np.float64) for each in inexact]


def _seconds(function: Callable[..., Any], batch: tuple[Any, ...]) -> float:
    best = math.inf
    for _ in range(_CALLS):
        begin = time.perf_counter()
        jax.block_until_ready(function(*batch))
        best = min(best, time.perf_counter() - begin)
    return best


# --- scales of inputs, and ranges of outputs -----------------------------------------------


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

    def see_inputs(self, number: Array, x: Array) -> None:
        flat = np.asarray(x, np.float32).reshape(-1)
        low, high = self.ranges.get(int(number), (0.0, 0.0))
        self.ranges[int(number)] = min(low, float(flat.min())), max(high, float(flat.max()))
        sample = flat[:: max(1, flat.size // _SAMPLES)]
        self.samples.setdefault(int(number), []).append(sample)

    def see_outputs(self, number: Array, ends: Array) -> None:
        """Takes the least output of each channel, and the largest ones negated."""
        known = self.outputs.get(int(number), np.inf)
        self.outputs[int(number)] = np.minimum(known, np.asarray(ends, np.float32))


_recorders: dict[int, _Samples | InputMoments] = {}


class _Observed(StateModule):
    """A stand-in for `StaticInputs` that records inputs unchanged."""

    def __init__(self, number: Array, token: int):
        super().__init__()
        self.number = number
        self.token = token

    def rounded(self, x: Array, axes: Sequence[int]) -> Any:
        jax.debug.callback(partial(_record, self.token, "see_inputs"), self.number, x)
        return x

    def bounded(self, y: Array, axis: int) -> Any:
        others = tuple(each for each in range(y.ndim) if each != axis % y.ndim)
        ends = jnp.stack([y.min(others), -y.max(others)])
        jax.debug.callback(partial(_record, self.token, "see_outputs"), self.number, ends)
        return y


def _record(token: int, method: str, number: Array, x: Array) -> None:
    getattr(_recorders[token], method)(number, x)


def static_ranges(
    arrays: Mapping[str, tuple[Any, int]],
    put: Callable[[Mapping[str, Any]], Net],
    calls: Sequence[tuple[Any, ...]],
    method: str,
) -> tuple[dict[str, StaticInputs], dict[str, OutputRange]]:
    """The scales of inputs of products that are called, and the ranges of convolutions' outputs."""
    samples = _Samples()
    numbers = observe(arrays, put, calls, samples, outputs=True)
    found = {number: _scale(samples, number, method) for number in samples.ranges}
    inputs, outputs = {}, {}
    for name, own in numbers.items():
        each = [found.get(int(number)) for number in own.reshape(-1)]
        if None not in each:
            scales, zeros = (np.reshape(of, own.shape) for of in zip(*each))
            inputs[name] = StaticInputs(jnp.asarray(scales, "float32"), jnp.asarray(zeros, "int8"))
        numbered = list(map(int, own.reshape(-1)))
        if all(number in samples.outputs for number in numbered):
            both = np.stack([samples.outputs[number] for number in numbered]).reshape(
                *own.shape, 2, -1
            )
            outputs[name] = OutputRange(jnp.asarray(both[..., 0, :]), jnp.asarray(-both[..., 1, :]))
    return inputs, outputs


def observe(
    arrays: Mapping[str, tuple[Any, int]],
    put: Callable[[Mapping[str, Any]], Net],
    calls: Sequence[tuple[Any, ...]],
    recorder: _Samples | InputMoments,
    outputs: bool = False,
) -> dict[str, np.ndarray]:
    """Calls the net, and shows the inputs of products to a recorder, each with its number.

    With `outputs` it also shows the ranges of convolutions' outputs.

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
    _recorders[token] = recorder
    try:
        call = call_of(put(observed))
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
