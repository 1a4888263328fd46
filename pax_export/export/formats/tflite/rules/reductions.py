"""Reductions and argmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pax_export.export.formats.tflite.builder import operators as lite
from pax_export.export.formats.tflite.builder.graph import Tensor
from pax_export.export.formats.tflite.rule import Operation, rule
from pax_export.export.formats.tflite.rules.arithmetic import is_float
from pax_export.export.formats.tflite.tensors import wrapped
from pax_export.export.portable.decompositions.reductions import of_truth_values


def _reduction(function: Callable) -> Callable:
    def apply(op: Operation, x: Tensor) -> Any:
        axes = [int(axis) for axis in op.params["axes"]]
        return wrapped(function(x, axes), op.dtype) if axes else x

    return apply


rule("reduce_sum")(_reduction(lite.reduce_sum))
rule("reduce_prod")(_reduction(lite.reduce_prod))
rule("reduce_or", when=of_truth_values)(_reduction(lite.reduce_any))
rule("reduce_and", when=of_truth_values)(_reduction(lite.reduce_all))


@rule("argmax", "argmin")
def place_of_extreme(op: Operation, x: Tensor) -> Any:
    (axis,) = map(int, op.params["axes"])
    found = (lite.argmax if op.name == "argmax" else lite.argmin)(x, axis)
    if is_float(op):  # the first NaN counts as the extreme
        bad = lite.not_equal(x, x)
        first = lite.argmax(lite.cast(bad, lite.int32), axis)
        found = lite.where(lite.reduce_any(bad, [axis]), first, found)
    return lite.cast(found, np.dtype(op.params["index_dtype"]))


rule("cumsum")(
    lambda op, x: wrapped(lite.cumsum(x, op.params["axis"], op.params["reverse"]), op.dtype)
)
