"""Matrix and tensor products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pax_export.export.formats.onnx.graph import GraphBuilder, rule
from pax_export.export.formats.onnx.values import Value, carrier


@rule("dot_general")
def dot_general(
    builder: GraphBuilder, x: Value, y: Value, *, dimension_numbers: Any, **_: object
) -> Any:
    (result,) = builder.results
    kind = carrier(result.dtype)
    if kind == np.bool_:  # whether any pair is true in both
        count = product(builder, x, y, dimension_numbers, result.shape, np.dtype(np.float32))
        return builder.cast(count, kind)
    return product(builder, x, y, dimension_numbers, result.shape, kind)


def product(
    builder: GraphBuilder, x: Value, y: Value, dimension_numbers: Any, shape: Sequence, kind: Any
) -> Any:
    """The name of the product in numbers of a kind, which carries them."""
    (x_sum, y_sum), (x_batch, y_batch) = dimension_numbers
    x_free = [axis for axis in range(x.rank) if axis not in (*x_sum, *x_batch)]
    y_free = [axis for axis in range(y.rank) if axis not in (*y_sum, *y_batch)]
    left_order, right_order = [*x_batch, *x_free, *x_sum], [*y_batch, *y_sum, *y_free]
    if x_batch and len(x_free) == len(y_free) == len(x_sum) == 1:
        turns = _turns([*y_batch, *y_free, *y_sum], [*x_batch, *x_sum, *x_free])
        if turns < _turns(left_order, right_order):
            numbers = (y_sum, x_sum), (y_batch, x_batch)
            made = product(builder, y, x, numbers, shape, kind)
            return builder.transpose(made, [*range(len(x_batch)), len(shape) - 1, len(shape) - 2])
    left = builder.transpose(builder.cast(x, kind), left_order)
    right = builder.transpose(builder.cast(y, kind), right_order)
    batch = [x.shape[axis] for axis in x_batch]
    rows = [x.shape[axis] for axis in x_free]
    columns = [y.shape[axis] for axis in y_free]
    inner = [x.shape[axis] for axis in x_sum]
    # Without a batch, row axes need no reshape.
    flat = len(rows) == 1 or (bool(rows) and not batch)
    if len(inner) != 1 or not flat:
        lines = rows if flat else [math.prod(rows)]
        left = builder.reshape(left, [*batch, *lines, math.prod(inner)])
    if len(inner) != 1 or len(columns) != 1:
        right = builder.reshape(right, [*batch, math.prod(inner), math.prod(columns)])
    made = builder("MatMul", left, right)
    return made if flat and len(columns) == 1 else builder.reshape(made, shape)


def _turns(*orders: list[int]) -> int:
    """Returns the number of operands to transpose."""
    return sum(order != sorted(order) for order in orders)
