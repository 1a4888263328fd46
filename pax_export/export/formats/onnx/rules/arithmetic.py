"""Elementwise arithmetic, comparisons and selection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pax_export._types import DTypeLike
from pax_export.export.formats.onnx.graph import Writer
from pax_export.export.formats.onnx.registry import rule
from pax_export.export.formats.onnx.rules.bits import shifted
from pax_export.export.formats.onnx.values import Value

Results = Sequence[Any]

#: What numpy does with numbers that are known; so that indices stay known.
_KNOWN: dict[str, Callable] = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply}
_COMPARED: dict[str, Callable] = {
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "Equal": np.equal,
}


def known(writer: Writer, function: Callable, *operands: Value) -> Value | None:
    """The result for whole numbers that the program says; None where it says not all."""
    values = [each.known for each in operands if each.known is not None]
    if len(values) < len(operands) or any(each.is_float for each in operands):
        return None
    with np.errstate(all="ignore"):
        made = np.asarray(function(*values))
    return Value(writer.constant(made), made.dtype, made.shape, made)


def _binary(operator: str) -> Callable:
    def apply(writer: Writer, results: Results, x: Value, y: Value, **_: object) -> Any:
        (result,) = results
        if x.carrier == np.int32 or x.carrier == np.int64:
            found = known(writer, _KNOWN[operator], x, y)
            if found is not None and str(x.dtype) == str(x.carrier):
                return found
        x_name, y_name = writer.spread(result.shape, x, y)
        return writer.fit(writer(operator, x_name, y_name), result.dtype)

    return apply


@rule("add", "add_any", "add_jaxvals")
def add(writer: Writer, results: Results, x: Value, y: Value, **_: object) -> Any:
    if x.dtype == np.bool_:
        return writer("Or", *writer.spread(results[0].shape, x, y))
    return _binary("Add")(writer, results, x, y)


@rule("mul")
def mul(writer: Writer, results: Results, x: Value, y: Value, **_: object) -> Any:
    if x.dtype == np.bool_:
        return writer("And", *writer.spread(results[0].shape, x, y))
    return _binary("Mul")(writer, results, x, y)


rule("sub")(_binary("Sub"))


@rule("div")
def div(writer: Writer, results: Results, x: Value, y: Value) -> str:
    (result,) = results
    x_name, y_name = writer.spread(result.shape, x, y)
    if x.is_float:
        return writer.fit(writer("Div", x_name, y_name), result.dtype)
    return writer.fit(_whole_quotient(writer, x, x_name, y, y_name), result.dtype)


def _whole_quotient(writer: Writer, x: Value, x_name: str, y: Value, y_name: str) -> str:
    """A quotient of whole numbers; dividing by 0 would end the process of onnxruntime."""
    if x.dtype == np.uint64:
        return _unsigned_quotient(writer, x_name, y_name)
    if y.known is not None and np.all(y.known != 0) and np.all(y.known != -1):
        return writer("Div", x_name, y_name)
    zero, one, minus = (writer.like(number, y) for number in (0, 1, -1))
    by_zero, by_minus = writer("Equal", y_name, zero), writer("Equal", y_name, minus)
    safe = writer("Where", writer("Or", by_zero, by_minus), one, y_name)
    quotient = writer("Div", x_name, safe)
    quotient = writer("Where", by_minus, writer("Neg", x_name), quotient)
    return writer("Where", by_zero, minus, quotient)


def _unsigned_quotient(writer: Writer, x: str, y: str) -> str:
    """Twice that of the half, which has no sign, and one more where the rest says so."""
    zero, one, first = np.array(0, np.int64), np.array(1, np.int64), np.iinfo(np.int64).min

    def reaches(left: str, right: str) -> str:
        both = [writer("BitwiseXor", each, np.array(first)) for each in (left, right)]
        return writer.cast(writer("GreaterOrEqual", *both), np.int64)

    large, none = writer("Less", y, zero), writer("Equal", y, zero)
    safe = writer("Where", writer("Or", large, none), one, y)
    half = writer("Div", shifted(writer, x, one, "RIGHT"), safe)
    quotient = writer("Add", half, half)
    rest = writer("Sub", x, writer("Mul", quotient, safe))
    quotient = writer("Add", quotient, reaches(rest, safe))
    quotient = writer("Where", large, reaches(x, y), quotient)
    return writer("Where", none, np.array(-1, np.int64), quotient)


@rule("rem")
def rem(writer: Writer, results: Results, x: Value, y: Value) -> str:
    (result,) = results
    x_name, y_name = writer.spread(result.shape, x, y)
    if x.is_float:
        return writer.fit(writer("Mod", x_name, y_name, fmod=1), result.dtype)
    quotient = _whole_quotient(writer, x, x_name, y, y_name)
    rest = writer("Sub", x_name, writer("Mul", quotient, y_name))
    if y.known is None or np.any(y.known == 0):
        rest = writer("Where", writer("Equal", y_name, writer.like(0, y)), x_name, rest)
    return writer.fit(rest, result.dtype)


def extreme(writer: Writer, operator: str, x: object, y: object, is_float: bool) -> str:
    """The larger or smaller of two; NaN where one is, which `Max` and `Min` do not promise."""
    if not is_float:
        return writer(operator, x, y)
    if not writer.exact:
        return writer(operator, x, y)
    chosen = writer(operator, x, y)
    # A sum is NaN where a part is; +inf and -inf together are no NaN of theirs.
    bad = writer("Or", writer("IsNaN", x), writer("IsNaN", y))
    return writer("Where", bad, writer("Add", x, y), chosen)


def _extreme(operator: str) -> Callable:
    logical = {"Max": "Or", "Min": "And"}[operator]

    def apply(writer: Writer, results: Results, x: Value, y: Value) -> Any:
        names = writer.spread(results[0].shape, x, y)
        if x.dtype == np.bool_:
            return writer(logical, *names)
        if y.known is not None and y.known.ndim == 0 and x.is_float:
            return _bounded(writer, operator, names[0], y)
        if x.known is not None and x.known.ndim == 0 and x.is_float:
            return _bounded(writer, operator, names[1], x)
        found = known(writer, {"Max": np.maximum, "Min": np.minimum}[operator], x, y)
        if found is not None:
            return found
        if x.carrier == np.int64:  # onnxruntime compares some of their bits only
            less = writer("Less", names[1], names[0])
            return writer("Where", less, *(names if operator == "Max" else names[::-1]))
        return extreme(writer, operator, names[0], names[1], x.is_float)

    return apply


def _bounded(writer: Writer, operator: str, name: str, bound: Value) -> str:
    """The larger or smaller of an array and a known number: NaN stays NaN, compared with it."""
    assert bound.known is not None
    if np.isnan(bound.known):
        return writer("Add", name, bound)
    if not writer.exact:
        return writer(operator, name, bound)
    beyond = writer("Less" if operator == "Max" else "Greater", name, bound)
    return writer("Where", beyond, bound, name)


rule("max")(_extreme("Max"))
rule("min")(_extreme("Min"))


@rule("clamp")
def clamp(writer: Writer, results: Results, low: Value, x: Value, high: Value) -> str:
    low_name, name, high_name = writer.spread(results[0].shape, low, x, high)
    for operator, bound in (("Less", low_name), ("Greater", high_name)):
        name = writer("Where", writer(operator, name, bound), bound, name)
    for bound in (low, high) if x.is_float else ():
        if bound.known is None or np.isnan(bound.known).any():
            name = writer("Where", writer("IsNaN", bound), bound, name)
    return name


def _comparison(operator: str) -> Callable:
    def apply(writer: Writer, results: Results, x: Value, y: Value) -> Any:
        found = known(writer, _COMPARED[operator], x, y)
        if found is not None:
            return found
        names: list[str] = writer.spread(results[0].shape, x, y)
        if x.dtype == np.bool_ and operator != "Equal":
            names = [writer.cast(name, np.int32) for name in names]
        return writer(operator, *names)

    return apply


rule("lt")(_comparison("Less"))
rule("le")(_comparison("LessOrEqual"))
rule("gt")(_comparison("Greater"))
rule("ge")(_comparison("GreaterOrEqual"))
rule("eq")(_comparison("Equal"))


@rule("ne")
def ne(writer: Writer, results: Results, x: Value, y: Value) -> str:
    return writer("Not", writer("Equal", *writer.spread(results[0].shape, x, y)))


def _total(operator: str) -> Callable:
    """Comparisons in the order of sorting, where NaN is larger than all other numbers."""

    def apply(writer: Writer, results: Results, x: Value, y: Value) -> str:
        names = writer.spread(results[0].shape, x, y)
        if x.dtype == np.bool_:
            names = [writer.cast(name, np.int32) for name in names]
        plain = writer(operator, *names)
        if not x.is_float:
            return plain
        bad_x, bad_y = (writer("IsNaN", name) for name in names)
        if operator == "Less":
            return writer("Or", plain, writer("And", bad_y, writer("Not", bad_x)))
        if operator == "LessOrEqual":
            return writer("Or", plain, bad_y)
        return writer("Or", plain, writer("And", bad_x, bad_y))

    return apply


rule("lt_to")(_total("Less"))
rule("le_to")(_total("LessOrEqual"))
rule("eq_to")(_total("Equal"))


@rule("select_n")
def select_n(writer: Writer, results: Results, which: Value, *cases: Value) -> Any:
    (result,) = results
    if len(cases) == 1:
        return cases[0]
    if which.known is not None and which.known.ndim == 0 and which.rank == 0:
        return cases[int(which.known)]
    which_name, *names = writer.spread(result.shape, which, *cases)
    chosen = names[-1]
    if which.dtype == np.bool_:
        return choose(writer, which_name, chosen, names[0], result.dtype)
    for index in range(len(cases) - 2, -1, -1):
        here = writer("LessOrEqual", which_name, writer.like(index, which))
        chosen = choose(writer, here, names[index], chosen, result.dtype)
    return chosen


def choose(writer: Writer, condition: Any, yes: object, no: object, dtype: DTypeLike) -> str:
    """Takes from one array where a condition holds, from the other elsewhere."""
    if np.dtype(dtype) != np.bool_:
        return writer("Where", condition, yes, no)
    # onnxruntime has no `Where` of booleans.
    left = writer("And", condition, yes)
    return writer("Or", left, writer("And", writer("Not", condition), no))


@rule("neg")
def neg(writer: Writer, results: Results, x: Value) -> str:
    return writer.fit(writer("Neg", x), results[0].dtype)


@rule("pow")
def power(writer: Writer, results: Results, x: Value, y: Value) -> str:
    names = writer.spread(results[0].shape, x, y)
    return writer.fit(writer("Pow", *names), results[0].dtype)


@rule("abs")
def absolute(writer: Writer, results: Results, x: Value) -> str:
    return writer.fit(writer("Abs", x), results[0].dtype)


@rule("sign")
def sign(writer: Writer, results: Results, x: Value) -> str:
    if x.dtype.kind == "u":
        return writer.cast(writer("Not", writer("Equal", x, writer.like(0, x))), x.carrier)
    plain = writer("Sign", x)
    return writer("Where", writer("IsNaN", x), x, plain) if x.is_float else plain


@rule("is_finite")
def is_finite(writer: Writer, results: Results, x: Value) -> str:
    return writer("Equal", writer("Sub", x, x), writer.like(0, x))


@rule("floor")
def floor(writer: Writer, results: Results, x: Value) -> str:
    return writer("Floor", x)


@rule("ceil")
def ceil(writer: Writer, results: Results, x: Value) -> str:
    return writer("Ceil", x)


@rule("round")
def round_(writer: Writer, results: Results, x: Value, *, rounding_method: Any) -> str:
    if int(rounding_method) == 1:  # to the nearest even
        return writer("Round", x)
    size = writer("Abs", x)
    whole = writer("Floor", size)
    up = writer("GreaterOrEqual", writer("Sub", size, whole), writer.like(0.5, x))
    whole = writer("Add", whole, writer.cast(up, x.carrier))
    return writer("Mul", writer("Sign", x), whole)


def _chained(operator: str, logical: str) -> Callable:
    def apply(writer: Writer, results: Results, x: Value, y: Value) -> str:
        names = writer.spread(results[0].shape, x, y)
        return writer(logical if x.dtype == np.bool_ else operator, *names)

    return apply


rule("and")(_chained("BitwiseAnd", "And"))
rule("or")(_chained("BitwiseOr", "Or"))
rule("xor")(_chained("BitwiseXor", "Xor"))


@rule("not")
def not_(writer: Writer, results: Results, x: Value) -> str:
    if x.dtype == np.bool_:
        return writer("Not", x)
    return writer.fit(writer("BitwiseNot", x), results[0].dtype)
