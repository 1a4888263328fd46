"""Products of matrices, in all their forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pax_export.export.formats.tflite.rule import NotInTfliteError, Operation, rule
from pax_export.export.formats.tflite.rules.arithmetic import converted
from pax_export.export.formats.tflite.tensors import (
    CARRIERS,
    is_static,
    reshape,
    tf,
    transpose,
    wrapped,
)

#: So many products of int8 a float32 can add up without rounding.
_EXACT = 1024


@rule("dot_general", parts=False)
def dot_general(op: Operation, x: Any, y: Any) -> Any:
    x_struct, y_struct = op.operands[:2]
    (x_sum, y_sum), (x_batch, y_batch) = op.params["dimension_numbers"]
    result_kind = op.results[0].dtype.name
    carrier = CARRIERS[result_kind]
    x = converted(x, x_struct.dtype.name, result_kind) if x.dtype != carrier else x
    y = converted(y, y_struct.dtype.name, result_kind) if y.dtype != carrier else y
    x_free = [a for a in range(len(x_struct.shape)) if a not in (*x_sum, *x_batch)]
    y_free = [a for a in range(len(y_struct.shape)) if a not in (*y_sum, *y_batch)]
    sizes = [x_struct.shape[a] for a in x_batch]
    result = [*sizes, *(x_struct.shape[a] for a in x_free), *(y_struct.shape[a] for a in y_free)]
    inner = product([x_struct.shape[a] for a in x_sum])
    left = [*sizes, product([x_struct.shape[a] for a in x_free]), inner]
    right = [*sizes, inner, product([y_struct.shape[a] for a in y_free])]
    if (
        not x_batch
        and list(y_sum) == [0]
        and len(x_sum) == 1
        and x_sum[0] == len(x_struct.shape) - 1
    ):
        # Rows by a matrix, the usual layer: TFLite keeps the other axes.
        left = list(x_struct.shape) if len(x_struct.shape) in (2, 3, 4) else left
    x = reshape(transpose(x, [*x_batch, *x_free, *x_sum]), _few(left), op.sizes)
    y = reshape(
        transpose(y, [*y_batch, *y_free, *y_sum]), _few([*sizes, right[-1], inner]), op.sizes
    )
    if carrier == "float32":
        found = _matmul(x, y)
    else:
        small = {x_struct.dtype.name, y_struct.dtype.name} <= {"int8", "uint8", "bool"}
        found = _whole_numbers(x, y, inner, small)
    return wrapped(reshape(found, result, op.sizes), result_kind)


def product(shape: Sequence[Any]) -> Any:
    result: Any = 1
    for size in shape:
        result = result * size
    return result


def _few(shape: Sequence[Any]) -> list[Any]:
    """All axes of the batch as one: kernels take few."""
    if len(shape) <= 4:
        return list(shape)
    return [product(shape[:-2]), *shape[-2:]]


def _matmul(x: Any, y: Any) -> Any:
    """Rows of x by rows of y."""
    return tf.matmul(x, y, transpose_b=True)


def _whole_numbers(x: Any, y: Any, inner: Any, small: bool) -> Any:
    """TFLite multiplies no matrices of integers, so float32 does where it is exact."""
    if small and is_static(inner):
        total = None
        for start in range(0, max(int(inner), 1), _EXACT):
            pieces = [tf.cast(each[..., start : start + _EXACT], tf.float32) for each in (x, y)]
            part = tf.cast(_matmul(*pieces), x.dtype)
            total = part if total is None else total + part
        return total
    return tf.reduce_sum(x[..., :, None, :] * y[..., None, :, :], -1)


@rule("ragged_dot_general")
def ragged_dot(op: Operation, x: Any, y: Any, counts: Any) -> Any:
    """Rows in groups, each group by a matrix of its own: all products, of which one is taken."""
    if len(op.operands[0].shape) != 2 or len(op.operands[1].shape) != 3:
        raise NotInTfliteError("groups of rows only, without a batch.")
    rows = op.operands[0].shape[0]
    ends = tf.cumsum(counts)
    every = tf.matmul(tf.expand_dims(x, 0), y)  # group, row, column
    numbers = tf.reshape(tf.range(op.sizes.of(rows)), [1, -1, 1])
    first = tf.reshape(ends - counts, [-1, 1, 1])
    last = tf.reshape(ends, [-1, 1, 1])
    mine = tf.logical_and(tf.greater_equal(numbers, first), tf.less(numbers, last))
    return tf.reduce_sum(tf.where(mine, every, tf.zeros_like(every)), 0)
