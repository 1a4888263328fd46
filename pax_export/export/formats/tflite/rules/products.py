"""Matrix products, also of quantized weights."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pax_export.export.formats.tflite.builder import layers, moves
from pax_export.export.formats.tflite.builder import operators as lite
from pax_export.export.formats.tflite.builder.fusions import rounded
from pax_export.export.formats.tflite.builder.graph import Tensor, computed_once, emit
from pax_export.export.formats.tflite.builder.integers import numbers, pairs
from pax_export.export.formats.tflite.rules.arithmetic import converted
from pax_export.export.formats.tflite.rules.layout import cut
from pax_export.export.formats.tflite.tensors import (
    CARRIERS,
    Operation,
    is_static,
    reshape,
    rule,
    to_carrier,
    wrapped,
)
from pax_export.export.portable import NotInTargetError
from pax_export.precision import quantized
from pax_export.precision.quantized import Form, dequantized

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


def _carried(op: Operation, index: int, x: Tensor, kind: str) -> Any:
    old = op.operands[index].dtype.name
    return converted(x, old, kind) if x.dtype != CARRIERS[kind] else x


class _Side:
    """One operand of a product, as rows or columns of the contracted axis."""

    def __init__(self, op: Operation, index: int, x: Tensor, batch: Any, summed: Any):
        shape = op.operands[index].shape
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
        if index == 0 and not (batch or self.columns) and len(summed) == 1 and 1 < len(free) < 4:
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


# --- Quantized weights: float constants with their integers --------------------------------------


@rule("dequantize", thin=True, stored=True)
def dequantize(op: Operation, *operands: Tensor) -> Any:
    form = Form(**op.params)
    stored = [_as_stored(each) for each in operands]
    if any(each.value is None for each in stored) or form.dtype == "float64":
        return None
    return computed_once(("dequantize", form), stored, partial(numbers, *stored, form=form))


def _as_stored(x: Tensor) -> Tensor:
    """Returns a weight in the leaf's dtype, before the cast to the carrier."""
    casts = x.value is None and x.made_by == "CAST"
    return x.operator.inputs[0] if casts else x


def _carried_constant(*tensors: Tensor) -> list[Tensor]:
    """Returns stored weights as their carriers."""
    return [part for each in tensors for part in to_carrier(each, each.dtype.name)]


@rule("quantized_rows", thin=True, stored=True)
def quantized_rows(op: Operation, index: Tensor, *arrays: Tensor) -> Any:
    form, operands = Form(**op.params), list(op.operands)
    index, stored = op.full(_carried_constant(index)[0], operands[0].shape), _as_stored(arrays[0])
    function, tables = quantized.few_rows, _carried_constant(*arrays)
    if form.scheme == "float":
        if stored.value is None:
            raise NotInTargetError("it does not compute with float8.")
        tables[0] = _codes(stored)
        operands[1] = jax.ShapeDtypeStruct(operands[1].shape, np.int8)
        function = partial(_rows_of_codes, stored.value.dtype)
    elif stored.value is not None:
        if form.bits == 4 and form.axis == -1:
            stored, function = pairs(stored), _rows_of_pairs
        # Rows are read from the product's table, so the file has the table of a tied head once.
        matched = zip((stored, *map(_as_stored, arrays[1:])), tables)
        tables = [
            x if x.dtype == wide.dtype else emit("CAST", [x], [(x.shape, wide.dtype)])[0]
            for x, wide in matched
        ]
    return op.call(partial(function, **op.params), operands, [index, *tables])


def _codes(stored: Tensor) -> Tensor:
    """Returns the bits of float8 numbers, for which LiteRT has row lookups."""

    def bits() -> list[Tensor]:
        result = Tensor.of(np.asarray(stored.value).view(np.int8), stored.name)
        result.sources = stored.sources
        return [result]

    (table,) = computed_once(("codes",), [stored], bits)
    return emit("CAST", [table], [(table.shape, np.int32)])[0]


def _rows_of_codes(kind: Any, index: Any, codes: Any, scales: Any, **form: Any) -> Any:
    numbers = jnp.asarray(np.arange(256, dtype=np.uint8).view(kind).astype(np.float32))
    rows = numbers[codes[index].astype(jnp.int32) & 255] * scales[index]
    return rows.astype(form["dtype"])


def _rows_of_pairs(index: Any, integers: Any, *scales: Any, **form: Any) -> Any:
    rows, four = integers[index], jnp.int8(4)
    low = jax.lax.shift_right_arithmetic(jax.lax.shift_left(rows, four), four)
    both = jnp.stack([low, jax.lax.shift_right_arithmetic(rows, four)], -1)
    whole = both.reshape(*rows.shape[:-1], 2 * rows.shape[-1])
    return dequantized(whole, *(s[index] for s in scales), form=Form(**{**form, "bits": 8}))


@rule("round_inputs", thin=True, stored=True)
def round_inputs(op: Operation, x: Tensor, scale: Tensor, zero: Tensor) -> Any:
    stored = [_as_stored(each).value for each in (scale, zero)]
    is_known = all(each is not None and each.size == 1 for each in stored)
    if not is_known or op.dtype != "float32":
        return None
    return rounded(op.full(x, op.operands[0].shape), *(each.item() for each in stored))


@rule("round_rows", thin=True)
def round_rows(op: Operation, x: Tensor) -> Any:
    x = op.full(x, op.operands[0].shape)
    function = partial(quantized.round_rows, axes=op.params["axes"])
    (result,) = op.call(function, op.operands, [x])
    result.by_row = True
    return result
