"""Composites that TensorFlow has an operator for."""

from __future__ import annotations

from pax_export.export.formats.saved_model.operations.graph import NodeBuilder, Output, rule


@rule("clip")
def clip(
    builder: NodeBuilder, x: Output, *, low: float | None = None, high: float | None = None
) -> Output:
    if low == 0 and high in (None, 6):
        return builder("Relu" if high is None else "Relu6", x)
    x = x if low is None else builder("Maximum", x, builder.like(low, x))
    return x if high is None else builder("Minimum", x, builder.like(high, x))


@rule("softmax")
def softmax(builder: NodeBuilder, x: Output, *, axis: int) -> Output | None:
    if axis % x.rank != x.rank - 1:
        return None
    probabilities = builder("Softmax", x)
    if x.rank > 3:  # attention: a product with rows that have NaN follows
        return probabilities
    # The kernel leaves zeros beside NaN.
    total = builder("Sum", probabilities, x.rank - 1, keep_dims=True)
    return builder("AddV2", probabilities, builder("Sub", total, total))


@rule("log_softmax")
def log_softmax(builder: NodeBuilder, x: Output, *, axis: int) -> Output | None:
    return builder("LogSoftmax", x) if axis % x.rank == x.rank - 1 else None


@rule("silu")
def silu(builder: NodeBuilder, x: Output) -> Output:
    return builder("Mul", x, builder("Sigmoid", x))
