"""Conversions between dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pax_export.export.formats.onnx.graph import Writer
from pax_export.export.formats.onnx.registry import Refused, rule
from pax_export.export.formats.onnx.values import Value, carrier

Results = Sequence[Any]


@rule("convert_element_type")
def convert_element_type(writer: Writer, results: Results, x: Value, **_: object) -> Any:
    (result,) = results
    dtype = np.dtype(result.dtype)
    if dtype == x.dtype:
        return x
    if x.known is not None:
        with np.errstate(all="ignore"):
            made = np.asarray(x.known.astype(dtype)).astype(carrier(dtype))
        return Value(writer.constant(made), dtype, made.shape, made)
    thin = _converted(writer, x.thin, x, dtype) if x.thin is not None else None
    name = _converted(writer, x.name, x, dtype) if thin is None else ""
    if thin is not None:
        name = writer.expand(thin, result.shape)
    return Value(name, dtype, result.shape, None, thin, x.bare)


def _converted(writer: Writer, name: str, x: Value, dtype: np.dtype) -> str:
    target = carrier(dtype)
    if np.dtype("uint64") in (x.dtype, dtype) and (x.is_float or target.kind == "f"):
        raise Refused("between uint64 and floating point")
    if dtype == np.bool_:
        return writer("Not", writer("Equal", name, writer.like(0, x)))
    if x.is_float and target.kind == "i":
        return _whole(writer, name, x, dtype)
    if target == x.carrier:
        return _fitted(writer, name, x.dtype, dtype)
    return _fitted(writer, writer.cast(name, target), x.dtype, dtype)


def _fitted(writer: Writer, name: str, before: np.dtype, after: np.dtype) -> str:
    """Rounds to the new dtype, unless all numbers of the old one are among its numbers."""
    try:
        holds_all = before == np.bool_ or np.promote_types(before, after) == after
    except TypeError:  # small dtypes that have no common one
        holds_all = False
    return name if holds_all else writer.fit(name, after)


def _whole(writer: Writer, name: str, x: Value, dtype: np.dtype) -> str:
    """Towards zero, the nearest that there is, and 0 for NaN, as jax does on every machine."""
    limits = jax.numpy.iinfo(dtype)
    name = writer("Where", writer("IsNaN", name), writer.like(0, x), name)
    low, high = float(limits.min), float(limits.max)
    if np.dtype(x.carrier) == np.float32 and high >= 2**31 - 1:
        high = float(np.nextafter(np.float32(2.0 ** (limits.bits - (limits.min < 0))), 0))
    elif high >= 2**53:
        high = float(np.nextafter(2.0**63, 0))
    top = writer("Greater", name, writer.like(high, x))
    clipped = writer("Clip", name, writer.like(low, x), writer.like(high, x))
    whole = writer.cast(clipped, carrier(dtype))
    if int(high) == int(limits.max):
        return whole
    return writer("Where", top, np.asarray(limits.max, carrier(dtype)), whole)


@rule("reduce_precision")
def reduce_precision(
    writer: Writer, results: Results, x: Value, *, exponent_bits: int, mantissa_bits: int
) -> Any:
    if (exponent_bits, mantissa_bits) == (8, 7):
        return writer.fit(x.name, jax.numpy.bfloat16)
    if (exponent_bits, mantissa_bits) == (5, 10):
        # What would be smaller than the smallest normal number is 0, as the operation says.
        name = writer.fit(x.name, np.float16)
        least = writer.like(np.finfo(np.float16).tiny, x)
        normal = writer("Not", writer("Less", writer("Abs", name), least))
        return writer("Mul", name, writer.cast(normal, x.carrier))
    info = jax.numpy.finfo(x.dtype)
    if exponent_bits >= info.nexp and mantissa_bits >= info.nmant:
        return x
    raise Refused(f"to {exponent_bits} and {mantissa_bits} bits")
