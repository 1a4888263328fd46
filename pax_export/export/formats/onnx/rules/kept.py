"""Composites that ONNX has an operator for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pax_export.export.formats.onnx.graph import (
    HEAD_CHANNELS,
    MICROSOFT,
    GraphBuilder,
    Operand,
    rule,
)
from pax_export.export.formats.onnx.rules.arithmetic import reduced
from pax_export.export.formats.onnx.values import Value

Row = Callable[..., Any]
#: Gelu is an operator from here on.
_GELU = 20
#: The transform has its axis as an operand from here on.
_DFT = 20


@rule("clip")
def clip(builder: GraphBuilder, x: Value, *, low: Operand = None, high: Operand = None) -> str:
    if low == 0 and high is None:
        return builder("Relu", x)
    ends = [None if end is None else builder.like(end, x) for end in (low, high)]
    while ends[-1] is None:
        ends.pop()
    return builder("Clip", x, *ends)


@rule("gelu")
def gelu(builder: GraphBuilder, x: Value, *, approximate: bool) -> str | None:
    if builder.opset < _GELU:
        return None
    return builder("Gelu", x, approximate="tanh" if approximate else "none")


@rule("mean")
def mean(builder: GraphBuilder, x: Value, *, axes: Sequence[int], keepdims: bool) -> str:
    if x.rank > 3 and list(axes) == list(range(2, x.rank)):
        pooled = builder("GlobalAveragePool", x)
        return pooled if keepdims else builder.squeeze(pooled, axes)
    return reduced(builder, "ReduceMean", x, axes, keepdims)


@rule("layer_norm")
def layer_norm(
    builder: GraphBuilder, x: Value, *vectors: Value, epsilon: float, scaled: bool, shifted: bool
) -> str:
    scale: Any = vectors[0] if scaled else np.ones(int(x.shape[-1]), x.carrier)
    shift = [vectors[-1]] if shifted else []
    return builder("LayerNormalization", x, scale, *shift, axis=-1, epsilon=epsilon)


@rule("rms_norm")
def rms_norm(builder: GraphBuilder, x: Value, *scale: Value, epsilon: float) -> str:
    """Operators that onnxruntime and OpenVINO replace by one, with these operands only."""
    vector: Any = scale[0] if scale else np.ones(int(x.shape[-1]), x.carrier)
    squares = builder("Pow", x, builder.like(2, x))
    mean = reduced(builder, "ReduceMean", squares, [x.rank - 1], True)
    root = builder("Sqrt", builder("Add", mean, builder.like(epsilon, x)))
    return builder("Mul", builder("Div", x, root), vector)


@rule("dft")
def dft(builder: GraphBuilder, x: Value) -> Any:
    """The transform along the last axis of pairs.

    It is always along axis 1, because OpenVINO 2026.4 ignores the operator's axis.
    """
    *rows, size, pair = x.shape
    signal = x.name if len(rows) == 1 else builder.reshape(x, [math.prod(rows), size, pair])
    if builder.opset >= _DFT:
        result = builder("DFT", signal, None, np.array(1, np.int64))
    else:
        result = builder("DFT", signal, axis=1)
    return result if len(rows) == 1 else builder.reshape(result, x.shape)


@rule("put")
def put(
    builder: GraphBuilder, x: Value, places: Value, rows: Value, *inside: Value, how: str
) -> str:
    index, updates = builder.cast(places, np.int64), rows.name
    if inside and (inside[0].known is None or not inside[0].known.all()):
        found = builder.squeeze(builder("NonZero", *inside), [0])
        index, updates = (builder("Gather", each, found, axis=0) for each in (index, updates))
    reduction = "none" if how == "set" else how
    index = builder.unsqueeze(index, [1])
    result = builder("ScatterND", x, index, updates, reduction=reduction)
    if how not in ("max", "min") or not rows.is_float:
        return result
    # onnxruntime passes over NaN.
    nan = builder("Where", builder("IsNaN", updates), updates, builder.like(0, rows))
    return builder("ScatterND", result, index, nan, reduction="add")


@rule("rotary")
def rotary(
    builder: GraphBuilder, x: Value, places: Value, cos: Value, sin: Value, *, heads: int,
    neighbors: bool,
) -> str | None:  # fmt: skip
    if x.dtype != np.float32:
        return None
    attributes = {"rotary_embedding_dim": 2 * int(cos.shape[-1]), "interleaved": int(neighbors)}
    index = builder.cast(places, np.int64)
    operands = x, index, cos, sin
    result = builder("RotaryEmbedding", *operands, domain=MICROSOFT, num_heads=heads, **attributes)
    return builder.declare(result, x, x.shape)


@rule("cached_attention")
def cached_attention(
    builder: GraphBuilder,
    query: Value,
    *operands: Value,
    heads: int,
    kv_heads: int,
    **attributes: float,
) -> list[str] | None:
    *arrays, bias = operands
    if query.dtype != np.float32 or int(query.shape[-1]) // heads % HEAD_CHANNELS:
        return None
    total, int32 = bias.shape[-1], builder.cast_to(np.int32)
    last = builder.sizes.cast(builder.sizes.one(total - 1), int32)
    outputs = builder(
        "GroupQueryAttention", query, *arrays, builder.expand(last, query.shape[:1]),
        builder.sizes.scalar(total, int32), None, None, None, bias, results=3, domain=MICROSOFT,
        num_heads=heads, kv_num_heads=kv_heads, **attributes,
    )  # fmt: skip
    return [
        builder.declare(name, query, each.shape) for name, each in zip(outputs, builder.results)
    ]


def _recurrent(operator: str) -> Row:
    """Returns the row of an operator whose results have an axis of directions, of size 1."""

    def write(
        builder: GraphBuilder,
        x: Value,
        w: Value,
        r: Value,
        b: Value,
        *states: Value,
        reverse: bool,
        reset_after: bool | None = None,
        activation: str = "",
    ) -> list[Any]:
        attributes: dict[str, Any] = {"hidden_size": int(states[0].shape[-1])}
        attributes |= {"direction": "reverse"} if reverse else {}
        attributes |= {"linear_before_reset": int(reset_after)} if reset_after is not None else {}
        attributes |= {"activations": [activation.capitalize()]} if activation else {}
        starts = [builder.unsqueeze(each, [0]) for each in states]
        results = builder(
            operator, x, w, r, b, None, *starts, results=1 + len(states), **attributes
        )
        outputs, *last = results
        return [builder.squeeze(outputs, [1]), *(builder.squeeze(each, [0]) for each in last)]

    return write


def _operator(name: str, **fixed: float) -> Row:
    """Returns the row of an operator with the operands and attributes of the composite."""
    return lambda builder, *operands, **attributes: builder(name, *operands, **fixed, **attributes)


rule("extreme")(
    lambda builder, x, *, axes, largest: reduced(
        builder, "ReduceMax" if largest else "ReduceMin", x, axes
    )
)
rule("silu")(lambda builder, x: builder("Mul", x, builder("Sigmoid", x)))
rule("sizes")(
    lambda builder, *, of: builder.sizes.cast(builder.sizes.shape(of), builder.cast_to(np.int32))
)
rule("hard_sigmoid")(_operator("HardSigmoid", alpha=1 / 6, beta=0.5))
rule("hard_swish")(_operator("HardSwish"))
rule("log_softmax")(_operator("LogSoftmax"))
rule("softmax")(_operator("Softmax"))
rule("take")(_operator("Gather"))
rule("take_along")(_operator("GatherElements"))
for _name in ("lstm", "gru", "rnn"):
    rule(_name)(_recurrent(_name.upper()))
