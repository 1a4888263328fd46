"""Elementwise mathematical functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pax_export.export.formats.onnx.graph import GraphBuilder
from pax_export.export.formats.onnx.registry import rule
from pax_export.export.formats.onnx.values import Value

Results = Sequence[Any]

#: Primitives with an operator of the same name.
_DIRECT = "acos acosh asin asinh atan atanh cos cosh erf exp log neg sin sinh sqrt tan tanh".split()


def _direct(operator: str) -> Callable:
    def apply(builder: GraphBuilder, results: Results, x: Value, **_: object) -> str:
        return builder.fit(builder(operator, x), results[0].dtype)

    return apply


for _name in _DIRECT:
    rule(_name)(_direct(_name.capitalize()))


@rule("logistic")
def logistic(builder: GraphBuilder, results: Results, x: Value, **_: object) -> str:
    """By its definition, because onnxruntime's `Sigmoid` is never below 1e-8.

    It also equals a softmax of two exactly, as in jax.
    """
    if not builder.exact and x.carrier.name == "float32":
        return builder.fit(builder("Sigmoid", x), results[0].dtype)
    total = builder("Add", builder("Exp", builder("Neg", x)), builder.like(1, x))
    return builder.fit(builder("Reciprocal", total), results[0].dtype)
