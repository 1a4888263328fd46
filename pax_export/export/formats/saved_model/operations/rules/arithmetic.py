"""Elementwise arithmetic, comparisons, selection and bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from pax_export._foundations.types import Equation, Jaxpr
from pax_export.export.formats.saved_model.operations.derivatives import RELUS, function_of_jax
from pax_export.export.formats.saved_model.operations.graph import NodeBuilder, Output, rule
from pax_export.export.portable.decompositions.control import is_choice
from pax_export.export.portable.decompositions.elementary import to_even
from pax_export.export.portable.sizes import is_number, same_size

#: Operators with the meaning of the primitive of their name, and of others.
_SAME = """
    Exp Log Log1p Expm1 Sin Cos Tan Tanh Sinh Cosh Asin Acos Atan Asinh Acosh Atanh Sqrt Rsqrt
    Floor Ceil Erf Erfc Square Sub Mul Atan2
""".split()
_RENAMED = {
    "logistic": "Sigmoid", "is_finite": "IsFinite", "stop_gradient": "StopGradient",
    "add_any": "AddV2", "lt": "Less", "le": "LessEqual", "gt": "Greater", "ge": "GreaterEqual",
    "eq": "Equal", "ne": "NotEqual",
}  # fmt: skip
#: Those without a kernel, or a good one, for half precision.
_WIDE = "Lgamma Digamma Igamma Igammac Zeta Polygamma NextAfter".split()
_WIDE_RENAMED = {
    "erf_inv": "Erfinv", "bessel_i0e": "BesselI0e", "bessel_i1e": "BesselI1e",
    "regularized_incomplete_beta": "Betainc",
}  # fmt: skip


def _plain(operator: str) -> Callable:
    def apply(builder: NodeBuilder, *operands: Output, **_: object) -> Any:
        return builder(operator, *builder.spread(*operands))

    return apply


def _in_float32(operator: str) -> Callable:
    def apply(builder: NodeBuilder, *operands: Output, **_: object) -> Output:
        return builder.in_float32(operator, *builder.spread(*operands))

    return apply


for _name, _operator in ({each.lower(): each for each in _SAME} | _RENAMED).items():
    rule(_name)(_plain(_operator))
for _name, _operator in ({each.lower(): each for each in _WIDE} | _WIDE_RENAMED).items():
    rule(_name)(_in_float32(_operator))
rule("round", when=to_even)(_in_float32("Rint"))


@rule("add")
def add(builder: NodeBuilder, x: Output, y: Output, **_: object) -> Output:
    """With a vector over the last axis by the operator that TensorFlow fuses with products."""
    for one, other in ((x, y), (y, x)):
        bias = other if other.thin is None else other.thin
        if one.rank > 1 and one.thin is None and bias.rank == one.rank:
            *rest, size = bias.shape
            if is_number(size) and size == one.shape[-1] > 1 and all(same_size(n, 1) for n in rest):
                product = builder.reshaped(one, size)  # beside it, they are fused
                total = builder("BiasAdd", product, builder.reshape(bias, [size]))
                return builder.reshape(builder.shaped(total, product.shape), one.shape)
    return builder("AddV2", *builder.spread(x, y))


@rule("pow")
def pow_(builder: NodeBuilder, x: Output, y: Output) -> Output:
    y = dataclasses.replace(builder.cast(y, x.dtype), thin=None if x.dtype != y.dtype else y.thin)
    return builder("Pow", *builder.spread(x, y))


def _extreme(operator: str) -> Callable:
    def apply(builder: NodeBuilder, x: Output, y: Output, **_: object) -> Output:
        """The mean of both orders if it is differentiated: of equal numbers, each has one half."""
        left, right = builder.spread(x, y)
        extreme = builder(operator, left, right)
        if not (builder.differentiable and x.is_float):
            return extreme
        half = builder.like(0.5, x)
        other = builder("Mul", builder(operator, right, left), half)
        return builder("AddV2", builder("Mul", extreme, half), other)

    return apply


rule("max")(_extreme("Maximum"))
rule("min")(_extreme("Minimum"))


def _is_relu(equation: Equation) -> bool:
    return function_of_jax(equation) in RELUS


@rule("custom_jvp_call", when=_is_relu)
def relu(builder: NodeBuilder, x: Output, *, call_jaxpr: Jaxpr, **_: object) -> Output:
    return builder(RELUS[call_jaxpr.jaxpr.debug_info.func_name], x)


@rule("abs")
def abs_(builder: NodeBuilder, x: Output) -> Output:
    return x if x.dtype.kind == "u" else builder("Abs", x)


@rule("neg")
def neg(builder: NodeBuilder, x: Output) -> Output:
    if x.dtype.kind == "u":  # of 0 - x, Grappler makes `Neg`, which has no unsigned kernels
        return builder("Mul", x, ~np.zeros((), x.dtype))
    return builder("Neg", x)


@rule("sign")
def sign(builder: NodeBuilder, x: Output) -> Output:
    if x.dtype.kind == "u":
        return builder("Minimum", x, builder.like(1, x))
    return builder("Sign", x)


# --- quotients --------------------------------------------------------------


@rule("div")
def div(builder: NodeBuilder, x: Output, y: Output, **_: object) -> Output:
    left, right = builder.spread(x, y)
    if x.is_float:
        return builder("RealDiv", left, right)
    return _whole(builder, left, right, y)[0]


@rule("rem")
def rem(builder: NodeBuilder, x: Output, y: Output, **_: object) -> Output:
    left, right = builder.spread(x, y)
    if x.is_float:
        return builder.in_float32("TruncateMod", left, right)
    quotient, by_zero = _whole(builder, left, right, y)
    rest = builder("Sub", left, builder("Mul", quotient, right))
    return rest if by_zero is None else builder("SelectV2", by_zero, left, rest)


def _whole(builder: NodeBuilder, x: Output, y: Output, of: Output) -> tuple[Output, Any]:
    """A quotient of whole numbers, and where it is by 0, which TensorFlow refuses."""
    minus, is_signed = np.array(-1).astype(of.dtype), of.dtype.kind == "i"
    if of.known is not None and np.all(of.known != 0) and np.all(of.known != minus):
        return builder("TruncateDiv", x, y), None
    by_zero, safe = builder("Equal", y, builder.like(0, of)), y
    by_minus = builder("Equal", y, minus) if is_signed else None
    bad = builder("LogicalOr", by_zero, by_minus) if by_minus is not None else by_zero
    safe = builder("SelectV2", bad, builder.like(1, of), y)
    quotient = builder("TruncateDiv", x, safe)
    if by_minus is not None:  # the processor has no quotient of the least number
        quotient = builder("SelectV2", by_minus, builder("Neg", x), quotient)
    return builder("SelectV2", by_zero, minus, quotient), by_zero


# --- truth values and bits --------------------------------------------------


def _logical(operator: str, of_truth: str) -> Callable:
    def apply(builder: NodeBuilder, x: Output, y: Output) -> Output:
        both = builder.spread(x, y)
        return builder(of_truth if x.dtype == np.bool_ else operator, *both)

    return apply


rule("and")(_logical("BitwiseAnd", "LogicalAnd"))
rule("or")(_logical("BitwiseOr", "LogicalOr"))
rule("xor")(_logical("BitwiseXor", "NotEqual"))


@rule("not")
def invert(builder: NodeBuilder, x: Output) -> Output:
    if x.dtype == np.bool_:
        return builder("LogicalNot", x)
    return builder("Sub", ~np.zeros((), x.dtype), x)  # `Invert` is in no other reader


@rule("select_n", when=is_choice)
def select_n(builder: NodeBuilder, which: Output, *cases: Output) -> Output:
    condition, no, yes = builder.spread(which, *cases)
    return builder("SelectV2", condition, yes, no)


def _shift(operator: str, signed: bool | None = None) -> Callable:
    """Shifts bits; by all of them or more, which TensorFlow leaves open, none are left."""

    def apply(builder: NodeBuilder, x: Output, y: Output) -> Output:
        left, right = builder.spread(x, y)
        bits = 8 * x.dtype.itemsize
        kind = x.dtype if signed is None else np.dtype(f"{'int' if signed else 'uint'}{bits}")
        inside = None
        if y.known is None or not np.all((y.known >= 0) & (y.known < bits)):
            last = builder.like(bits - 1, y)
            inside = builder("LessEqual", right, last)
            if y.dtype.kind == "i":
                least = builder("GreaterEqual", right, builder.like(0, y))
                inside = builder("LogicalAnd", inside, least)
            right = builder("SelectV2", inside, right, last)
        shifted = builder(operator, builder.cast(left, kind), builder.cast(right, kind))
        shifted = builder.cast(shifted, x.dtype)
        if inside is None or signed:
            return shifted
        return builder("SelectV2", inside, shifted, builder.like(0, x))

    return apply


rule("shift_left")(_shift("LeftShift"))
rule("shift_right_logical")(_shift("RightShift", signed=False))
rule("shift_right_arithmetic")(_shift("RightShift", signed=True))


@rule("population_count")
def population_count(builder: NodeBuilder, x: Output) -> Output:
    return builder.cast(builder("PopulationCount", x), x.dtype)
