"""Lower bounds of integer tensors, derived from their operators."""

from __future__ import annotations

import math

import numpy as np

from pax_export.export.formats.tflite.builder.graph import Tensor

#: Operators that only move elements, or reduce several to one of them or their mean.
_KEEP = frozenset("RESHAPE TRANSPOSE BROADCAST_TO MEAN REDUCE_MAX REDUCE_MIN STRIDED_SLICE".split())
_NONNEGATIVE = frozenset("RELU RELU6 ABS EXP LOGISTIC SOFTMAX".split())
#: The length of the chain of operators that is looked at.
_DEPTH = 16


def at_least(x: Tensor, depth: int = _DEPTH) -> float:
    """No number of a tensor is smaller than this, NaN aside."""
    if x.value is not None:
        value = np.asarray(x.value)
        known = value.dtype.kind == "f" and value.size and not np.isnan(value).any()
        return float(value.min()) if known else -math.inf
    if x.operator is None or depth == 0 or x.dtype != np.float32:
        return -math.inf
    name, inputs = x.made_by, x.operator.inputs
    if name in _NONNEGATIVE:
        return 0.0

    def bound(place: int) -> float:
        return at_least(inputs[place], depth - 1)

    if name in _KEEP:
        return bound(0)
    if name == "SUM":
        return 0.0 if bound(0) >= 0 else -math.inf
    if name == "MUL" and inputs[0] is inputs[1]:
        return 0.0
    if name in ("MUL", "DIV"):
        return 0.0 if bound(0) >= 0 and bound(1) >= 0 else -math.inf
    if name == "ADD":
        return bound(0) + bound(1)
    if name == "SELECT_V2":
        return min(bound(1), bound(2))
    return -math.inf
