"""Complex numbers: what is more than moving and adding both parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pax_export.export.formats.onnx.graph import Writer
from pax_export.export.formats.onnx.registry import Refused, complex_rule
from pax_export.export.formats.onnx.rules.products import product
from pax_export.export.formats.onnx.values import AnyValue, Parts, Value, carrier, part_dtype
from pax_export.export.portable.decompositions import decomposition

Results = Sequence[Any]


def _made(result: Any, real: Any, imaginary: Any) -> Parts:
    dtype = np.dtype(part_dtype(result.dtype))
    shape = tuple(result.shape)
    return Parts((Value(real, dtype, shape), Value(imaginary, dtype, shape)), result.dtype)


def _parts(value: AnyValue) -> tuple[Value, Value]:
    if not isinstance(value, Parts):
        raise Refused("of complex numbers and others")
    return value.parts


@complex_rule("complex")
def complex_(writer: Writer, results: Results, x: Value, y: Value) -> Parts:
    shape = results[0].shape
    return _made(results[0], writer.expand(x, shape), writer.expand(y, shape))


@complex_rule("real")
def real(writer: Writer, results: Results, x: Parts) -> Value:
    return x.parts[0]


@complex_rule("imag")
def imag(writer: Writer, results: Results, x: Parts) -> Value:
    return x.parts[1]


@complex_rule("conj")
def conj(writer: Writer, results: Results, x: AnyValue, **_: Any) -> Parts:
    if isinstance(x, Value):
        zero = writer.expand(writer.like(0, x), x.shape)
        return _made(results[0], x.name, zero)
    return _made(results[0], x.parts[0].name, writer("Neg", x.parts[1]))


def multiplied(writer: Writer, x: Sequence[Any], y: Sequence[Any]) -> tuple[str, str]:
    minus = writer("Mul", x[1], y[1])
    real_part = writer("Sub", writer("Mul", x[0], y[0]), minus)
    return real_part, writer("Add", writer("Mul", x[0], y[1]), writer("Mul", x[1], y[0]))


@complex_rule("mul")
def mul(writer: Writer, results: Results, x: Parts, y: Parts, **_: Any) -> Parts:
    return _made(results[0], *multiplied(writer, _parts(x), _parts(y)))


@complex_rule("div")
def div(writer: Writer, results: Results, x: Parts, y: Parts) -> Parts:
    """By the conjugate, with the divisor scaled so that its square neither over- nor underflows."""
    (a, b), (c, d) = _parts(x), _parts(y)
    size = writer("Max", writer("Abs", c), writer("Abs", d))
    safe = writer("Where", writer("Greater", size, writer.like(0, c)), size, writer.like(1, c))
    c_small, d_small = writer("Div", c, safe), writer("Div", d, safe)
    norm = writer("Add", writer("Mul", c_small, c_small), writer("Mul", d_small, d_small))
    top = multiplied(writer, (a, b), (c_small, writer("Neg", d_small)))
    scale = writer("Mul", norm, safe)
    return _made(results[0], *(writer("Div", each, scale) for each in top))


@complex_rule("abs")
def absolute(writer: Writer, results: Results, x: Parts) -> str:
    """Scaled by the larger part, whose square might overflow."""
    a, b = (writer("Abs", each) for each in x.parts)
    like = x.parts[0]
    large, small = writer("Max", a, b), writer("Min", a, b)
    zero = writer("Equal", large, writer.like(0, like))
    ratio = writer("Div", small, writer("Where", zero, writer.like(1, like), large))
    root = writer("Sqrt", writer("Add", writer.like(1, like), writer("Mul", ratio, ratio)))
    infinite = writer("IsInf", large)
    return writer("Where", infinite, large, writer("Mul", large, root))


@complex_rule("exp")
def exp(writer: Writer, results: Results, x: Parts, **_: Any) -> Parts:
    size = writer("Exp", x.parts[0])
    angle = x.parts[1]
    return _made(
        results[0],
        writer("Mul", size, writer("Cos", angle)),
        writer("Mul", size, writer("Sin", angle)),
    )


@complex_rule("log")
def log(writer: Writer, results: Results, x: Parts, **_: Any) -> Parts:
    size = writer("Log", absolute(writer, results, x))
    real, imaginary = x.parts
    (angle,) = writer.inline(decomposition("atan2", (imaginary, real), {}), (imaginary, real))
    return _made(results[0], size, angle.name)


@complex_rule("sign")
def sign(writer: Writer, results: Results, x: Parts) -> Parts:
    like = x.parts[0]
    size = absolute(writer, results, x)
    zero = writer("Equal", size, writer.like(0, like))
    safe = writer("Where", zero, writer.like(1, like), size)
    return _made(results[0], *(writer("Div", each, safe) for each in x.parts))


def _root(writer: Writer, x: Parts) -> tuple[str, str]:
    like = x.parts[0]
    size = absolute(writer, [], x)
    half, zero = writer.like(0.5, like), writer.like(0, like)
    real_part = writer("Sqrt", writer("Mul", writer("Add", size, x.parts[0]), half))
    imaginary = writer("Sqrt", writer("Mul", writer("Sub", size, x.parts[0]), half))
    below = writer("Less", x.parts[1], zero)
    return real_part, writer("Where", below, writer("Neg", imaginary), imaginary)


@complex_rule("sqrt")
def sqrt(writer: Writer, results: Results, x: Parts, **_: Any) -> Parts:
    return _made(results[0], *_root(writer, x))


@complex_rule("eq")
def eq(writer: Writer, results: Results, x: Parts, y: Parts) -> str:
    return writer("And", *(writer("Equal", *each) for each in zip(_parts(x), _parts(y))))


@complex_rule("ne")
def ne(writer: Writer, results: Results, x: Parts, y: Parts) -> str:
    return writer("Not", eq(writer, results, x, y))


@complex_rule("is_finite")
def is_finite(writer: Writer, results: Results, x: Parts) -> str:
    both = [writer("Equal", writer("Sub", p, p), writer.like(0, p)) for p in x.parts]
    return writer("And", *both)


@complex_rule("convert_element_type")
def convert_element_type(writer: Writer, results: Results, x: AnyValue, **_: Any) -> Any:
    (result,) = results
    half = part_dtype(result.dtype)
    if half is None:  # the imaginary part is dropped
        assert isinstance(x, Parts)
        return _cast(writer, x.parts[0], carrier(result.dtype))
    if isinstance(x, Parts):
        return _made(result, *(_cast(writer, each, half) for each in x.parts))
    zero = writer.expand(np.zeros((), half), result.shape)
    return _made(result, _cast(writer, x, half), zero)


def _cast(writer: Writer, x: Value, kind: Any) -> str:
    return x.name if x.carrier == kind else writer.cast(x, kind)


@complex_rule("dot_general")
def dot_general(
    writer: Writer, results: Results, x: AnyValue, y: AnyValue, *, dimension_numbers: Any, **_: Any
) -> Parts:
    (result,) = results
    half = part_dtype(result.dtype)

    def times(left: Value, right: Value) -> Any:
        return product(writer, left, right, dimension_numbers, result.shape, half)

    if isinstance(x, Value):
        return _made(result, *(times(x, each) for each in _parts(y)))
    if isinstance(y, Value):
        return _made(result, *(times(each, y) for each in x.parts))
    (a, b), (c, d) = x.parts, y.parts
    real_part = writer("Sub", times(a, c), times(b, d))
    return _made(result, real_part, writer("Add", times(a, d), times(b, c)))
