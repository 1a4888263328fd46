"""Compares the outputs of two nets on the same batches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pax_export._foundations.errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export._foundations.types import PyTree
from pax_export.core import Module
from pax_export.precision.quantized import apart
from pax_export.quantization._report import Difference

_WHERE = "quantize(batches=...)"
_WRITE = "a list of what the net is called with: an array for each batch, or a tuple of them"
#: The number of timed calls, of which the fastest counts.
_CALLS = 5


def checked(batches: object) -> list[tuple[Any, ...]]:
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
                where="compare_runtime: after",
                got=f"{other}, where the net has {one}",
                write="the loaded export of the same net",
            )
    return Difference(*apart(pairs), (_seconds(before, batches[0]), _seconds(after, batches[0])))


def compare_runtime(
    net: Any, before: Callable[..., Any], after: Callable[..., Any], batches: Sequence[Any]
) -> Difference:
    """Compares the export of a quantized net with the net, and its latency with the float export.

    Args:
        net: the quantized net.
        before: the loaded export of the float net.
        after: the loaded export of the quantized net.
        batches: the arguments of each call.

    Raises:
        InvalidArgumentError: batches that are empty, or that the net cannot be called with.
    """
    calls = checked(batches)
    if not callable(before) or not callable(after):
        raise InvalidArgumentTypeError(
            "The runtime is compared by calls of loaded exports.",
            where="compare_runtime: before and after",
            got=f"{before!r:.80} and {after!r:.80}",
            write="pax.export.load(path) for each",
        )
    found = compared(call_of(net), after, calls)
    return replace(found, seconds=(_seconds(before, calls[0]), found.seconds[1]))


def call_of(net: Any) -> partial[Any]:
    """Returns a compiled call of a net, with its arrays as first argument."""
    if isinstance(net, Module):
        return partial(jax.jit(lambda net, *batch: net(*batch)), net.eval())
    if not isinstance(net, tuple) or len(net) != 2 or not callable(net[1]):
        raise InvalidArgumentTypeError(
            "A quantized net is a module, or parameters and a function.",
            where="compare_runtime: net",
            got=f"{type(net).__name__}: {net!r:.80}",
            write="the net that quantize returned",
        )
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
