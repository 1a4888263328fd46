"""Bit operations on integers and floats."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pax_export._foundations.types import DTypeLike
from pax_export.export.formats.onnx.graph import GraphBuilder, Operand, rule
from pax_export.export.formats.onnx.values import Value, carrier
from pax_export.export.portable import NotInTargetError


def _bits(dtype: DTypeLike) -> int:
    return jax.numpy.iinfo(dtype).bits


def _in_int64(builder: GraphBuilder, name: str, x: Value) -> str:
    return name if x.carrier == np.int64 else builder.cast(name, np.int64)


def _unsigned(builder: GraphBuilder, name: str, x: Value) -> str:
    """Returns integers as int64 with the same low bits, and zeros above."""
    bits, wide = _bits(x.dtype), _in_int64(builder, name, x)
    if bits == 64 or (str(x.dtype).startswith("uint") and bits < 32):
        return wide
    return builder("BitwiseAnd", wide, np.array((1 << bits) - 1, np.int64))


def widened(builder: GraphBuilder, x: Value) -> Value:
    """Returns uint32 as int64; the first bit is no sign."""
    name = builder("BitwiseAnd", builder.cast(x, np.int64), np.array(0xFFFFFFFF))
    known = None if x.known is None else x.known.astype(np.int64) & 0xFFFFFFFF
    return Value(name, np.dtype(np.int64), x.shape, known)


def _narrow(builder: GraphBuilder, wide: str, dtype: DTypeLike) -> str:
    return wide if carrier(dtype) == np.int64 else builder.cast(wide, np.int32)


def shifted(builder: GraphBuilder, wide: Operand, amount: Operand, direction: str) -> str:
    """Shifts the bits of int64 numbers as those of uint64."""
    both = [builder.cast(each, np.uint64) for each in (wide, amount)]
    return builder.cast(builder("BitShift", *both, direction=direction), np.int64)


def _inside(builder: GraphBuilder, amount: str, y: Value, bits: int) -> str | None:
    """Whether shifts are by less than all bits; negative numbers are large unsigned ones."""
    if y.known is not None and np.all((y.known >= 0) & (y.known < bits)):
        return None
    limits = [np.array(0, np.int64), np.array(bits - 1, np.int64)]
    return builder("Equal", amount, builder("Clip", amount, *limits))


def _known_shift(x: Value, y: Value) -> int | None:
    """Returns the shift of numbers carried by int32, if it is one known number.

    At most all bits.
    """
    if x.carrier != np.int32 or y.known is None or not y.known.size:
        return None
    by, bits = int(y.known.flat[0]), _bits(x.dtype)
    if np.any(y.known != by):
        return None
    return by if 0 <= by < bits else bits


def _power(exponent: int) -> np.ndarray:
    """Returns a power of two, or its bits, as int32."""
    return np.array(1 << exponent).astype(np.int32)


def _right(builder: GraphBuilder, name: str, by: int) -> str:
    """Numbers of int32 with their bits moved down; those from above are like the sign.

    Quotients have 24 bits at most, because OpenVINO divides int32 as float32.
    """
    if by == 0:
        return name
    if by < 8:
        halves = [builder("BitwiseAnd", name, np.int32(each)) for each in (-1 << 16, 0xFFFF)]
        return builder("Add", *(builder("Div", each, _power(by)) for each in halves))
    quotient = builder("Div", builder("BitwiseAnd", name, np.int32(-1 << by)), _power(by))
    return builder("Neg", quotient) if by == 31 else quotient  # the power is negative


def _shift(direction: str) -> Callable:
    def apply(builder: GraphBuilder, x: Value, y: Value) -> str:
        name, count = builder.spread(x, y)
        bits = _bits(x.dtype)
        by = _known_shift(x, y)
        if by is not None:
            if direction == "LEFT":
                return builder("Mul", name, _power(by))
            moved = name if by == bits else _right(builder, name, by)
            return builder("BitwiseAnd", moved, np.int32(_power(bits - by) - 1))
        amount = _in_int64(builder, count, y)
        result = shifted(builder, _unsigned(builder, name, x), amount, direction)
        inside = _inside(builder, amount, y, bits)
        if inside is not None:
            result = builder("Where", inside, result, np.array(0, np.int64))
        return _narrow(builder, result, x.dtype)

    return apply


rule("shift_left")(_shift("LEFT"))
shift_right_logical = rule("shift_right_logical")(_shift("RIGHT"))


@rule("shift_right_arithmetic")
def shift_right_arithmetic(builder: GraphBuilder, x: Value, y: Value) -> str:
    """Shifts negative numbers as their complement, which is not negative; copies the sign bit."""
    name, count = builder.spread(x, y)
    by, bits = _known_shift(x, y), _bits(x.dtype)
    if by is not None and x.dtype.itemsize == 4:
        return _right(builder, name, min(by, bits - 1))
    wide, amount = _in_int64(builder, name, x), _in_int64(builder, count, y)
    if str(x.dtype).startswith("uint") and bits < 32:
        top = np.array(1 << (bits - 1), np.int64)
        wide = builder("Sub", builder("BitwiseXor", wide, top), top)
    last = np.array(bits - 1, np.int64)
    inside = _inside(builder, amount, y, bits)
    if inside is not None:
        amount = builder("Where", inside, amount, last)
    negative = builder("Less", wide, np.array(0, np.int64))
    positive = builder("Where", negative, builder("BitwiseNot", wide), wide)
    result = shifted(builder, positive, amount, "RIGHT")
    result = builder("Where", negative, builder("BitwiseNot", result), result)
    return _narrow(builder, result, x.dtype)


#: The numbers of bits of exponent and fraction, and the bias of the exponent.
_LAYOUTS = {"float32": (8, 23, 127), "float16": (5, 10, 15), "bfloat16": (8, 7, 127)}


@rule("bitcast_convert_type")
def bitcast_convert_type(builder: GraphBuilder, x: Value, *, new_dtype: DTypeLike) -> Any:
    before, after = np.dtype(x.dtype), np.dtype(new_dtype)
    if before == after:
        return x
    if before.itemsize != after.itemsize or np.bool_ in (before, after):
        raise NotInTargetError(f"from {before.name} to {after.name}")
    if after == np.float64 and before.kind in "iu":
        return _double_of_bits(builder, x.name)
    if before == np.float64 and after.kind in "iu":
        return _bits_of_double(builder, x)
    if after.name in _LAYOUTS and before.kind in "iu":
        return _from_bits(builder, x.name, *_LAYOUTS[after.name])
    if before.name in _LAYOUTS and after.kind in "iu":
        return _narrow(builder, _to_bits(builder, x, *_LAYOUTS[before.name]), after)
    if before.kind in "iu" and after.kind in "iu":
        if before.itemsize == 4:
            return x
        return _narrow(builder, _unsigned(builder, x.name, x), after)
    raise NotInTargetError(f"from {before.name} to {after.name}")


def _from_bits(builder: GraphBuilder, name: str, exponent_bits: int, bits: int, bias: int) -> str:
    """Sign, exponent and fraction are taken apart, and multiplied; no step rounds."""
    top, none = (1 << exponent_bits) - 1, np.int32(0)
    fraction = builder("BitwiseAnd", name, np.int32((1 << bits) - 1))
    exponent = builder("BitwiseAnd", _right(builder, name, bits), np.int32(top))
    sign = builder("BitwiseAnd", _right(builder, name, bits + exponent_bits), np.int32(1))
    small = builder("Equal", exponent, none)
    hidden = builder("Where", small, none, np.int32(1 << bits))
    number = builder.cast(builder("Add", fraction, hidden), np.float32)
    powers = [2.0 ** (max(each, 1) - bias - bits) for each in range(top)]
    scale = builder("Gather", np.array([*powers, np.inf], np.float32), exponent, axis=0)
    size = builder("Mul", number, scale)
    is_nan = builder(
        "And", builder("Equal", exponent, np.int32(top)), builder("Greater", fraction, none)
    )
    size = builder("Where", is_nan, np.array(np.nan, np.float32), size)
    # A product, for onnxruntime's `Where` makes 0 of -0.
    return builder("Mul", size, builder("Gather", np.array([1, -1], np.float32), sign, axis=0))


def _to_bits(builder: GraphBuilder, x: Value, exponent_bits: int, bits: int, bias: int) -> str:
    """The exponent, as the number of powers of two that are not larger."""
    size = builder("Abs", x)
    top = (1 << exponent_bits) - 1
    powers = np.array([2.0 ** (each - bias) for each in range(1, top)], np.float32)
    reached = builder("GreaterOrEqual", builder.unsqueeze(size, [x.rank]), powers)
    count = builder.cast(reached, np.int64)
    exponent = builder("ReduceSum", count, np.array([x.rank], np.int64), keepdims=0)
    scales = [2.0 ** (bias + bits - max(each, 1)) for each in range(top)]
    # Beyond the largest power is infinity, which has a fraction of 0.
    scale = builder("Gather", np.array([*scales, 1.0], np.float64), exponent, axis=0)
    number = builder("Mul", builder.cast(size, np.float64), scale)
    special = builder("Or", builder("IsInf", x), builder("IsNaN", x))
    number = builder("Where", special, np.array(0.0, np.float64), number)
    fraction = builder(
        "BitwiseAnd", builder.cast(number, np.int64), np.array((1 << bits) - 1, np.int64)
    )
    exponent = builder("Where", special, np.array(top, np.int64), exponent)
    one = np.array(1 << (bits - 1), np.int64)
    quiet = builder("Where", builder("IsNaN", x), one, fraction)
    sign = builder.cast(_is_negative(builder, x), np.int64)
    first = -1 << 31 if bits + exponent_bits == 31 else 1 << 15  # a number of int32
    high = builder("Mul", sign, np.array(first, np.int64))
    middle = builder("Mul", exponent, np.array(1 << bits, np.int64))
    return builder("Add", high, builder("Add", middle, quiet))


def _double_of_bits(builder: GraphBuilder, name: str) -> str:
    """As `_from_bits`, of 11 bits of exponent and 52 of fraction."""
    none = np.array(0, np.int64)
    fraction = builder("BitwiseAnd", name, np.array((1 << 52) - 1, np.int64))
    exponent = shifted(builder, name, np.array(52, np.int64), "RIGHT")
    exponent = builder("BitwiseAnd", exponent, np.array(2047, np.int64))
    hidden = builder("Where", builder("Equal", exponent, none), none, np.array(1 << 52, np.int64))
    number = builder.cast(builder("Add", fraction, hidden), np.float64)
    powers = [2.0 ** (max(each, 1) - 1075) for each in range(2047)]
    size = builder("Mul", number, builder("Gather", np.array([*powers, np.inf]), exponent, axis=0))
    is_special = builder("Equal", exponent, np.array(2047, np.int64))
    is_nan = builder("And", is_special, builder("Greater", fraction, none))
    size = builder("Where", is_nan, np.array(np.nan), size)
    sign = builder.cast(builder("Less", name, none), np.int64)
    return builder("Mul", size, builder("Gather", np.array([1.0, -1.0]), sign, axis=0))


def _bits_of_double(builder: GraphBuilder, x: Value) -> str:
    """Scaled to between 1 and 2 by powers of two, which do not round."""
    size = number = builder("Abs", x)
    exponent: Any = np.array(1023, np.int64)
    halves = [1 << bit for bit in reversed(range(10))]
    for operator, sign in (("GreaterOrEqual", 1), ("Less", -1)):
        for power in halves:
            bound = 2.0**power if sign > 0 else 2.0 ** (1 - power)
            beyond = builder(operator, number, np.array(bound))
            scaled = builder("Mul", number, np.array(2.0 ** (-sign * power)))
            number = builder("Where", beyond, scaled, number)
            moved = builder("Mul", builder.cast(beyond, np.int64), np.array(sign * power))
            exponent = builder("Add", exponent, moved)
    one, zero = np.array(1.0), np.array(0.0)
    fraction = builder("Mul", builder("Sub", number, one), np.array(2.0**52))
    small = builder("Less", size, np.array(2.0**-1022))
    tiny = builder("Mul", builder("Mul", size, np.array(2.0**537)), np.array(2.0**537))
    fraction = builder("Where", small, tiny, fraction)
    exponent = builder("Where", small, np.array(0, np.int64), exponent)
    is_nan = builder("IsNaN", x)
    special = builder("Or", builder("IsInf", x), is_nan)
    fraction = builder("Where", special, zero, fraction)
    fraction = builder.cast(builder("Where", is_nan, np.array(2.0**51), fraction), np.int64)
    exponent = builder("Where", special, np.array(2047, np.int64), exponent)
    sign = builder("Mul", builder.cast(_is_negative(builder, x), np.int64), np.array(-(1 << 63)))
    middle = builder("Mul", exponent, np.array(1 << 52, np.int64))
    return builder("Add", sign, builder("Add", middle, fraction))


def _is_negative(builder: GraphBuilder, x: Value) -> str:
    """Also of zeros: one divided by the negative one is below zero."""
    zero = builder.like(0, x)
    return builder("Or", builder("Less", builder("Reciprocal", x), zero), builder("Less", x, zero))


# --- Conversions between dtypes ------------------------------------------------------------------


@rule("convert_element_type")
def convert_element_type(
    builder: GraphBuilder, x: Value, *, new_dtype: DTypeLike, **_: object
) -> Any:
    dtype = np.dtype(new_dtype)
    if dtype == x.dtype:
        return x
    if x.known is not None:
        with np.errstate(all="ignore"):
            array = np.asarray(x.known.astype(dtype)).astype(carrier(dtype))
        return Value(builder.constant(array), dtype, array.shape, array)
    if x.thin is None:
        return Value(_converted(builder, x.name, x, dtype), dtype, x.shape, bare=x.bare)
    thin = _converted(builder, x.thin, x, dtype)
    return Value(builder.expand(thin, x.shape), dtype, x.shape, None, thin, x.bare)


def _converted(builder: GraphBuilder, name: str, x: Value, dtype: np.dtype) -> str:
    target = carrier(dtype)
    if np.dtype("uint64") in (x.dtype, dtype) and (x.is_float or target.kind == "f"):
        raise NotInTargetError("between uint64 and floating point")
    if x.dtype == np.uint32 and (target.kind == "f" or target == np.int64):
        x = widened(builder, dataclasses.replace(x, name=name))
        name = x.name
    if dtype == np.bool_:
        return builder("Not", builder("Equal", name, builder.like(0, x)))
    if x.is_float and target.kind == "i":
        return _whole(builder, name, x, dtype)
    if target == x.carrier:
        return _fitted(builder, name, x.dtype, dtype)
    return _fitted(builder, builder.cast(name, target), x.dtype, dtype)


def _fitted(builder: GraphBuilder, name: str, before: np.dtype, after: np.dtype) -> str:
    """Rounds to the new dtype, unless all numbers of the old one are among its numbers."""
    try:
        holds_all = before == np.bool_ or np.promote_types(before, after) == after
    except TypeError:  # small dtypes that have no common one
        holds_all = False
    return name if holds_all else builder.fit(name, after)


def _whole(builder: GraphBuilder, name: str, x: Value, dtype: np.dtype) -> str:
    """Truncates, saturates, and converts NaN to 0, as jax does."""
    limits = jax.numpy.iinfo(dtype)
    name = builder("Where", builder("IsNaN", name), builder.like(0, x), name)
    low, high = float(limits.min), float(limits.max)
    if np.dtype(x.carrier) == np.float32 and high >= 2**31 - 1:
        high = float(np.nextafter(np.float32(2.0 ** (limits.bits - (limits.min < 0))), 0))
    elif high >= 2**53:
        high = float(np.nextafter(2.0**63, 0))
    top = builder("Greater", name, builder.like(high, x))
    clipped = builder("Clip", name, builder.like(low, x), builder.like(high, x))
    if dtype == np.uint32:  # carried as the int32 of the same bits
        turns = builder("Floor", builder("Mul", clipped, builder.like(2.0**-31, x)))
        clipped = builder("Sub", clipped, builder("Mul", turns, builder.like(2.0**32, x)))
        if x.carrier == np.float64:  # which has fractions of numbers so large
            clipped = builder("Floor", clipped)
    whole = builder.cast(clipped, carrier(dtype))
    if int(high) == int(limits.max):
        return whole
    return builder("Where", top, np.asarray(limits.max).astype(carrier(dtype)), whole)


@rule("reduce_precision")
def reduce_precision(
    builder: GraphBuilder, x: Value, *, exponent_bits: int, mantissa_bits: int
) -> Any:
    if (exponent_bits, mantissa_bits) == (8, 7):
        return builder.fit(x.name, jax.numpy.bfloat16)
    if (exponent_bits, mantissa_bits) == (5, 10):
        # Results below the smallest normal number are 0, as the operation specifies.
        name = builder.fit(x.name, np.float16)
        least = builder.like(np.finfo(np.float16).tiny, x)
        normal = builder("Not", builder("Less", builder("Abs", name), least))
        return builder("Mul", name, builder.cast(normal, x.carrier))
    info = jax.numpy.finfo(x.dtype)
    if exponent_bits >= info.nexp and mantissa_bits >= info.nmant:
        return x
    raise NotInTargetError(f"to {exponent_bits} and {mantissa_bits} bits")
