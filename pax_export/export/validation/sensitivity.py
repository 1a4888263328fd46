"""Sensitivity of results to rounding.

At a kink (of a leaky relu, a maximum, a clip) a gradient jumps, and at a step (of `argmax`, a
comparison, `round`) a result does, when an input moves by its last bit.  An export rounds in
other places than jax, and so may be on the other side.  Whether it may is what jax says itself:
its results are computed again with operands that are moved as little, and as far as they go
apart, the export may.

Between float32 operands and results a model may round to bfloat16; XLA leaves such a rounding out
where it can (it calls that excess precision), and other runtimes do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from pax_export._jaxpr import jaxpr_dtypes
from pax_export._types import DTypeLike, PyTree, TracedProgram
from pax_export.export.tracing import dtypes
from pax_export.export.validation.serve import Arrays
from pax_export.export.validation.validate import TOLERANCE

#: How large the noise is, in units of the last bit: as of one operation, and of many in a row.
_SIZES = (4, 32, 256)
#: How often each is tried, and how much more than what jax's results move is allowed.
_TRIES, _ALLOWED = 3, 4.0
#: Noise is at most this part of what results may differ by anyway.
_PART = 0.15
_FLOAT32 = float(np.finfo(np.float32).eps)

Run = Callable[[Sequence[Any]], Mapping[str, Any]]


def tolerances(
    run: Run, operands: Sequence[Any], exact: Arrays, program: TracedProgram
) -> Iterator[dict[str, Any]]:
    """What each result may differ by: first under a little noise, and then under more.

    A number for results with a fraction; for others an array that says which elements may.
    ``program`` is what computes them, as a jaxpr.
    """
    allowed: dict[str, Any] = {}
    noises: list[Callable[[Any], float]] = [partial(_noise, size) for size in _SIZES]
    if (bit := _coarsest(program)) > _FLOAT32:
        noises.append(lambda dtype: max(_noise(_SIZES[-1], dtype), bit / 2))
    for noise in noises:
        for seed in range(_TRIES):
            random = np.random.default_rng(seed)
            moved = run([_moved(value, noise, random) for value in operands])
            for name, value in moved.items():
                if name in exact:
                    allowed[name] = _more(allowed.get(name), exact[name], np.asarray(value))
        yield allowed


def _coarsest(program: TracedProgram) -> float:
    """The last bit of one in the dtype that has the fewest of those that a program rounds to."""
    floats = (dtype for dtype in jaxpr_dtypes(program) if dtypes.is_floating(dtype))
    return max((float(jax.numpy.finfo(dtype).eps) for dtype in floats), default=0.0)


def _noise(size: int, dtype: DTypeLike) -> float:
    """How far numbers of a dtype are moved, relative to themselves."""
    bit = float(jax.numpy.finfo(dtype).eps)
    return max(_SIZES[0] * bit, min(size * bit, _PART * TOLERANCE.get(np.dtype(dtype).name, 0.0)))


def _moved(value: PyTree, noise: Callable[[Any], float], random: np.random.Generator) -> Any:
    if not jax.numpy.issubdtype(value.dtype, jax.numpy.inexact):
        return value
    factors = 1 + noise(value.dtype) * random.normal(size=value.shape)
    return (np.asarray(value) * factors).astype(value.dtype)


def _more(before: PyTree, exact: np.ndarray, moved: np.ndarray) -> Any:
    """The tolerance of a result, given one more that jax computed."""
    if exact.dtype.name not in TOLERANCE:
        differs = np.asarray(exact != moved)
        return differs if before is None else before | differs
    with np.errstate(invalid="ignore"):
        apart = np.abs(_wide(exact) - _wide(moved))
    largest = float(np.max(apart, initial=0.0, where=np.isfinite(apart)))
    return max(before or 0.0, _ALLOWED * largest)


def _wide(values: np.ndarray) -> np.ndarray:
    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)
