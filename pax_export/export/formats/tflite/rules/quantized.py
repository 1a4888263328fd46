"""Quantized weights: float constants with their integers."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pax_export import _quantized
from pax_export._quantized import Form, dequantized
from pax_export.export.formats.tflite.builder.activations import rounded
from pax_export.export.formats.tflite.builder.emit import emit
from pax_export.export.formats.tflite.builder.graph import Tensor, computed_once
from pax_export.export.formats.tflite.builder.integers import numbers, pairs
from pax_export.export.formats.tflite.rule import Operation, rule
from pax_export.export.formats.tflite.tensors import to_carrier
from pax_export.export.portable import NotInTargetError


@rule("dequantize", thin=True, stored=True)
def dequantize(op: Operation, *given: Tensor) -> Any:
    form = Form(**op.params)
    stored = [_as_stored(each) for each in given]
    if any(each.value is None for each in stored) or form.dtype == "float64":
        return None
    return computed_once(("dequantize", form), stored, partial(numbers, *stored, form=form))


def _as_stored(x: Tensor) -> Tensor:
    """Returns a weight in the leaf's dtype, before the cast to the carrier."""
    casts = x.value is None and x.made_by == "CAST"
    return x.operator.inputs[0] if casts else x


def _carried(*given: Tensor) -> list[Tensor]:
    """Returns stored weights as their carriers."""
    return [part for each in given for part in to_carrier(each, each.dtype.name)]


@rule("quantized_rows", thin=True, stored=True)
def quantized_rows(op: Operation, index: Tensor, *given: Tensor) -> Any:
    form, operands = Form(**op.params), list(op.operands)
    index, stored = op.full(_carried(index)[0], operands[0].shape), _as_stored(given[0])
    function, tables = _quantized.few_rows, _carried(*given)
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
        kept = zip((stored, *map(_as_stored, given[1:])), tables)
        tables = [
            x if x.dtype == wide.dtype else emit("CAST", [x], [(x.shape, wide.dtype)])[0]
            for x, wide in kept
        ]
    return op.call(partial(function, **op.params), operands, [index, *tables])


def _codes(stored: Tensor) -> Tensor:
    """Returns the bits of float8 numbers, for which LiteRT has row lookups."""

    def bits() -> list[Tensor]:
        made = Tensor(stored.shape, np.int8, None, np.asarray(stored.value).view(np.int8))
        made.name, made.sources = stored.name, stored.sources
        return [made]

    (table,) = computed_once(("codes",), [stored], bits)
    return emit("CAST", [table], [(table.shape, np.int32)])[0]


def _rows_of_codes(kind: Any, index: Any, codes: Any, scales: Any, **form: Any) -> Any:
    numbers = jnp.asarray(np.arange(256, dtype=np.uint8).view(kind).astype(np.float32))
    made = numbers[codes[index].astype(jnp.int32) & 255] * scales[index]
    return made.astype(form["dtype"])


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
    function = partial(_quantized.round_rows, axes=op.params["axes"])
    (made,) = op.call(function, op.operands, [x])
    made.by_row = True
    return made
