"""Quantized weights: constants of numbers that know their integers."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pax_export import _quantized
from pax_export._quantized import Form, dequantized, plain_dot
from pax_export.export.formats.tflite.builder.activations import rounded
from pax_export.export.formats.tflite.builder.graph import Tensor, computed_once
from pax_export.export.formats.tflite.builder.integers import numbers
from pax_export.export.formats.tflite.rule import Operation, rule


@rule("dequantize", thin=True)
def dequantize(op: Operation, integers: Tensor, scales: Tensor) -> Any:
    form = Form(**op.params)
    stored = [_as_stored(each) for each in (integers, scales)]
    if any(each.value is None for each in stored) or form.dtype == "float64":
        function = partial(dequantized, form=form)
        return op.call(function, op.operands, [integers, scales])
    return computed_once(("dequantize", form), stored, partial(numbers, *stored, form))


def _as_stored(x: Tensor) -> Tensor:
    """A weight as the leaf is, from before it was cast to what is computed with."""
    casts = x.value is None and x.made_by == "CAST"
    return x.operator.inputs[0] if casts else x


@rule("quantized_dot", thin=True)
def quantized_dot(op: Operation, x: Tensor, integers: Tensor, scales: Tensor) -> Any:
    told = dict(op.params)
    contracted, form = told.pop("contracted"), Form(**told)
    of_weight = jax.ShapeDtypeStruct(_shape(op.operands[1].shape, form), jnp.dtype(form.dtype))
    inner = Operation("dequantize", told, op.operands[1:], [of_weight], op.sizes, op.run, op.call)
    (weight,) = dequantize(inner, integers, scales)
    product = partial(plain_dot, contracted=contracted)
    return op.call(product, [op.operands[0], of_weight], [op.full(x, op.operands[0].shape), weight])


@rule("round_inputs", thin=True)
def round_inputs(op: Operation, x: Tensor, scale: Tensor, zero: Tensor) -> Any:
    stored = [_as_stored(each).value for each in (scale, zero)]
    is_known = all(each is not None and each.size == 1 for each in stored)
    if not is_known or x.dtype != np.float32:
        return op.call(_quantized.round_inputs, op.operands, [x, scale, zero])
    return rounded(op.full(x, op.operands[0].shape), *(each.item() for each in stored))


@rule("round_rows", thin=True)
def round_rows(op: Operation, x: Tensor) -> Any:
    x = op.full(x, op.operands[0].shape)
    function = partial(_quantized.round_rows, axes=op.params["axes"])
    (made,) = op.call(function, op.operands, [x])
    made.by_row = True
    return made


def _shape(sizes: Any, form: Form) -> tuple[int, ...]:
    place = len(sizes) + form.axis
    twice = 2 if form.bits == 4 else 1
    return tuple(size * twice if axis == place else size for axis, size in enumerate(sizes))
