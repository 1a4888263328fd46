"""Elementwise arithmetic, comparisons, selection, bits, conversions, and whole functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pax_export._foundations.types import DTypeLike, Equation, Jaxpr
from pax_export.export.formats.saved_model.operations.graph import NodeBuilder, Output, rule
from pax_export.export.formats.saved_model.operations.operators import RELUS, function_of_jax
from pax_export.export.portable import NotInTargetError
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
_WIDE = "Lgamma Digamma Igamma Igammac Zeta Polygamma".split()
_WIDE_RENAMED = {
    "erf_inv": "Erfinv", "bessel_i0e": "BesselI0e", "bessel_i1e": "BesselI1e",
}  # fmt: skip


def _operator(operator: str, in_float32: bool = False) -> Callable:
    def apply(builder: NodeBuilder, *operands: Output, **_: object) -> Output:
        write = builder.in_float32 if in_float32 else builder
        return write(operator, *builder.spread(*operands))

    return apply


for _name, _of in ({each.lower(): each for each in _SAME} | _RENAMED).items():
    rule(_name)(_operator(_of))
for _name, _of in ({each.lower(): each for each in _WIDE} | _WIDE_RENAMED).items():
    rule(_name)(_operator(_of, in_float32=True))
rule("round", when=to_even)(_operator("Rint", in_float32=True))


@rule("regularized_incomplete_beta")
def betainc(builder: NodeBuilder, *operands: Output) -> Output:
    shape = builder.results[0].shape  # the operator takes arrays of one shape
    return builder.in_float32("Betainc", *(builder.broadcast(each, shape) for each in operands))


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


rule("abs")(lambda builder, x: x if x.dtype.kind == "u" else builder("Abs", x))


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
    return _quotient(builder, left, right, y)[0]


@rule("rem")
def rem(builder: NodeBuilder, x: Output, y: Output, **_: object) -> Output:
    left, right = builder.spread(x, y)
    if x.is_float:
        return builder.in_float32("TruncateMod", left, right)
    quotient, by_zero = _quotient(builder, left, right, y)
    rest = builder("Sub", left, builder("Mul", quotient, right))
    return rest if by_zero is None else builder("SelectV2", by_zero, left, rest)


def _quotient(
    builder: NodeBuilder, x: Output, y: Output, of: Output
) -> tuple[Output, Output | None]:
    """A quotient of whole numbers, and where it is by 0, which TensorFlow refuses."""
    minus = np.array(-1).astype(of.dtype)
    if of.known is not None and np.all(of.known != 0) and np.all(of.known != minus):
        return builder("TruncateDiv", x, y), None
    by_zero, one = builder("Equal", y, builder.like(0, of)), builder.like(1, of)
    if of.dtype.kind == "i":  # the processor has no quotient of the least number by -1
        by_minus = builder("Equal", y, minus)
        bad = builder("LogicalOr", by_zero, by_minus)
        quotient = builder("TruncateDiv", x, builder("SelectV2", bad, one, y))
        quotient = builder("SelectV2", by_minus, builder("Neg", x), quotient)
    else:
        quotient = builder("TruncateDiv", x, builder("SelectV2", by_zero, one, y))
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


rule("population_count")(lambda builder, x: builder.cast(builder("PopulationCount", x), x.dtype))


# --- conversions ------------------------------------------------------------


@rule("convert_element_type")
def convert(builder: NodeBuilder, x: Output, *, new_dtype: DTypeLike, **_: object) -> Output:
    dtype = np.dtype(new_dtype)
    if dtype == x.dtype:
        return x
    if dtype.name in ("int4", "uint4", "int2", "uint2"):
        raise NotInTargetError(f"to {dtype.name}")
    if x.known is not None:
        with np.errstate(all="ignore"):
            return builder.literal(np.asarray(jax.numpy.asarray(x.known).astype(dtype)))
    if x.thin is None:
        return _converted(builder, x, dtype)
    thin = _converted(builder, x.thin, dtype)
    return dataclasses.replace(builder.broadcast(thin, x.shape), thin=thin)


def _converted(builder: NodeBuilder, x: Output, dtype: np.dtype) -> Output:
    if dtype == np.bool_:
        return builder("NotEqual", x, builder.like(0, x))
    if x.is_float and jax.numpy.issubdtype(dtype, jax.numpy.integer):
        return _whole(builder, x, dtype)
    return builder.cast(x, dtype)


def _whole(builder: NodeBuilder, x: Output, dtype: np.dtype) -> Output:
    """Truncates, saturates, and converts NaN to 0, as jax does."""
    shape, limits = x.shape, np.iinfo(dtype)
    x = builder.cast(x, np.float32) if x.is_half else x
    low, high = float(limits.min), float(limits.max)
    nearest = x.dtype.type(high)
    if float(nearest) > limits.max:  # rounded up
        nearest = np.nextafter(nearest, x.dtype.type(0))
    safe = builder("SelectV2", builder("IsNan", x), builder.like(0, x), x)
    over = builder("Greater", safe, nearest)
    safe = builder("Maximum", builder("Minimum", safe, np.asarray(nearest)), builder.like(low, x))
    most = np.asarray(limits.max, dtype)
    return builder.shaped(builder("SelectV2", over, most, builder.cast(safe, dtype)), shape)


@rule("bitcast_convert_type")
def bitcast(builder: NodeBuilder, x: Output, *, new_dtype: DTypeLike) -> Output:
    dtype = np.dtype(new_dtype)
    if np.bool_ in (x.dtype, dtype):
        raise NotInTargetError(f"from {x.dtype.name} to {dtype.name}")
    if dtype == x.dtype:
        return x
    if dtype.itemsize == x.dtype.itemsize and {dtype.kind, x.dtype.kind} == {"i", "u"}:
        return builder.cast(x, dtype)  # the same bits, which more readers know
    return builder("Bitcast", x, type=dtype)


@rule("reduce_precision")
def reduce_precision(
    builder: NodeBuilder, x: Output, *, exponent_bits: int, mantissa_bits: int
) -> Any:
    info = jax.numpy.finfo(x.dtype)
    if exponent_bits >= info.nexp and mantissa_bits >= info.nmant:
        return x
    if (exponent_bits, mantissa_bits) == (8, 7):
        return builder.cast(builder.cast(x, jax.numpy.bfloat16), x.dtype)
    if (exponent_bits, mantissa_bits) == (5, 10):
        # Results below the smallest normal number are 0, as the operation specifies.
        rounded = builder.cast(builder.cast(x, np.float16), x.dtype)
        least = builder.like(np.finfo(np.float16).tiny, x)
        small = builder("Less", builder("Abs", rounded), least)
        return builder("SelectV2", small, builder("Mul", rounded, builder.like(0, x)), rounded)
    raise NotInTargetError(f"to {exponent_bits} and {mantissa_bits} bits")


# --- whole functions --------------------------------------------------------


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


rule("log_softmax")(
    lambda builder, x, *, axis: builder("LogSoftmax", x) if axis % x.rank == x.rank - 1 else None
)
rule("silu")(lambda builder, x: builder("Mul", x, builder("Sigmoid", x)))
