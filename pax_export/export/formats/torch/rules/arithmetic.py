"""Elementwise arithmetic, comparisons, selection, bits and conversions."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from pax_export.export.formats.torch.values import TorchValue, carrier, rule
from pax_export.export.portable import NotInTargetError
from pax_export.export.portable.decompositions.control import is_choice
from pax_export.export.portable.decompositions.elementary import to_even

if TYPE_CHECKING:
    from pax_export._foundations.types import DTypeLike
    from pax_export.export.formats.torch.graph import TorchGraph
    from pax_export.export.formats.torch.values import Node


#: Primitives that torch has, by its name where that is another one; of two arrays, and of one.
_BINARY = "add add_any:add mul sub pow lt le gt ge eq ne"
_OF_TENSORS = "and:bitwise_and or:bitwise_or xor:bitwise_xor atan2 nextafter"
_UNARY = """
    acos acosh asin asinh atan atanh bessel_i0e:special.i0e bessel_i1e:special.i1e ceil cos cosh
    digamma erf erfc erf_inv:erfinv exp exp2 expm1 floor lgamma log log1p logistic:sigmoid neg rsqrt
    sin sinh sqrt square tan tanh is_finite:isfinite stop_gradient:detach silu:nn.functional.silu
"""


def _binary(function: str) -> Callable:
    def write_call(builder: TorchGraph, x: TorchValue, y: TorchValue, **_: object) -> Any:
        left, right = builder.spread_thin(x, y)
        if isinstance(left, (bool, int, float)):  # torch takes a number second
            left = builder.node_of(x)
        if isinstance(right, float) and not x.is_float:
            right = builder.node_of(y)
        return builder(function, left, right)

    return write_call


def _of_tensors(function: str) -> Callable:
    return lambda builder, x, y: builder(function, *builder.spread_tensors(x, y))


def _unary(function: str) -> Callable:
    return lambda builder, x, **_: builder(function, builder.node_of(x))


for _table, _write in ((_BINARY, _binary), (_OF_TENSORS, _of_tensors), (_UNARY, _unary)):
    for _name, _, _function in (each.partition(":") for each in _table.split()):
        rule(_name)(_write(_function or _name))
rule("round", when=to_even)(_unary("round"))


@rule("div")
def write_div(builder: TorchGraph, x: TorchValue, y: TorchValue) -> Any:
    if x.is_float:
        return _binary("div")(builder, x, y)
    return _quotient(builder, x, *builder.spread_tensors(x, y))


def _quotient(builder: TorchGraph, x: TorchValue, left: Node, right: Node) -> Any:
    """A quotient of integers: by 0 it is -1, and that of the least number by -1 is itself."""
    if x.dtype == np.uint64:
        return _unsigned_quotient(builder, left, right)
    by_zero, by_minus = builder("eq", right, 0), builder("eq", right, -1)
    if x.dtype.kind == "u":
        safe = builder("where", by_zero, 1, right)
        return builder("where", by_zero, -1, builder("div", left, safe, rounding_mode="trunc"))
    safe = builder("where", builder("logical_or", by_zero, by_minus), 1, right)
    quotient = builder("div", left, safe, rounding_mode="trunc")
    quotient = builder("where", by_minus, builder("neg", left), quotient)
    return builder("where", by_zero, -1, quotient)


def _unsigned_quotient(builder: TorchGraph, x: Node, y: Node) -> Any:
    """Twice the quotient of the half, which fits int64, plus one if the remainder requires it."""

    def is_reached(left: Node, right: Node) -> Any:
        first = np.iinfo(np.int64).min
        both = [builder("bitwise_xor", each, int(first)) for each in (left, right)]
        return builder.cast_to(builder("ge", *both), "int64")

    large, none = builder("lt", y, 0), builder("eq", y, 0)
    safe = builder("where", builder("logical_or", large, none), 1, y)
    half = builder("bitwise_and", builder("bitwise_right_shift", x, 1), (1 << 63) - 1)
    half = builder("div", half, safe, rounding_mode="trunc")
    quotient = builder("mul", half, 2)
    rest = builder("sub", x, builder("mul", quotient, safe))
    quotient = builder("add", quotient, is_reached(rest, safe))
    quotient = builder("where", large, is_reached(x, y), quotient)
    return builder("where", none, -1, quotient)


@rule("rem")
def write_rem(builder: TorchGraph, x: TorchValue, y: TorchValue) -> Any:
    if x.is_float:
        return _binary("fmod")(builder, x, y)
    left, right = builder.spread_tensors(x, y)
    quotient = _quotient(builder, x, left, right)
    rest = builder("sub", left, builder("mul", quotient, right))
    return builder("where", builder("eq", right, 0), left, rest)


def constant_where(builder: TorchGraph, which: Node, node: Node) -> Any:
    """An array whose elements have no derivative where a condition holds."""
    return builder("where", which, builder("detach", node), node) if builder.trains else node


def _extreme(function: str) -> Callable:
    def write_call(builder: TorchGraph, x: TorchValue, y: TorchValue) -> Any:
        for one, other in ((x, y), (y, x)):
            is_scalar = other.known is not None and not other.rank
            end = other.number if is_scalar else other.thin
            if isinstance(end, (int, float)) and not isinstance(end, bool) and end == end:
                ends = {"low": end} if function == "maximum" else {"high": end}
                return write_clip(builder, one, **ends)
        extreme = builder(function, *builder.spread_tensors(x, y))
        return _without_slope_of_nan(builder, extreme) if x.is_float and builder.trains else extreme

    return write_call


def _without_slope_of_nan(builder: TorchGraph, node: Node) -> Any:
    """As in jax, slopes are times 0 where a number is NaN."""
    return builder("where", builder("isnan", node), builder("mul", node, 0), node)


@rule("clip")
def write_clip(
    builder: TorchGraph, x: TorchValue, *, low: float | None = None, high: float | None = None,
    strict: bool = False,
) -> Any:  # fmt: skip
    """Numbers between two ends, at which the slope is a half; if `strict`, it is 0."""
    if low == high and not strict:
        return None  # a half of a half
    node = builder.node_of(x)
    if not (x.is_float and builder.trains):
        is_relu = x.is_float and (low, high) == (0, None)
        return builder("relu", node) if is_relu else builder("clamp", node, low, high)
    ends = low, high
    if builder.live and all(end is None or math.isfinite(end) for end in ends):
        outer = (None, None) if strict else tuple(map(_next, ends, (-math.inf, math.inf), (x, x)))
        return builder(builder.loops.clip_between, node, ends, outer)
    if strict:
        clipped = (
            builder("relu", node) if high is None
            else builder("nn.functional.hardtanh", node, low, high)
        )  # fmt: skip
        return builder("clamp", clipped, low, high)  # whose slope at NaN is 0
    for function, end in (("maximum", low), ("minimum", high)):
        if end is not None:
            node = builder(function, node, builder("full", [], end, **builder.kind_of(x.dtype)))
    return _without_slope_of_nan(builder, node)


def _next(end: float | None, to: float, like: TorchValue) -> float | None:
    """The number after an end, in the dtype of an array."""
    kind = jax.numpy.dtype(like.carrier).type
    return None if end is None else float(np.nextafter(kind(end), kind(to)))


rule("max")(_extreme("maximum"))
rule("min")(_extreme("minimum"))


@rule("clamp")
def write_clamp(builder: TorchGraph, low: TorchValue, x: TorchValue, high: TorchValue) -> Any:
    """As jax: at the ends there is no derivative, and NaN stays."""
    if x.dtype == np.uint64:
        raise NotInTargetError(f"of {x.dtype.name}")
    node, *ends = (builder.node_of(each) for each in (x, low, high))
    if not x.is_float:
        return builder("minimum", builder("maximum", node, ends[0]), ends[1])
    if low.known is None:
        is_low = builder("logical_and", builder("lt", node, ends[0]), builder("lt", *ends))
        ends[0] = constant_where(builder, builder("logical_not", is_low), ends[0])
    if high.known is None:
        ends[1] = constant_where(builder, builder("le", node, ends[1]), ends[1])
    inner = constant_where(builder, builder("isnan", node), node)
    above = builder("where", builder("le", node, ends[0]), ends[0], inner)
    return builder("where", builder("ge", above, ends[1]), ends[1], above)


@rule("select_n", when=is_choice)
def select_n(builder: TorchGraph, which: TorchValue, no: TorchValue, yes: TorchValue) -> Any:
    condition, left, right = builder.spread_thin(which, no, yes)
    if isinstance(condition, bool):
        return (no, yes)[condition]
    numbers = (bool, int, float)
    if isinstance(left, numbers) or isinstance(right, numbers):
        # A number has no dtype of its own, and would change that of a small one.
        left, right = builder.node_of(no), builder.node_of(yes)
    return builder("where", condition, right, left)


@rule("abs")
def write_abs(builder: TorchGraph, x: TorchValue) -> Any:
    node = builder.node_of(x)
    if x.dtype.kind == "u" or not x.is_float or not builder.trains:
        return x if x.dtype.kind == "u" else builder("abs", node)
    # At 0, jax's derivative is 1; a sum with 0 is never -0.
    positive, negative = builder("add", node, 0), builder("neg", node)
    return builder("where", builder("ge", node, 0), positive, negative)


rule("not")(
    lambda builder, x: builder(
        "logical_not" if x.dtype == np.bool_ else "bitwise_not", builder.node_of(x)
    )
)


@rule("sign")
def write_sign(builder: TorchGraph, x: TorchValue) -> Any:
    node = builder.node_of(x)
    if x.dtype.kind == "u":
        return builder.cast_to(builder("ne", node, 0), x.carrier)
    if not x.is_float:
        return builder("sign", node)
    # torch has 0 for NaN, and no sign of zero.
    same = builder("logical_or", builder("isnan", node), builder("eq", node, 0))
    return builder("where", same, builder.add_method_call("detach", node), builder("sign", node))


rule("strict_clip")(partial(write_clip, strict=True))


@rule("integer_pow")
def integer_pow(builder: TorchGraph, x: TorchValue, *, y: int, **_: object) -> Any:
    if not x.is_float and y < 0:
        raise NotInTargetError("of an integer to a negative power")
    return builder("pow", builder.node_of(x), y)


# --- bits -------------------------------------------------------------------


def _bits(dtype: DTypeLike) -> int:
    return jax.numpy.iinfo(dtype).bits


def _unsigned(builder: TorchGraph, node: Node, dtype: DTypeLike) -> Any:
    """Integers as int64 with the same low bits, and zeros above."""
    wide = builder.cast_to(node, "int64")
    bits = _bits(dtype)
    return wide if bits == 64 else builder("bitwise_and", wide, (1 << bits) - 1)


def wrap_integer(builder: TorchGraph, wide: Node, dtype: DTypeLike) -> Any:
    """Integers of int64 wrapped to those that carry a dtype."""
    dtype = np.dtype(dtype)
    if dtype.name in ("uint32", "uint16"):
        wide = builder("bitwise_and", wide, (1 << _bits(dtype)) - 1)
    return builder.fit_to(builder.cast_to(wide, carrier(dtype)), dtype)


def _shift(direction: str) -> Callable:
    def write_call(builder: TorchGraph, x: TorchValue, y: TorchValue) -> Any:
        left, right = builder.spread_tensors(x, y)
        bits = _bits(x.dtype)
        wide = builder.cast_to(right, "int64")
        beyond = builder("logical_or", builder("lt", wide, 0), builder("ge", wide, bits))
        by = builder("where", beyond, 0, wide)
        if direction == "left":
            shifted = builder("bitwise_left_shift", builder.cast_to(left, "int64"), by)
        else:
            shifted = builder("bitwise_right_shift", _unsigned(builder, left, x.dtype), by)
            if bits == 64:  # torch copies the sign
                mask = builder("bitwise_left_shift", -2, builder("sub", 63, by))
                mask = builder("where", builder("eq", by, 0), 0, mask)
                shifted = builder("bitwise_and", shifted, builder("bitwise_not", mask))
        return wrap_integer(builder, builder("where", beyond, 0, shifted), x.dtype)

    return write_call


rule("shift_left")(_shift("left"))
rule("shift_right_logical")(_shift("right"))


@rule("shift_right_arithmetic")
def shift_right_arithmetic(builder: TorchGraph, x: TorchValue, y: TorchValue) -> Any:
    left, right = builder.spread_tensors(x, y)
    bits = _bits(x.dtype)
    wide, by = builder.cast_to(left, "int64"), builder.cast_to(right, "int64")
    if x.dtype.kind == "u" and bits < 64:
        top = 1 << (bits - 1)
        wide = builder("sub", builder("bitwise_xor", wide, top), top)
    beyond = builder("logical_or", builder("lt", by, 0), builder("ge", by, bits))
    by = builder("where", beyond, bits - 1, by)
    return wrap_integer(builder, builder("bitwise_right_shift", wide, by), x.dtype)


@rule("bitcast_convert_type")
def bitcast(builder: TorchGraph, x: TorchValue, *, new_dtype: DTypeLike) -> Any:
    before, after = np.dtype(x.dtype), np.dtype(new_dtype)
    if before == after:
        return x
    if before.itemsize != after.itemsize or np.bool_ in (before, after) or _is_tiny(before, after):
        raise NotInTargetError(f"from {before.name} to {after.name}")
    node, signed = builder.node_of(x), f"int{8 * before.itemsize}"
    # Of floats the bits, of others the integer of the same bits.
    if x.is_float:
        stored = builder.cast_to(node, before) if x.carrier != before.name else node
        whole = builder.add_method_call("view", stored, builder.dtype_of(signed))
    else:
        whole = builder.cast_to(node, signed)
    if after.name == "uint32":
        return _unsigned(builder, whole, after)
    if after.kind in "iu":
        return wrap_integer(builder, builder.cast_to(whole, "int64"), after)
    view = builder.add_method_call("view", whole, builder.dtype_of(after))
    return builder.cast_to(view, carrier(after)) if carrier(after) != after.name else view


def _is_tiny(*dtypes: np.dtype[Any]) -> bool:
    return any(each.name in ("int4", "uint4", "int2", "uint2") for each in dtypes)


# --- conversions ------------------------------------------------------------


@rule("convert_element_type")
def convert(builder: TorchGraph, x: TorchValue, *, new_dtype: DTypeLike, **_: object) -> Any:
    dtype = np.dtype(new_dtype)
    if dtype == x.dtype:
        return x
    node = builder.node_of(x)
    if dtype == np.bool_:
        return builder("ne", node, 0)
    if x.is_float and "float" not in carrier(dtype):
        return _to_integers(builder, x, node, dtype)
    if "float" in carrier(dtype):
        if x.dtype == np.uint64:
            half = builder("bitwise_and", builder("bitwise_right_shift", node, 1), (1 << 63) - 1)
            half = builder("bitwise_or", half, builder("bitwise_and", node, 1))
            large = builder("mul", builder.cast_to(half, carrier(dtype)), 2)
            small = builder.cast_to(node, carrier(dtype))
            node = builder("where", builder("lt", node, 0), large, small)
        return builder.fit_to(builder.cast_to(node, carrier(dtype)), dtype)
    return wrap_integer(builder, builder.cast_to(node, "int64"), dtype)


def _to_integers(builder: TorchGraph, x: TorchValue, node: Node, dtype: np.dtype) -> Any:
    """Numbers beyond the ends become the ends, and NaN becomes 0."""
    limits = jax.numpy.iinfo(dtype)
    wide = builder.cast_to(node, "float64")
    wide = builder("nan_to_num", builder("trunc", wide), 0.0, float("inf"), float("-inf"))
    low, high = float(limits.min), float(limits.max)
    if limits.bits < 64:
        return builder.cast_to(builder("clamp", wide, low, high), carrier(dtype))
    top = 2.0 ** (64 - (limits.min < 0))
    beyond = builder("ge", wide, top)
    inside = builder("clamp", wide, low, float(np.nextafter(top, 0)))
    if limits.min == 0:  # the bits of those that int64 does not hold
        large = builder("ge", inside, 2.0**63)
        inside = builder("where", large, builder("sub", inside, 2.0**64), inside)
    whole = builder.cast_to(inside, "int64")
    return builder("where", beyond, -1 if limits.min == 0 else int(limits.max), whole)


@rule("reduce_precision")
def reduce_precision(
    builder: TorchGraph, x: TorchValue, *, exponent_bits: int, mantissa_bits: int
) -> Any:
    node = builder.node_of(x)
    if (exponent_bits, mantissa_bits) == (8, 7):
        return builder.cast_to(builder.cast_to(node, "bfloat16"), x.carrier)
    if (exponent_bits, mantissa_bits) == (5, 10):
        rounded = builder.cast_to(builder.cast_to(node, "float16"), x.carrier)
        normal = builder("ge", builder("abs", rounded), float(np.finfo(np.float16).tiny))
        # Results below the smallest normal number are 0, as the operation specifies.
        mask = builder("logical_or", normal, builder("isnan", rounded))
        return builder("mul", rounded, builder.cast_to(mask, x.carrier))
    info = jax.numpy.finfo(x.dtype)
    if exponent_bits >= info.nexp and mantissa_bits >= info.nmant:
        return x
    raise NotInTargetError(f"to {exponent_bits} and {mantissa_bits} bits")
