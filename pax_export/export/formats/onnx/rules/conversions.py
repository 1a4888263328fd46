"""Conversions between dtypes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from pax_export.export.formats.onnx.graph import GraphBuilder, rule
from pax_export.export.formats.onnx.rules.bits import widened
from pax_export.export.formats.onnx.values import Value, carrier
from pax_export.export.portable import NotInTargetError


@rule("convert_element_type")
def convert_element_type(builder: GraphBuilder, x: Value, *, new_dtype: Any, **_: object) -> Any:
    dtype = np.dtype(new_dtype)
    if dtype == x.dtype:
        return x
    if x.known is not None:
        with np.errstate(all="ignore"):
            made = np.asarray(x.known.astype(dtype)).astype(carrier(dtype))
        return Value(builder.constant(made), dtype, made.shape, made)
    thin = _converted(builder, x.thin, x, dtype) if x.thin is not None else None
    name = _converted(builder, x.name, x, dtype) if thin is None else ""
    if thin is not None:
        name = builder.expand(thin, x.shape)
    return Value(name, dtype, x.shape, None, thin, x.bare)


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
