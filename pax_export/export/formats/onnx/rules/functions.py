"""Elementwise mathematical functions."""

from __future__ import annotations

from collections.abc import Callable

from pax_export.export.formats.onnx.graph import GraphBuilder
from pax_export.export.formats.onnx.registry import rule
from pax_export.export.formats.onnx.values import Value
from pax_export.export.portable.decompositions.elementary import to_even

#: Primitives with an operator of the same name.
_DIRECT = (
    "acos acosh asin asinh atan atanh ceil cos cosh erf exp floor log neg sin sinh sqrt tan tanh"
).split()


def _direct(operator: str) -> Callable:
    return lambda builder, x, **_: builder(operator, x)


for _name in _DIRECT:
    rule(_name)(_direct(_name.capitalize()))
rule("round", when=to_even)(_direct("Round"))


@rule("logistic")
def logistic(builder: GraphBuilder, x: Value, **_: object) -> str:
    """By its definition, because onnxruntime's `Sigmoid` is never below 1e-8.

    It also equals a softmax of two exactly, as in jax.
    """
    if not builder.exact and x.carrier.name == "float32":
        return builder("Sigmoid", x)
    total = builder("Add", builder("Exp", builder("Neg", x)), builder.like(1, x))
    return builder("Reciprocal", total)
