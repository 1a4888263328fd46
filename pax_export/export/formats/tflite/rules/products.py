"""Matrix products."""

from __future__ import annotations

import math
from typing import Any

from pax_export.export.formats.tflite.builder import layers, moves
from pax_export.export.formats.tflite.builder import operators as lite
from pax_export.export.formats.tflite.builder.graph import Tensor
from pax_export.export.formats.tflite.rule import Operation, rule
from pax_export.export.formats.tflite.rules.arithmetic import converted
from pax_export.export.formats.tflite.rules.layout import cut
from pax_export.export.formats.tflite.tensors import CARRIERS, is_static, reshape, wrapped

#: The number of products of int8 that float32 adds up without rounding.
_EXACT = 1024


@rule("dot_general")
def dot_general(op: Operation, x: Tensor, y: Tensor) -> Any:
    (x_sum, y_sum), (x_batch, y_batch) = op.params["dimension_numbers"]
    result_kind = op.results[0].dtype.name
    if result_kind == "bool":  # TFLite neither multiplies nor adds truth values: count them
        result_kind = "int32"
    carrier = CARRIERS[result_kind]
    one = _Side(op, 0, _carried(op, 0, x, result_kind), x_batch, x_sum)
    other = _Side(op, 1, _carried(op, 1, y, result_kind), y_batch, y_sum)
    small = {op.operands[0].dtype.name, op.operands[1].dtype.name} <= {"int8", "uint8", "bool"}

    def multiplied(left: _Side, right: _Side) -> Any:
        if carrier != "float32":
            return _whole_numbers(left, right, small)
        second = right.flat().tensor
        return layers.matmul(left.tensor, second, left.columns, transpose_b=not right.columns)

    if not x_batch and one.is_static and not other.is_static:
        # TFLite expects a constant matrix as second operand.
        turned = reshape(multiplied(other, one), [*other.outer, *one.outer], op.sizes)
        count = len(other.outer)
        rank = count + len(one.outer)
        found = moves.transpose(turned, [*range(count, rank), *range(count)])
    else:
        result = [*one.batch, *one.outer, *other.outer]
        found = reshape(multiplied(one, other), result, op.sizes)
    return converted(wrapped(found, result_kind), result_kind, op.results[0].dtype.name)


def _carried(op: Operation, place: int, x: Tensor, kind: str) -> Any:
    old = op.operands[place].dtype.name
    return converted(x, old, kind) if x.dtype != CARRIERS[kind] else x


class _Side:
    """One operand of a product, as rows or columns of the contracted axis."""

    def __init__(self, op: Operation, place: int, x: Any, batch: Any, summed: Any):
        shape = op.operands[place].shape
        free = [axis for axis in range(len(shape)) if axis not in (*batch, *summed)]
        self.batch = [shape[axis] for axis in batch]
        self.outer = [shape[axis] for axis in free]
        self.inner = [shape[axis] for axis in summed]
        self.is_static = all(map(is_static, shape))
        self.columns = [*batch, *summed, *free] == list(range(len(shape))) and bool(free)
        order = [*batch, *summed, *free] if self.columns else [*batch, *free, *summed]
        rows, count = math.prod(self.outer), math.prod(self.inner)
        ends = [count, rows] if self.columns else [rows, count]
        few = [math.prod(self.batch)] if len(batch) > 2 else self.batch
        if place == 0 and not (batch or self.columns) and len(summed) == 1 and 1 < len(free) < 4:
            few, ends = [], [*self.outer, count]  # TFLite keeps the other axes of a usual layer
        self._sizes, self._several = op.sizes, len(ends) > 2
        self.tensor = reshape(moves.transpose(x, order), [*few, *ends], op.sizes)

    def as_rows(self) -> Any:
        rank = self.tensor.shape.rank
        swapped = [*range(rank - 2), rank - 1, rank - 2]
        return moves.transpose(self.tensor, swapped) if self.columns else self.tensor

    def flat(self) -> _Side:
        """Returns the operand with its outer axes merged into a batch or a second side."""
        if self._several:
            shape = [math.prod(self.outer), math.prod(self.inner)]
            self.tensor, self._several = reshape(self.tensor, shape, self._sizes), False
        return self


def _whole_numbers(x: _Side, y: _Side, small: bool) -> Any:
    """Multiplies integer matrices in float32 where exact, because TFLite has no such kernel."""
    left, right = x.flat().as_rows(), y.flat().as_rows()
    inner = math.prod(x.inner)
    if small and is_static(inner):
        total = None
        for start in range(0, max(int(inner), 1), _EXACT):
            parts = (cut(x, x.shape.rank - 1, start, start + _EXACT, 1) for x in (left, right))
            one, other = (lite.cast(each, lite.float32) for each in parts)
            part = lite.cast(layers.matmul(one, other, transpose_b=True), left.dtype)
            total = part if total is None else total + part
        return total
    rank = left.shape.rank
    left, right = moves.expand_dims(left, rank - 1), moves.expand_dims(right, rank - 2)
    return lite.reduce_sum(left * right, -1)
