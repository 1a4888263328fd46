"""Matrix and tensor products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.lax import DotDimensionNumbers

from pax_export._foundations.types import DTypeLike
from pax_export.export.formats.saved_model.operations.graph import NodeBuilder, Output, rule


@rule("dot_general")
def dot_general(
    builder: NodeBuilder,
    x: Output,
    y: Output,
    *,
    dimension_numbers: DotDimensionNumbers,
    **_: object,
) -> Output:
    (result,) = builder.results
    kind = _carrier(result.dtype)
    x, y = builder.cast(x, kind), builder.cast(y, kind)
    product = _product(builder, x, y, dimension_numbers, result.shape)
    if result.dtype == np.bool_:  # whether any pair is true in both
        return builder("NotEqual", product, np.array(0, kind))
    return builder.cast(product, result.dtype)


def _carrier(dtype: DTypeLike) -> np.dtype:
    """The dtype in which numbers are multiplied: half precision and small integers in 32 bits."""
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        return np.dtype(np.int64 if dtype.itemsize == 8 else np.int32)
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def _product(
    builder: NodeBuilder,
    x: Output,
    y: Output,
    dimension_numbers: DotDimensionNumbers,
    shape: Sequence[Any],
) -> Output:
    (x_sum, y_sum), (x_batch, y_batch) = dimension_numbers
    x_free = [axis for axis in range(x.rank) if axis not in (*x_sum, *x_batch)]
    y_free = [axis for axis in range(y.rank) if axis not in (*y_sum, *y_batch)]
    left, x_turned = _matrix(builder, x, x_batch, x_free, x_sum)
    right, y_turned = _matrix(builder, y, y_batch, y_sum, y_free)
    if not x_batch:
        product = builder("MatMul", left, right, transpose_a=x_turned, transpose_b=y_turned)
    else:
        product = builder("BatchMatMulV2", left, right, adj_x=x_turned, adj_y=y_turned)
    rows, columns = ([of.shape[axis] for axis in free] for of, free in ((x, x_free), (y, y_free)))
    batch = [x.shape[axis] for axis in x_batch]
    product = builder.shaped(product, [*batch, math.prod(rows), math.prod(columns)])
    return builder.reshape(product, shape)


def _matrix(
    builder: NodeBuilder, x: Output, batch: Sequence[int], rows: Sequence[int], columns: Sequence
) -> tuple[Output, bool]:
    """An operand as matrices, and whether they are transposed, which needs no copy."""
    order = [*batch, *rows, *columns]
    turned = [*batch, *columns, *rows]
    is_turned = order != sorted(order) and turned == sorted(turned)
    moved = builder.transpose(x, turned if is_turned else order)
    groups = (columns, rows) if is_turned else (rows, columns)
    sizes = [math.prod(x.shape[axis] for axis in group) for group in groups]
    return builder.reshape(moved, [*(x.shape[axis] for axis in batch), *sizes]), is_turned
