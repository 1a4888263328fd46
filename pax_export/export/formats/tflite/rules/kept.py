"""Composites that TFLite has an operator for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pax_export.export.formats.tflite.builder import moves
from pax_export.export.formats.tflite.builder import operators as lite
from pax_export.export.formats.tflite.builder.graph import Tensor
from pax_export.export.formats.tflite.rule import Operation, rule
from pax_export.export.formats.tflite.rules import indexing
from pax_export.export.portable import kept


@rule("composite", thin=True)
def composite(op: Operation, *operands: object) -> Any:
    """Writes a composite as its operator, or else as its definition."""
    name = kept.name_of(op.params)
    if name in kept.NORMAL_FORMS:
        whole = (op.full(x, struct.shape) for x, struct in zip(operands, op.operands))
        return getattr(indexing, name)(op, *whole, **kept.attributes(op.params))
    row = _ROWS.get(name)
    if row is None or op.dtype != "float32":
        program = op.params.get("jaxpr", op.params.get("call_jaxpr"))
        return op.run(program, list(operands))
    (x,) = operands
    return row(op.full(x, op.operands[0].shape), **kept.attributes(op.params))


def softmax(x: Tensor, *, axis: int) -> Any:
    rank = len(x.shape)
    last = [*(each for each in range(rank) if each != axis), axis]
    found = lite.softmax(moves.transpose(x, last))
    return moves.transpose(found, [last.index(each) for each in range(rank)])


def mean(x: Tensor, *, axes: tuple[int, ...], keepdims: bool) -> Any:
    return lite.reduce_mean(x, list(axes), keepdims)


_ROWS: dict[str, Callable[..., Any]] = {
    "gelu": lite.gelu,
    "hard_swish": lite.hard_swish,
    "mean": mean,
    "softmax": softmax,
}
