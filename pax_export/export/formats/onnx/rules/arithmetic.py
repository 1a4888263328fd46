"""Elementwise arithmetic, comparisons and selection; reductions and sorting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pax_export._foundations.types import DTypeLike, Equation
from pax_export.export.formats.onnx.graph import GraphBuilder, Operand, rule
from pax_export.export.formats.onnx.rules.bits import shift_right_logical, shifted, widened
from pax_export.export.formats.onnx.rules.convolutions import product
from pax_export.export.formats.onnx.values import Value, carrier
from pax_export.export.portable.decompositions.control import is_choice
from pax_export.export.portable.decompositions.elementary import to_even
from pax_export.export.portable.decompositions.reductions import of_truth_values

Axes = Sequence[int]


def _binary(operator: str) -> Callable:
    def apply(builder: GraphBuilder, x: Value, y: Value, **_: object) -> Any:
        return builder(operator, *builder.spread(x, y))

    return apply


for _names, _operator in {
    "add add_any": "Add", "mul": "Mul", "sub": "Sub", "pow": "Pow",
    "lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual", "eq": "Equal",
}.items():  # fmt: skip
    rule(*_names.split())(_binary(_operator))


@rule("div")
def div(builder: GraphBuilder, x: Value, y: Value) -> str:
    x_name, y_name = builder.spread(x, y)
    if x.is_float:
        return builder("Div", x_name, y_name)
    if x.dtype == np.uint32:
        if (below := _lower_bits(y)) is None:
            return _in_int64(builder, div, x, y)
        by = builder.literal(np.log2(below + 1.0).astype(np.int32))
        return shift_right_logical(builder, x, by)
    return _whole_quotient(builder, x, x_name, y, y_name)


def _lower_bits(y: Value) -> np.ndarray | None:
    """Returns the bits below a power of two, if all known numbers are powers of two."""
    if y.known is None or np.any(y.known <= 0) or np.any(y.known & (y.known - 1)):
        return None
    return np.asarray(y.known - 1, y.carrier)


def _in_int64(builder: GraphBuilder, function: Callable, x: Value, y: Value) -> str:
    return builder.cast(function(builder, *(widened(builder, e) for e in (x, y))), np.int32)


def _whole_quotient(builder: GraphBuilder, x: Value, x_name: str, y: Value, y_name: str) -> str:
    """A quotient of whole numbers; dividing by 0 would end the process of onnxruntime."""
    if x.dtype == np.uint64:
        return _unsigned_quotient(builder, x_name, y_name)
    if y.known is not None and np.all(y.known != 0) and np.all(y.known != -1):
        return builder("Div", x_name, y_name)
    zero, one, minus = (builder.like(number, y) for number in (0, 1, -1))
    by_zero, by_minus = builder("Equal", y_name, zero), builder("Equal", y_name, minus)
    safe = builder("Where", builder("Or", by_zero, by_minus), one, y_name)
    quotient = builder("Div", x_name, safe)
    quotient = builder("Where", by_minus, builder("Neg", x_name), quotient)
    return builder("Where", by_zero, minus, quotient)


def _unsigned_quotient(builder: GraphBuilder, x: str, y: str) -> str:
    """Twice the quotient of the half, which fits int64, plus one if the remainder requires it."""
    zero, one, first = np.array(0, np.int64), np.array(1, np.int64), np.iinfo(np.int64).min

    def reaches(left: str, right: str) -> str:
        both = [builder("BitwiseXor", each, np.array(first)) for each in (left, right)]
        return builder.cast(builder("GreaterOrEqual", *both), np.int64)

    large, none = builder("Less", y, zero), builder("Equal", y, zero)
    safe = builder("Where", builder("Or", large, none), one, y)
    half = builder("Div", shifted(builder, x, one, "RIGHT"), safe)
    quotient = builder("Add", half, half)
    rest = builder("Sub", x, builder("Mul", quotient, safe))
    quotient = builder("Add", quotient, reaches(rest, safe))
    quotient = builder("Where", large, reaches(x, y), quotient)
    return builder("Where", none, np.array(-1, np.int64), quotient)


@rule("rem")
def rem(builder: GraphBuilder, x: Value, y: Value) -> str:
    x_name, y_name = builder.spread(x, y)
    if x.is_float:
        return builder("Mod", x_name, y_name, fmod=1)
    if x.dtype.kind == "u" and (mask := _lower_bits(y)) is not None:
        return builder("BitwiseAnd", x_name, mask)
    if x.dtype == np.uint32:
        return _in_int64(builder, rem, x, y)
    quotient = _whole_quotient(builder, x, x_name, y, y_name)
    rest = builder("Sub", x_name, builder("Mul", quotient, y_name))
    if y.known is None or np.any(y.known == 0):
        rest = builder("Where", builder("Equal", y_name, builder.like(0, y)), x_name, rest)
    return rest


def _extreme(operator: str) -> Callable:
    def apply(builder: GraphBuilder, x: Value, y: Value) -> Any:
        left, right = builder.spread(x, y)
        if y.known is not None and y.known.ndim == 0 and x.is_float:
            return _bounded(builder, operator, left, y)
        if x.known is not None and x.known.ndim == 0 and x.is_float:
            return _bounded(builder, operator, right, x)
        if x.carrier == np.int64:  # onnxruntime compares some of their bits only
            less = builder("Less", right, left)
            return builder("Where", less, *((left, right) if operator == "Max" else (right, left)))
        chosen = builder(operator, left, right)
        if not (x.is_float and builder.exact):
            return chosen
        # A sum is NaN if an operand is, but also for +inf and -inf.
        bad = builder("Or", builder("IsNaN", left), builder("IsNaN", right))
        return builder("Where", bad, builder("Add", left, right), chosen)

    return apply


def _bounded(builder: GraphBuilder, operator: str, name: str, bound: Value) -> str:
    """The maximum or minimum with a known bound, which propagates NaN."""
    assert bound.known is not None
    if np.isnan(bound.known):
        return builder("Add", name, bound)
    if not builder.exact:  # this way round, OpenVINO keeps NaN
        return builder(operator, bound, name)
    beyond = builder("Less" if operator == "Max" else "Greater", name, bound)
    return builder("Where", beyond, bound, name)


rule("max")(_extreme("Max"))
rule("min")(_extreme("Min"))


@rule("ne")
def ne(builder: GraphBuilder, x: Value, y: Value) -> str:
    if x is y and x.is_float:
        return builder("IsNaN", x)
    return builder("Not", builder("Equal", *builder.spread(x, y)))


@rule("select_n", when=is_choice)
def select_n(builder: GraphBuilder, which: Value, *cases: Value) -> Any:
    if which.known is not None and which.known.ndim == 0 and which.rank == 0:
        return cases[int(which.known)]
    condition, no, yes = builder.spread(which, *cases)
    if cases[0].dtype != np.bool_:
        return builder("Where", condition, yes, no)
    # onnxruntime has no `Where` of booleans.
    left = builder("And", condition, yes)
    return builder("Or", left, builder("And", builder("Not", condition), no))


rule("abs")(lambda builder, x: x if x.dtype.kind == "u" else builder("Abs", x))
rule("not")(lambda builder, x: builder("Not" if x.dtype == np.bool_ else "BitwiseNot", x))


@rule("sign")
def sign(builder: GraphBuilder, x: Value) -> str:
    if x.dtype.kind == "u":
        return builder.cast(builder("Not", builder("Equal", x, builder.like(0, x))), x.carrier)
    plain = builder("Sign", x)
    return builder("Where", builder("IsNaN", x), x, plain) if x.is_float else plain


def _chained(operator: str, logical: str) -> Callable:
    def apply(builder: GraphBuilder, x: Value, y: Value) -> str:
        names = builder.spread(x, y)
        return builder(logical if x.dtype == np.bool_ else operator, *names)

    return apply


rule("and")(_chained("BitwiseAnd", "And"))
rule("or")(_chained("BitwiseOr", "Or"))
rule("xor")(_chained("BitwiseXor", "Xor"))


#: Primitives with an operator of the same name, and those whose kernel lacks float64 (1.24).
_DIRECT = "ceil cos exp floor log neg sin sqrt tanh".split()
_NOT_DOUBLE = "acos acosh asin asinh atan atanh cosh erf sinh tan".split()


def _direct(operator: str) -> Callable:
    return lambda builder, x, **_: builder(operator, x)


def _is_not_double(equation: Equation) -> bool:
    return equation.invars[0].aval.dtype != np.float64


for _name in _DIRECT:
    rule(_name)(_direct(_name.capitalize()))
for _name in _NOT_DOUBLE:
    rule(_name, when=_is_not_double)(_direct(_name.capitalize()))
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


# --- Reductions, cumulative operations and sorting ---


def reduced(
    builder: GraphBuilder, operator: str, x: Operand, axes: Axes, keep: bool = False
) -> Any:
    if not len(axes):
        return x
    return builder(operator, x, np.array(axes, np.int64), keepdims=int(keep))


@rule("reduce_sum")
def reduce_sum(builder: GraphBuilder, x: Value, *, axes: Axes, **_: object) -> Any:
    if x.is_float or not len(axes):
        return reduced(builder, "ReduceSum", x, axes)
    # onnxruntime adds whole numbers as float64 and stops at the ends of their type.
    if x.dtype.itemsize == 8:
        sizes = [x.shape[axis] for axis in axes]
        ones = Value(builder.expand(builder.like(1, x), sizes), x.dtype, tuple(sizes))
        numbers = ((tuple(axes), tuple(range(len(axes)))), ((), ()))
        return product(builder, x, ones, numbers, builder.results[0].shape, x.carrier)
    total = reduced(builder, "ReduceSum", builder.cast(x, np.int64), axes)
    return builder.cast(total, x.carrier)


def _in_float32(equation: Equation) -> bool:
    """Converts integers, for which onnxruntime has the product in float64."""
    return carrier(equation.invars[0].aval.dtype) == np.float32


rule("reduce_prod", when=_in_float32)(
    lambda builder, x, *, axes, **_: reduced(builder, "ReduceProd", x, axes)
)
rule("cumsum")(
    lambda builder, x, *, axis, reverse: builder(
        "CumSum", x, np.array(axis, np.int64), reverse=int(reverse)
    )
)


def _logical(operator: str) -> Callable:
    def apply(builder: GraphBuilder, x: Value, *, axes: Axes, **_: object) -> str:
        found = reduced(builder, operator, builder.cast(x, np.int32), axes)
        return builder.cast(found, np.bool_)

    return apply


rule("reduce_or", when=of_truth_values)(_logical("ReduceMax"))
rule("reduce_and", when=of_truth_values)(_logical("ReduceMin"))


def _arg(operator: str) -> Callable:
    def apply(
        builder: GraphBuilder, x: Value, *, axes: Axes, index_dtype: DTypeLike, **_: object
    ) -> str:
        (axis,) = axes
        found = builder(operator, x, axis=axis, keepdims=0)
        if x.is_float:  # the first NaN counts as the extreme
            bad = builder.cast(builder("IsNaN", x), np.int32)
            any_bad = builder.cast(reduced(builder, "ReduceMax", bad, [axis]), np.bool_)
            first = builder("ArgMax", bad, axis=axis, keepdims=0)
            found = builder("Where", any_bad, first, found)
        return found if np.dtype(index_dtype) == np.int64 else builder.cast(found, np.int32)

    return apply


rule("argmax")(_arg("ArgMax"))
rule("argmin")(_arg("ArgMin"))


# --- sorting ----------------------------------------------------------------


def _top(builder: GraphBuilder, x: Operand, count: Operand, axis: int, largest: bool) -> list[str]:
    """Returns the extreme numbers and their indices; ties in any order."""
    return builder("TopK", x, count, results=2, axis=axis, largest=int(largest), sorted=1)


@rule("rank")
def rank(builder: GraphBuilder, x: Value, *, axis: int, count: Operand, largest: bool) -> str:
    """Returns the indices of the first elements in an order; stable, with NaN largest.

    `TopK` is stable by the standard, but not in OpenVINO and IREE: its result is sorted again by
    distinct numbers.
    """
    key: Any = x.name
    size, bad, count = builder.sizes.one(x.shape[axis]), None, builder.sizes.one(count)
    dimension = np.array(axis, np.int64)
    if not x.is_float and x.dtype.itemsize < 8:
        counted = builder("CumSum", builder.cast(builder("Equal", key, key), np.int64), dimension)
        scaled = builder("Mul", builder.cast(x, np.int64), size)
        unlike = builder("Sub" if largest else "Add", scaled, counted)
        return builder.cast(_top(builder, unlike, count, axis, largest)[1], np.int32)
    if x.is_float:  # NaN has no order in ONNX: it is infinite, at first
        bad = builder("IsNaN", key)
        key = builder("Where", bad, builder.like(np.inf, x), key)
    ranked, first = _top(builder, key, size, axis, largest)
    along = [np.array([axis], np.int64)]
    ends = [np.array([n], np.int64) for n in (0, 1, -1, np.iinfo(np.int64).max)]
    later = builder("Slice", ranked, ends[1], ends[3], *along)
    before = builder("Slice", ranked, ends[0], ends[2], *along)
    starts = builder.cast(builder("Not", builder("Equal", later, before)), np.int64)
    none = builder("Mul", builder("Slice", first, ends[0], ends[1], *along), ends[0])
    group = builder("Concat", none, starts, axis=axis)
    group = builder("CumSum", group, dimension)
    if bad is not None:
        at_end = builder("Not", bad) if largest else bad
        moved = builder("GatherElements", builder.cast(at_end, np.int64), first, axis=axis)
        group = builder("Add", builder("Mul", group, np.array([2], np.int64)), moved)
    unlike = builder("Add", builder("Mul", group, size), first)
    # In IREE, sorts of one shape share an array of places, which each changes: one more at the end.
    last = builder("Slice", unlike, ends[2], ends[3], *along)
    more = builder("Add", last, builder.sizes.one(3 * x.shape[axis]))
    unlike = builder("Concat", unlike, more, axis=axis)
    second = _top(builder, unlike, count, axis, largest=False)[1]
    return builder.cast(builder("GatherElements", first, second, axis=axis), np.int32)
