"""Reductions and argmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pax_export.export.formats.tflite.builder import operators as lite
from pax_export.export.formats.tflite.builder.graph import Tensor
from pax_export.export.formats.tflite.rule import Operation, rule
from pax_export.export.formats.tflite.rules.arithmetic import is_float, like
from pax_export.export.formats.tflite.rules.comparison import ordered
from pax_export.export.formats.tflite.tensors import wrapped
from pax_export.export.portable.decompositions.reductions import of_truth_values


@rule("reduce_sum")
def reduce_sum(op: Operation, x: Tensor, **_: object) -> Any:
    axes = [int(axis) for axis in op.params["axes"]]
    return wrapped(lite.reduce_sum(x, axes), op.dtype) if axes else x


@rule("reduce_prod")
def reduce_prod(op: Operation, x: Tensor) -> Any:
    axes = [int(axis) for axis in op.params["axes"]]
    return wrapped(lite.reduce_prod(x, axes), op.dtype) if axes else x


@rule("reduce_max")
def reduce_max(op: Operation, x: Tensor) -> Any:
    return _largest(op, x, lite.reduce_max, lite.reduce_any)


@rule("reduce_min")
def reduce_min(op: Operation, x: Tensor) -> Any:
    return _largest(op, x, lite.reduce_min, lite.reduce_all)


def _largest(op: Operation, x: Tensor, function: Callable, of_truth: Callable) -> Any:
    axes = [int(axis) for axis in op.params["axes"]]
    if not axes:
        return x
    if op.dtype == "bool":
        return of_truth(x, axes)
    found = function(x, axes)
    if not is_float(op):
        return found
    # In TFLite it is undefined which NaN is found.
    return lite.where(lite.reduce_any(lite.not_equal(x, x), axes), like(x, np.nan), found)


@rule("reduce_or", when=of_truth_values)
def reduce_or(op: Operation, x: Tensor) -> Any:
    return _of_truth(op, x, lite.reduce_any)


@rule("reduce_and", when=of_truth_values)
def reduce_and(op: Operation, x: Tensor) -> Any:
    return _of_truth(op, x, lite.reduce_all)


def _of_truth(op: Operation, x: Tensor, function: Callable) -> Any:
    axes = [int(axis) for axis in op.params["axes"]]
    return function(x, axes) if axes else x


@rule("argmax")
def argmax(op: Operation, x: Any) -> Any:
    return _place(op, ordered(x, op.dtype))


@rule("argmin")
def argmin(op: Operation, x: Tensor) -> Any:
    keys = lite.subtract(-1, ordered(x, op.dtype))
    if is_float(op):  # NaN is found first here, too
        keys = lite.where(lite.not_equal(x, x), like(keys, 2**31 - 1), keys)
    return _place(op, keys)


def _place(op: Operation, keys: Any) -> Any:
    (axis,) = op.params["axes"]
    found = lite.argmax(keys, int(axis))
    return (
        lite.cast(found, lite.int64)
        if np.dtype(op.params["index_dtype"]).name == "int64"
        else found
    )


@rule("cumsum")
def cumsum(op: Operation, x: Any) -> Any:
    axis, reverse = op.params["axis"], op.params["reverse"]
    return wrapped(lite.cumsum(x, axis, reverse=reverse), op.dtype)
