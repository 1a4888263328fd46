"""Mathematical functions of one or two numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pax_export.export.formats.onnx.graph import Writer
from pax_export.export.formats.onnx.registry import rule
from pax_export.export.formats.onnx.values import Value
from pax_export.export.formats.series import ERF_INV_CENTRAL, ERF_INV_TAIL, LANCZOS

Results = Sequence[Any]

#: Operators that do what the primitive does.
_DIRECT = {
    "exp": "Exp",
    "log": "Log",
    "sqrt": "Sqrt",
    "sin": "Sin",
    "cos": "Cos",
    "tanh": "Tanh",
}
#: Operators that onnxruntime has for float32 only.
_NARROW = {
    "tan": "Tan",
    "asin": "Asin",
    "acos": "Acos",
    "atan": "Atan",
    "sinh": "Sinh",
    "cosh": "Cosh",
    "asinh": "Asinh",
    "acosh": "Acosh",
    "atanh": "Atanh",
    "erf": "Erf",
}


def _direct(operator: str) -> Callable:
    def apply(writer: Writer, results: Results, x: Value, **_: Any) -> str:
        return writer.fit(writer(operator, x), results[0].dtype)

    return apply


for _name, _operator in (_DIRECT | _NARROW).items():
    rule(_name)(_direct(_operator))


@rule("logistic")
def logistic(writer: Writer, results: Results, x: Value, **_: Any) -> str:
    """By its definition: `Sigmoid` of onnxruntime is never below 1e-8.

    And so it is, to the last bit, what a softmax of two gives, as in jax.
    """
    total = writer("Add", writer("Exp", writer("Neg", x)), writer.like(1, x))
    return writer.fit(writer("Reciprocal", total), results[0].dtype)


@rule("rsqrt")
def rsqrt(writer: Writer, results: Results, x: Value, **_: Any) -> str:
    return writer.fit(writer("Reciprocal", writer("Sqrt", x)), results[0].dtype)


@rule("cbrt")
def cbrt(writer: Writer, results: Results, x: Value, **_: Any) -> str:
    size = writer("Pow", writer("Abs", x), writer.like(1 / 3, x))
    return writer.fit(writer("Mul", writer("Sign", x), size), results[0].dtype)


@rule("log2")
def log2(writer: Writer, results: Results, x: Value, **_: Any) -> str:
    logarithm = writer("Mul", writer("Log", x), writer.like(1 / math.log(2), x))
    return writer.fit(logarithm, results[0].dtype)


@rule("exp2")
def exp2(writer: Writer, results: Results, x: Value, **_: Any) -> str:
    return writer.fit(writer("Pow", writer.like(2, x), x), results[0].dtype)


@rule("expm1")
def expm1(writer: Writer, results: Results, x: Value, **_: Any) -> str:
    """By the hyperbolic tangent of the half near 0, where a difference from 1 loses digits."""
    one, half = writer.like(1, x), writer.like(0.5, x)
    tangent = writer("Tanh", writer("Mul", x, half))
    doubled = writer("Add", tangent, tangent)
    near = writer("Div", doubled, writer("Sub", one, tangent))
    far = writer("Sub", writer("Exp", x), one)
    close = writer("Less", writer("Abs", x), half)
    return writer.fit(writer("Where", close, near, far), results[0].dtype)


@rule("log1p")
def log1p(writer: Writer, results: Results, x: Value, **_: Any) -> str:
    """Near 0, the logarithm of a rounded sum is mended by what the rounding did."""
    one, half = writer.like(1, x), writer.like(0.5, x)
    total = writer("Add", one, x)
    logarithm = writer("Log", total)
    moved = writer("Sub", total, one)
    same = writer("Equal", moved, writer.like(0, x))
    divisor = writer("Where", same, one, moved)
    near = writer("Where", same, x, writer("Mul", logarithm, writer("Div", x, divisor)))
    close = writer("Less", writer("Abs", x), half)
    return writer.fit(writer("Where", close, near, logarithm), results[0].dtype)


def _horner(writer: Writer, x: Any, coefficients: Sequence[float], like: Value) -> str:
    made: Any = writer.like(coefficients[0], like)
    for each in coefficients[1:]:
        made = writer("Add", writer("Mul", made, x), writer.like(each, like))
    return made


@rule("erf_inv")
def erf_inv(writer: Writer, results: Results, x: Value) -> str:
    one = writer.like(1, x)
    product = writer("Mul", writer("Sub", one, x), writer("Add", one, x))
    w = writer("Neg", writer("Log", product))
    near = _horner(writer, writer("Sub", w, writer.like(2.5, x)), ERF_INV_CENTRAL, x)
    root = writer("Sqrt", writer("Max", w, writer.like(5, x)))
    far = _horner(writer, writer("Sub", root, writer.like(3, x)), ERF_INV_TAIL, x)
    scale = writer("Where", writer("Less", w, writer.like(5, x)), near, far)
    made = writer("Mul", scale, x)
    edge = writer("Equal", writer("Abs", x), one)
    ends = writer("Mul", x, writer.like(np.inf, x))
    return writer.fit(writer("Where", edge, ends, made), results[0].dtype)


def _lanczos(writer: Writer, z: Any, x: Value) -> tuple[str, Any, Any]:
    """The series for a z of at least 0, and its derivative's parts: (sum, slope, z + 7.5)."""
    series: Any = writer.like(0.99999999999980993227684700473478, x)
    slope: Any = writer.like(0, x)
    for index, each in enumerate(LANCZOS):
        shifted = writer("Add", z, writer.like(index + 1, x))
        term = writer("Div", writer.like(each, x), shifted)
        series = writer("Add", series, term)
        slope = writer("Sub", slope, writer("Div", term, shifted))
    return series, slope, writer("Add", z, writer.like(7.5, x))


