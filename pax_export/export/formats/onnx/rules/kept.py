"""Composites that ONNX has an operator for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pax_export.export.formats.onnx.graph import Writer
from pax_export.export.formats.onnx.registry import rule
from pax_export.export.formats.onnx.rules.reductions import reduced
from pax_export.export.formats.onnx.values import Value
from pax_export.export.portable import kept

Row = Callable[..., Any]
#: Gelu is an operator from here on.
_GELU = 20
#: The transform has its axis as an operand from here on.
_DFT = 20


@rule("composite")
def composite(writer: Writer, results: Sequence[Any], *operands: Value, **told: Any) -> Any:
    """A function kept whole; what it is made of, where there is no operator for it."""
    row = _ROWS.get(kept.name_of(told))
    if row is None or (row is gelu and writer.opset < _GELU):
        program = told.get("jaxpr", told.get("call_jaxpr"))
        return writer.inline(program, operands)
    return row(writer, *operands, **kept.attributes(told))


def clip(writer: Writer, x: Value, *, low: Any = None, high: Any = None) -> str:
    if low == 0 and high is None:
        return writer("Relu", x)
    ends = [None if end is None else writer.like(end, x) for end in (low, high)]
    while ends[-1] is None:
        ends.pop()
    return writer("Clip", x, *ends)


def silu(writer: Writer, x: Value) -> str:
    return writer("Mul", x, writer("Sigmoid", x))


def hard_sigmoid(writer: Writer, x: Value) -> str:
    return writer("HardSigmoid", x, alpha=1 / 6, beta=0.5)


def hard_swish(writer: Writer, x: Value) -> str:
    return writer("HardSwish", x)


def gelu(writer: Writer, x: Value, *, approximate: bool) -> str:
    return writer("Gelu", x, approximate="tanh" if approximate else "none")


def softmax(writer: Writer, x: Value, *, axis: int) -> str:
    return writer("Softmax", x, axis=axis)


def log_softmax(writer: Writer, x: Value, *, axis: int) -> str:
    return writer("LogSoftmax", x, axis=axis)


def mean(writer: Writer, x: Value, *, axes: Sequence[int], keepdims: bool) -> str:
    if x.rank > 3 and list(axes) == list(range(2, x.rank)):
        pooled = writer("GlobalAveragePool", x)
        return pooled if keepdims else writer.squeeze(pooled, axes)
    return reduced(writer, "ReduceMean", x, axes, keepdims)


def layer_norm(
    writer: Writer, x: Value, *vectors: Value, epsilon: float, scaled: bool, shifted: bool
) -> str:
    scale: Any = vectors[0] if scaled else np.ones(int(x.shape[-1]), x.carrier)
    shift = [vectors[-1]] if shifted else []
    return writer("LayerNormalization", x, scale, *shift, axis=-1, epsilon=epsilon)


def lstm(writer: Writer, x: Value, *given: Value, reverse: bool) -> list[Any]:
    return _recurrent(writer, "LSTM", x, *given, reverse=reverse)


def gru(writer: Writer, x: Value, *given: Value, reverse: bool, reset_after: bool) -> list[Any]:
    return _recurrent(
        writer, "GRU", x, *given, reverse=reverse, linear_before_reset=int(reset_after)
    )


def rnn(writer: Writer, x: Value, *given: Value, reverse: bool, activation: str) -> list[Any]:
    return _recurrent(
        writer, "RNN", x, *given, reverse=reverse, activations=[activation.capitalize()]
    )


def dft(writer: Writer, x: Value) -> str:
    if writer.opset >= _DFT:
        return writer("DFT", x, None, np.array(x.rank - 2, np.int64))
    return writer("DFT", x, axis=x.rank - 2)


def _recurrent(
    writer: Writer,
    name: str,
    x: Value,
    w: Value,
    r: Value,
    b: Value,
    *states: Value,
    reverse: bool,
    **told: Any,
) -> list[Any]:
    """An operator whose results have an axis of directions, of size 1."""
    starts = [writer.unsqueeze(each, [0]) for each in states]
    told |= {"hidden_size": int(states[0].shape[-1])} | (
        {"direction": "reverse"} if reverse else {}
    )
    outputs, *last = writer(name, x, w, r, b, None, *starts, results=1 + len(states), **told)
    return [writer.squeeze(outputs, [1]), *(writer.squeeze(each, [0]) for each in last)]


_ROWS: dict[str, Row] = {
    each.__name__: each
    for each in (clip, silu, hard_sigmoid, hard_swish, gelu, softmax, log_softmax, mean, layer_norm)
} | {each.__name__: each for each in (lstm, gru, rnn, dft)}
