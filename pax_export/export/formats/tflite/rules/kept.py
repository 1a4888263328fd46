"""Composites that TFLite has an operator for."""

from __future__ import annotations

from typing import Any

from pax_export.export.formats.tflite.builder import moves
from pax_export.export.formats.tflite.builder import operators as lite
from pax_export.export.formats.tflite.builder.graph import Tensor
from pax_export.export.formats.tflite.rule import Operation, rule

rule("gelu")(lambda op, x, *, approximate: lite.gelu(x, approximate=approximate))
rule("mean")(lambda op, x, *, axes, keepdims: lite.reduce_mean(x, list(axes), keepdims))
rule("hard_swish")(lambda op, x: lite.hard_swish(x))


@rule("softmax")
def softmax(op: Operation, x: Tensor, *, axis: int) -> Any:
    rank = len(x.shape)
    last = [*(each for each in range(rank) if each != axis), axis]
    found = lite.softmax(moves.transpose(x, last))
    return moves.transpose(found, [last.index(each) for each in range(rank)])
