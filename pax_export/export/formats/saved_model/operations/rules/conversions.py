"""Conversions between dtypes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from pax_export._foundations.types import DTypeLike
from pax_export.export.formats.saved_model.operations.graph import NodeBuilder, Output, rule
from pax_export.export.portable import NotInTargetError


@rule("convert_element_type")
def convert_element_type(
    builder: NodeBuilder, x: Output, *, new_dtype: DTypeLike, **_: object
) -> Any:
    dtype = np.dtype(new_dtype)
    if dtype == x.dtype:
        return x
    if dtype.name in ("int4", "uint4", "int2", "uint2"):
        raise NotInTargetError(f"to {dtype.name}")
    if x.known is not None:
        with np.errstate(all="ignore"):
            return builder.literal(np.asarray(jax.numpy.asarray(x.known).astype(dtype)))
    thin = None if x.thin is None else _converted(builder, x.thin, dtype)
    if thin is None:
        return _converted(builder, x, dtype)
    return dataclasses.replace(builder.broadcast(thin, x.shape), thin=thin)


def _converted(builder: NodeBuilder, x: Output, dtype: np.dtype) -> Output:
    if dtype == np.bool_:
        return builder("NotEqual", x, builder.like(0, x))
    if x.is_float and jax.numpy.issubdtype(dtype, jax.numpy.integer):
        return _whole(builder, x, dtype)
    return builder.cast(x, dtype)


def _whole(builder: NodeBuilder, x: Output, dtype: np.dtype) -> Output:
    """Truncates, saturates, and converts NaN to 0, as jax does."""
    shape = x.shape
    x = builder.cast(x, np.float32) if x.is_half else x
    limits = np.iinfo(dtype)
    low, high = float(limits.min), float(limits.max)
    nearest = x.dtype.type(high)
    if float(nearest) > limits.max:  # rounded up
        nearest = np.nextafter(nearest, x.dtype.type(0))
    safe = builder("SelectV2", builder("IsNan", x), builder.like(0, x), x)
    over = builder("Greater", safe, nearest)
    safe = builder("Maximum", builder("Minimum", safe, np.asarray(nearest)), builder.like(low, x))
    converted = builder.cast(safe, dtype)
    converted = builder("SelectV2", over, np.asarray(limits.max, dtype), converted)
    return dataclasses.replace(converted, shape=shape)


@rule("bitcast_convert_type")
def bitcast_convert_type(builder: NodeBuilder, x: Output, *, new_dtype: DTypeLike) -> Any:
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
