"""Appends an operator to the graph, or evaluates it if its inputs are constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pax_export._types import DTypeLike
from pax_export.export.formats.tflite.builder.graph import (
    Tensor,
    computed_once,
    constant_tensor,
    current,
)

float32, int32, int64, bool_ = map(np.dtype, ("float32", "int32", "int64", "bool"))
#: Operators that only move the elements of their first input.
_MOVES = frozenset({"TRANSPOSE", "RESHAPE", "REVERSE_V2", "STRIDED_SLICE", "SLICE", "SQUEEZE"})
#: Constants larger than this, and than their inputs, are computed when the file runs.
_LARGEST_FOLDED = 1 << 22


def constant(value: object, dtype: DTypeLike | None = None) -> Tensor:
    array = np.asarray(value) if dtype is None else np.asarray(value).astype(np.dtype(dtype))
    if dtype is None and not hasattr(value, "dtype"):
        narrow = {"float64": "float32", "int64": "int32"}
        array = array.astype(narrow.get(array.dtype.name, array.dtype))
    return constant_tensor(array)


def tensor(value: object, dtype: DTypeLike | None = None) -> Tensor:
    """A tensor, or the constant of a number or an array."""
    return value if isinstance(value, Tensor) else constant(value, dtype)


def emit(
    name: str,
    inputs: Sequence[Any],
    results: Sequence[tuple[Sequence[Any], Any]],
    fold: Callable[..., Any] | None = None,
    **options: object,
) -> list[Tensor]:
    """The results of an operator, or of `fold` where all inputs are constants."""
    given = [each for each in inputs if each is not None]
    if fold is not None and all(each.value is not None for each in given):
        grown = _LARGEST_FOLDED
        if name == "CAST" and given[0].sources and len(given[0].shape) > 1:
            # A file stores weights of integers unchanged.
            grown = 0 if given[0].dtype.name in ("int8", "uint8") else grown
        limit = max(grown, *(each.value.nbytes for each in given), 0)
        if all(_bytes(shape, dtype) <= limit for shape, dtype in results):
            return computed_once(
                (name, *options.items(), *((tuple(s), np.dtype(d)) for s, d in results)),
                given,
                lambda: _folded(name, fold, given, results),
            )
    return current().append(name, inputs, results, options)


def _folded(
    name: str, fold: Callable[..., Any], given: Sequence[Tensor], results: Any
) -> list[Tensor]:
    first, sources = given[0], frozenset().union(*(each.sources for each in given))
    if name in _MOVES and first.twin is not None and first.twin is first.value:
        others = [each.value for each in given[1:]]
        value = first.twin.moved(lambda x: fold(x, *others), tuple(results[0][0]))
        made = Tensor(value.shape, value.dtype, None, value)
        made.twin, made.sources = value, sources
        return [made]
    with np.errstate(all="ignore"):
        found = fold(*(np.asarray(each.value) for each in given))
    found = found if isinstance(found, list) else [found]
    pairs = zip(found, results)
    made = [np.asarray(value).astype(dtype, copy=False) for value, (_, dtype) in pairs]
    if not sources:
        return [constant_tensor(each) for each in made]
    tensors = [Tensor(each.shape, each.dtype, None, each) for each in made]
    for each in tensors:
        each.sources = sources
        each.is_computed = name not in (*_MOVES, "CAST") or any(x.is_computed for x in given)
    return tensors


def _bytes(shape: Sequence[Any], dtype: DTypeLike) -> float:
    if None in shape:
        return float("inf")
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize


def alike(*values: object) -> list[Tensor]:
    """Returns tensors of one dtype; numbers take that of the tensors."""
    found = next((each.dtype for each in values if isinstance(each, Tensor)), None)
    return [tensor(each, found) for each in values]