@rule("lgamma")
def lgamma(writer: Writer, results: Results, x: Value) -> str:
    """The logarithm of |gamma|; numbers below a half by reflection."""
    one, half, pi = (writer.like(number, x) for number in (1, 0.5, math.pi))
    reflected = writer("Less", x, half)
    z = writer("Where", reflected, writer("Neg", x), writer("Sub", x, one))
    series, _, t = _lanczos(writer, z, x)
    power = writer("Mul", writer("Add", z, half), writer("Log", t))
    right = writer("Add", writer("Sub", power, t), writer("Log", series))
    right = writer("Add", right, writer.like(0.5 * math.log(2 * math.pi), x))
    size = writer("Abs", x)
    part = writer("Sub", size, writer("Floor", size))
    part = writer("Where", writer("Greater", part, half), writer("Sub", one, part), part)
    sine = writer("Log", writer("Sin", writer("Mul", pi, part)))
    left = writer("Sub", writer("Sub", writer("Log", pi), sine), right)
    made = writer("Where", reflected, left, right)
    # So is a whole number that is not above 0, as all far below are.
    pole = writer("And", reflected, writer("Equal", part, writer.like(0, x)))
    infinite = writer("Or", writer("IsInf", x), pole)
    return writer.fit(writer("Where", infinite, writer.like(np.inf, x), made), results[0].dtype)


@rule("digamma")
def digamma(writer: Writer, results: Results, x: Value) -> str:
    one, half, pi = (writer.like(number, x) for number in (1, 0.5, math.pi))
    reflected = writer("Less", x, half)
    z = writer("Where", reflected, writer("Neg", x), writer("Sub", x, one))
    series, slope, t = _lanczos(writer, z, x)
    made = writer("Add", writer("Log", t), writer("Div", slope, series))
    right = writer("Sub", made, writer("Div", writer.like(7, x), t))
    part = writer("Add", x, writer("Abs", writer("Floor", writer("Add", x, half))))
    angle = writer("Mul", pi, part)
    cotangent = writer("Div", writer("Mul", pi, writer("Cos", angle)), writer("Sin", angle))
    left = writer("Sub", right, cotangent)
    made = writer("Where", reflected, left, right)
    whole = writer("And", reflected, writer("Equal", x, writer("Floor", x)))
    return writer.fit(writer("Where", whole, writer.like(np.nan, x), made), results[0].dtype)
