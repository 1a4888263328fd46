"""Bit operations on integers and floats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pax_export._types import DTypeLike
from pax_export.export.formats.onnx.graph import Writer
from pax_export.export.formats.onnx.registry import Refused, rule
from pax_export.export.formats.onnx.values import Value, carrier

Results = Sequence[Any]


def _bits(dtype: DTypeLike) -> int:
    return jax.numpy.iinfo(dtype).bits


def _unsigned(writer: Writer, name: str, x: Value) -> str:
    """Whole numbers as those of int64 that have the same lowest bits, and no others."""
    bits = _bits(x.dtype)
    wide = name if x.carrier == np.int64 else writer.cast(name, np.int64)
    if bits == 64 or str(x.dtype).startswith("uint"):
        return wide
    return writer("BitwiseAnd", wide, np.array((1 << bits) - 1, np.int64))


def _narrow(writer: Writer, wide: str, dtype: DTypeLike) -> str:
    """The dtype that has these lowest bits."""
    if carrier(dtype) == np.int64:
        return writer.fit(wide, dtype)
    return writer.fit(writer.cast(wide, np.int32), dtype)


def shifted(writer: Writer, wide: object, amount: object, direction: str) -> str:
    """Shifts numbers of int64 as those without a sign."""
    both = [writer.cast(each, np.uint64) for each in (wide, amount)]
    return writer.cast(writer("BitShift", *both, direction=direction), np.int64)


def _inside(writer: Writer, amount: str, y: Value, bits: int) -> str | None:
    """Whether shifts are by less than all bits; a negative number is a large one without a sign."""
    if y.known is not None and np.all((y.known >= 0) & (y.known < bits)):
        return None
    limits = [np.array(0, np.int64), np.array(bits - 1, np.int64)]
    return writer("Equal", amount, writer("Clip", amount, *limits))


def _shift(direction: str) -> Callable:
    def apply(writer: Writer, results: Results, x: Value, y: Value) -> str:
        (result,) = results
        name, count = writer.spread(result.shape, x, y)
        bits = _bits(x.dtype)
        amount = count if y.carrier == np.int64 else writer.cast(count, np.int64)
        made = shifted(writer, _unsigned(writer, name, x), amount, direction)
        inside = _inside(writer, amount, y, bits)
        if inside is not None:
            made = writer("Where", inside, made, np.array(0, np.int64))
        return _narrow(writer, made, result.dtype)

    return apply


rule("shift_left")(_shift("LEFT"))
rule("shift_right_logical")(_shift("RIGHT"))


@rule("shift_right_arithmetic")
def shift_right_arithmetic(writer: Writer, results: Results, x: Value, y: Value) -> str:
    """What is negative is shifted as its complement, which is not; the first bit is the sign."""
    (result,) = results
    name, count = writer.spread(result.shape, x, y)
    wide = name if x.carrier == np.int64 else writer.cast(name, np.int64)
    amount = count if y.carrier == np.int64 else writer.cast(count, np.int64)
    bits = _bits(x.dtype)
    if str(x.dtype).startswith("uint") and bits < 64:
        top = np.array(1 << (bits - 1), np.int64)
        wide = writer("Sub", writer("BitwiseXor", wide, top), top)
    last = np.array(bits - 1, np.int64)
    inside = _inside(writer, amount, y, bits)
    if inside is not None:
        amount = writer("Where", inside, amount, last)
    negative = writer("Less", wide, np.array(0, np.int64))
    positive = writer("Where", negative, writer("BitwiseNot", wide), wide)
    made = shifted(writer, positive, amount, "RIGHT")
    made = writer("Where", negative, writer("BitwiseNot", made), made)
    return _narrow(writer, made, result.dtype)


#: How many bits the exponent and the fraction have, and what is added to the exponent.
_LAYOUTS = {"float32": (8, 23, 127), "float16": (5, 10, 15), "bfloat16": (8, 7, 127)}


@rule("bitcast_convert_type")
def bitcast_convert_type(writer: Writer, results: Results, x: Value, *, new_dtype: Any) -> Any:
    before, after = np.dtype(x.dtype), np.dtype(new_dtype)
    if before == after:
        return x
    if before.itemsize != after.itemsize or np.bool_ in (before, after):
        raise Refused(f"from {before.name} to {after.name}")
    if after.name in _LAYOUTS and before.kind in "iu":
        wide = _unsigned(writer, x.name, x)
        return _from_bits(writer, wide, *_LAYOUTS[after.name])
    if before.name in _LAYOUTS and after.kind in "iu":
        return _narrow(writer, _to_bits(writer, x, *_LAYOUTS[before.name]), after)
    if before.kind in "iu" and after.kind in "iu":
        return _narrow(writer, _unsigned(writer, x.name, x), after)
    raise Refused(f"from {before.name} to {after.name}")


def _from_bits(writer: Writer, wide: str, exponent_bits: int, bits: int, bias: int) -> str:
    """Sign, exponent and fraction are taken apart, and multiplied; no step rounds."""
    fraction = writer("BitwiseAnd", wide, np.array((1 << bits) - 1, np.int64))
    top = (1 << exponent_bits) - 1
    moved = shifted(writer, wide, np.array(bits, np.int64), "RIGHT")
    exponent = writer("BitwiseAnd", moved, np.array(top, np.int64))
    sign = shifted(writer, wide, np.array(bits + exponent_bits, np.int64), "RIGHT")
    small = writer("Equal", exponent, np.array(0, np.int64))
    hidden = writer("Where", small, np.array(0, np.int64), np.array(1 << bits, np.int64))
    number = writer.cast(writer("Add", fraction, hidden), np.float32)
    powers = [2.0 ** (max(each, 1) - bias - bits) for each in range(top)]
    scale = writer("Gather", np.array([*powers, np.inf], np.float32), exponent, axis=0)
    size = writer("Mul", number, scale)
    is_nan = writer(
        "And",
        writer("Equal", exponent, np.array(top, np.int64)),
        writer("Greater", fraction, np.array(0, np.int64)),
    )
    size = writer("Where", is_nan, np.array(np.nan, np.float32), size)
    # A product, for onnxruntime's `Where` makes 0 of -0.
    return writer("Mul", size, writer("Gather", np.array([1, -1], np.float32), sign, axis=0))


def _to_bits(writer: Writer, x: Value, exponent_bits: int, bits: int, bias: int) -> str:
    """The exponent, as the number of powers of two that are not larger."""
    size = writer("Abs", x)
    top = (1 << exponent_bits) - 1
    powers = np.array([2.0 ** (each - bias) for each in range(1, top)], np.float32)
    reached = writer("GreaterOrEqual", writer.unsqueeze(size, [x.rank]), powers)
    count = writer.cast(reached, np.int64)
    exponent = writer("ReduceSum", count, np.array([x.rank], np.int64), keepdims=0)
    scales = [2.0 ** (bias + bits - max(each, 1)) for each in range(top)]
    # Beyond the largest power is infinity, which has a fraction of 0.
    scale = writer("Gather", np.array([*scales, 1.0], np.float64), exponent, axis=0)
    number = writer("Mul", writer.cast(size, np.float64), scale)
    special = writer("Or", writer("IsInf", x), writer("IsNaN", x))
    number = writer("Where", special, np.array(0.0, np.float64), number)
    fraction = writer(
        "BitwiseAnd", writer.cast(number, np.int64), np.array((1 << bits) - 1, np.int64)
    )
    exponent = writer("Where", special, np.array(top, np.int64), exponent)
    quiet = writer(
        "Where",
        writer("IsNaN", x),
        np.array(1 << (bits - 1), np.int64),
        fraction,
    )
    sign = writer.cast(_is_negative(writer, x), np.int64)
    high = writer("Mul", sign, np.array(1 << (bits + exponent_bits), np.int64))
    middle = writer("Mul", exponent, np.array(1 << bits, np.int64))
    return writer("Add", high, writer("Add", middle, quiet))


def _is_negative(writer: Writer, x: Value) -> str:
    """Also of zeros: one divided by the negative one is below zero."""
    zero = writer.like(0, x)
    return writer("Or", writer("Less", writer("Reciprocal", x), zero), writer("Less", x, zero))
