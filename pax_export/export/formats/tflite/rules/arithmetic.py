"""Elementwise arithmetic, and reductions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from pax_export.export.formats.tflite.builder import moves
from pax_export.export.formats.tflite.builder import operators as lite
from pax_export.export.formats.tflite.builder.graph import Tensor
from pax_export.export.formats.tflite.builder.layers import at_least
from pax_export.export.formats.tflite.tensors import (
    NARROW,
    Operation,
    broadcast,
    constant,
    is_static,
    rule,
    single,
    wrapped,
)
from pax_export.export.portable import NotInTargetError
from pax_export.export.portable.decompositions.elementary import integer_pow, to_even
from pax_export.export.portable.decompositions.reductions import of_truth_values

_FLOATS = ("float32", "float16", "bfloat16")


def is_float(op: Operation) -> bool:
    return op.dtype in _FLOATS


def like(x: Tensor, value: float) -> Any:
    return lite.constant(value, x.dtype)


def negated(x: Tensor) -> Any:
    """Multiplies by -1, because TFLite's own operator returns 0 for 0 instead of -0."""
    return lite.multiply(x, like(x, -1))


def elementwise(function: Callable) -> Callable:
    return lambda op, *xs: wrapped(broadcast(function, *xs), op.dtype)


for _name, _function in {
    "abs": lite.abs, "add": lite.add, "add_any": lite.add, "ceil": lite.ceil, "floor": lite.floor,
    "mul": lite.multiply, "neg": negated, "sub": lite.subtract,
}.items():  # fmt: skip
    rule(_name, thin=True)(elementwise(_function))
rule("round", thin=True, when=to_even)(elementwise(lite.round))


@rule("sign", thin=True)
def sign(op: Operation, x: Tensor) -> Any:
    if op.dtype.startswith("uint"):
        return lite.where(lite.equal(x, 0), x, like(x, 1))
    # NaN is neither, and stays.
    positive = lite.where(lite.greater(x, like(x, 0)), like(x, 1), x)
    return lite.where(lite.less(x, like(x, 0)), like(x, -1), positive)


@rule("div", thin=True)
def div(op: Operation, x: Tensor, y: Tensor) -> Any:
    if is_float(op):
        means = _means(x, y)
        return broadcast(lite.divide, x, y) if means is None else means
    return wrapped(_quotient(op, x, y)[0], op.dtype)


def _means(x: Tensor, y: Tensor) -> Tensor | None:
    """Returns the means of a pool whose sums are divided by the size of its windows."""
    if x.made_by != "MUL" or single(y) is None:
        return None
    means, size = x.operator.inputs
    return means if means.made_by == "AVERAGE_POOL_2D" and single(y) == single(size) else None


@rule("rem", thin=True)
def rem(op: Operation, x: Tensor, y: Tensor) -> Any:
    if is_float(op):
        # Of positive numbers it is exact; the sign is that of x.
        size = broadcast(lite.floormod, lite.abs(x), lite.abs(y))
        finite = lite.logical_and(lite.is_finite(x), lite.equal(lite.abs(y), like(y, np.inf)))
        size = broadcast(lite.where, finite, lite.abs(x), size)
        return broadcast(lite.where, lite.less(x, like(x, 0)), negated(size), size)
    if op.dtype == "uint32" and single(y) is None:
        return _unsigned_rest(x, y)
    quotient, divisor = _quotient(op, x, y)
    return broadcast(lite.where, lite.equal(y, like(y, 0)), x, x - quotient * divisor)


def _quotient(op: Operation, x: Tensor, y: Tensor) -> tuple[Any, Any]:
    """Truncated quotient and safe divisor: TFLite aborts the process when it divides by 0."""
    value = single(y)
    if value is not None and value not in (0, -1) and (value > 0 or op.dtype != "uint32"):
        if op.dtype == "uint32":
            return _unsigned_quotient(x, int(value)), y
        return broadcast(lite.divide, x, y), y
    if op.dtype == "uint32":
        raise NotInTargetError("unsigned numbers are divided by a constant only.")
    # The least number by -1 ends it, too.
    safe = lite.where(
        lite.logical_or(lite.equal(y, like(y, 0)), lite.equal(y, like(y, -1))), like(y, 1), y
    )
    quotient = broadcast(lite.divide, x, safe)
    quotient = broadcast(lite.where, lite.equal(y, like(y, -1)), -quotient, quotient)
    return broadcast(lite.where, lite.equal(y, like(y, 0)), like(x, -1), quotient), y


def _unsigned_quotient(x: Tensor, value: int) -> Any:
    """Divides uint32 by a positive constant, because TFLite reads the top bit as the sign."""
    # x = 2 * half + bit, and the half has no sign.
    half = logical_shift(x, 1)
    bit = x - 2 * half
    quotient = 2 * lite.divide(half, like(x, value))
    rest = x - quotient * value  # below 2 * value
    rest_half = logical_shift(rest, 1)
    over = lite.logical_or(
        lite.greater(rest_half, like(x, (value - 1) // 2)),
        lite.logical_and(
            lite.equal(rest_half, like(x, value // 2)), lite.greater_equal(bit, like(x, value % 2))
        ),
    )
    return quotient + lite.cast(over, lite.int32)


def _unsigned_rest(x: Tensor, y: Tensor) -> Any:
    wide_x, wide_y = (converted(each, "uint32", "int64") for each in (x, y))
    safe = lite.where(lite.equal(wide_y, like(wide_y, 0)), like(wide_y, 1), wide_y)
    rest = lite.cast(broadcast(lite.floormod, wide_x, safe), lite.int32)
    return broadcast(lite.where, lite.equal(y, 0), x, rest)


def logical_shift(x: Tensor, bits: int) -> Any:
    """Shifts right, filling with zeros."""
    if bits == 0:
        return x
    if bits > 31:
        return lite.multiply(x, like(x, 0))
    shifted = lite.right_shift(x, like(x, bits))
    fill = like(x, 1 << (32 - bits)) if bits > 1 else like(x, -(1 << 31))
    return lite.where(lite.less(x, like(x, 0)), shifted + fill, shifted)


@rule("pow", thin=True)
def power(op: Operation, x: Tensor, y: Tensor) -> Any:
    exponent = single(y)
    if exponent is not None and float(exponent).is_integer():
        # TFLite's own power overflows to the largest number with such an exponent.
        function = partial(integer_pow, y=int(exponent))
        return op.call(function, op.operands[:1], [x])
    return broadcast(lite.pow, x, lite.cast(y, x.dtype))


def _chosen(op: Operation, before: Any, x: Tensor, y: Tensor) -> Any:
    if not is_float(op):
        return broadcast(lite.maximum if before is lite.less else lite.minimum, x, y)
    # Whether TFLite propagates NaN depends on the operand.
    if (value := single(x)) is not None and not np.isnan(value):
        x, y = y, x
    # Kernels of these bounds propagate NaN.
    number = single(y)
    if number == 0 and before is lite.less:
        return lite.relu(x)
    if number == 6 and before is lite.greater and (found := lite.relu6_of_relu(x)) is not None:
        return found
    chosen = broadcast(lambda a, b: lite.where(before(a, b), b, a), x, y)
    if number is not None and not np.isnan(number):
        return chosen
    return broadcast(lambda b, c: lite.where(lite.not_equal(b, b), b, c), y, chosen)


larger = rule("max", thin=True)(lambda op, x, y: _chosen(op, lite.less, x, y))
smaller = rule("min", thin=True)(lambda op, x, y: _chosen(op, lite.greater, x, y))
rule("convert_element_type", thin=True)(
    lambda op, x: converted(x, op.dtype, np.dtype(op.params["new_dtype"]).name)
)


def converted(x: Tensor, old: str, new: str) -> Any:
    if old == new:
        return x
    if new == "bool":
        return lite.not_equal(x, like(x, 0)) if old != "bool" else x
    if old == "bool":
        whole = lite.int64 if new == "int64" else lite.int32
        return lite.cast(x, lite.float32 if new in _FLOATS else whole)
    if new in _FLOATS:
        if old == "uint32":
            wide = lite.cast(x, lite.float32)
            return lite.where(lite.less(x, like(x, 0)), wide + 4294967296.0, wide)
        if old in _FLOATS and new == "float32":
            return _unrounded(x)
        x = x if x.dtype == lite.float32 else lite.cast(x, lite.float32)
        return lite.cast(lite.cast(x, new), lite.float32) if new != "float32" else x
    if old in _FLOATS:
        return _whole(x, new)
    if new in NARROW:
        return wrapped(lite.cast(x, lite.int32), new)
    if new == "int64":
        wide = lite.cast(x, lite.int64)
        return (
            lite.where(lite.less(wide, like(wide, 0)), wide + (1 << 32), wide)
            if old == "uint32"
            else wide
        )
    return lite.cast(x, lite.int32)


def _unrounded(x: Tensor) -> Any:
    """A product of halves that becomes float32 is one at once, as XLA has it."""
    if x.made_by != "CAST" or x.operator.inputs[0].made_by != "CAST":
        return x
    exact = x.operator.inputs[0].operator.inputs[0]
    source = exact
    while source.made_by in ("RESHAPE", "TRANSPOSE", "DEPTH_TO_SPACE"):
        source = source.operator.inputs[0]
    return exact if source.made_by in _PRODUCTS else x


_PRODUCTS = ("FULLY_CONNECTED", "BATCH_MATMUL", "CONV_2D", "DEPTHWISE_CONV_2D", "TRANSPOSE_CONV")


def _whole(x: Tensor, new: str) -> Any:
    """Truncates, saturates, and converts NaN to 0."""
    limits = np.iinfo(new)
    if new == "int64":
        raise NotInTargetError("float numbers become int32, and no int64.")
    x = lite.where(lite.not_equal(x, x), like(x, 0), x)
    if new in NARROW:
        bounded = lite.minimum(
            lite.maximum(x, like(x, float(limits.min))), like(x, float(limits.max))
        )
        return lite.cast(bounded, lite.int32)
    if new == "uint32":
        low = lite.maximum(x, like(x, 0))
        upper = lite.greater_equal(low, like(x, 2.0**31))
        shifted = lite.where(upper, lite.minimum(low, like(x, 2.0**32 - 256)) - 2.0**31, low)
        whole = lite.cast(shifted, lite.int32)
        whole = lite.where(upper, whole + like(whole, -(1 << 31)), whole)
        return lite.where(lite.greater_equal(x, like(x, 2.0**32)), like(whole, -1), whole)
    largest = float(np.nextafter(np.float32(2.0**31), np.float32(0)))
    whole = lite.cast(
        lite.minimum(lite.maximum(x, like(x, -(2.0**31))), like(x, largest)), lite.int32
    )
    return lite.where(lite.greater_equal(x, like(x, 2.0**31)), like(whole, 2**31 - 1), whole)


@rule("reduce_precision", thin=True)
def reduce_precision(op: Operation, x: Tensor) -> Any:
    bits = op.params["exponent_bits"], op.params["mantissa_bits"]
    names = {(5, 10): "float16", (8, 7): "bfloat16", (8, 23): "float32"}
    if bits not in names:
        raise NotInTargetError(f"it rounds to float16 and bfloat16, and not to {bits} bits.")
    return converted(x, "float64", names[bits])


@rule("dim_as_value")
def dimension(op: Operation) -> Any:
    value = op.sizes.of(op.params["dim"])
    return constant(value, np.int32) if is_static(value) else value


def exp(x: Tensor) -> Any:
    """LiteRT's fast kernel makes 0 of NaN."""
    return lite.where(lite.not_equal(x, x), x, lite.exp(x))


def log(x: Tensor) -> Any:
    """LiteRT's fast kernel makes 88 of infinity and NaN, where a processor has no AVX-512."""
    return lite.where(lite.less(x, like(x, np.inf)), lite.log(x), x)


def rsqrt(x: Tensor) -> Any:
    """LiteRT's fast kernel makes NaN of 0."""
    if at_least(x) > 0:
        return lite.rsqrt(x)
    return lite.where(lite.equal(x, like(x, 0)), like(x, np.inf), lite.rsqrt(x))


for _name, _function in {
    "cos": lite.cos, "exp": exp, "log": log, "logistic": lite.sigmoid, "rsqrt": rsqrt,
    "sin": lite.sin, "sqrt": lite.sqrt, "tanh": lite.tanh,
}.items():  # fmt: skip
    rule(_name, thin=True)(elementwise(_function))


@rule("atan2", thin=True)
def atan2(op: Operation, y: Tensor, x: Tensor) -> Any:
    """Broadcasts first, because the kernel does not."""
    return lite.atan2(op.full(y, op.shape), op.full(x, op.shape))


# --- composites that TFLite has an operator for -----------------------------


rule("gelu")(lambda op, x, *, approximate: lite.gelu(x, approximate=approximate))
rule("mean")(lambda op, x, *, axes, keepdims: lite.reduce_mean(x, list(axes), keepdims))
rule("hard_swish")(lambda op, x: lite.hard_swish(x))


@rule("softmax")
def softmax(op: Operation, x: Tensor, *, axis: int) -> Any:
    rank = len(x.shape)
    last = [*(each for each in range(rank) if each != axis), axis]
    found = lite.softmax(moves.transpose(x, last))
    return moves.transpose(found, [last.index(each) for each in range(rank)])


# --- Reductions and argmax -----------------------------------------------------------------------


def _reduction(function: Callable) -> Callable:
    def apply(op: Operation, x: Tensor) -> Any:
        axes = [int(axis) for axis in op.params["axes"]]
        return wrapped(function(x, axes), op.dtype) if axes else x

    return apply


rule("reduce_sum")(_reduction(lite.reduce_sum))
rule("reduce_prod")(_reduction(lite.reduce_prod))
rule("reduce_or", when=of_truth_values)(_reduction(lite.reduce_any))
rule("reduce_and", when=of_truth_values)(_reduction(lite.reduce_all))


@rule("argmax", "argmin")
def place_of_extreme(op: Operation, x: Tensor) -> Any:
    (axis,) = map(int, op.params["axes"])
    found = (lite.argmax if op.name == "argmax" else lite.argmin)(x, axis)
    if is_float(op):  # the first NaN counts as the extreme
        bad = lite.not_equal(x, x)
        first = lite.argmax(lite.cast(bad, lite.int32), axis)
        found = lite.where(lite.reduce_any(bad, [axis]), first, found)
    return lite.cast(found, np.dtype(op.params["index_dtype"]))


rule("cumsum")(
    lambda op, x: wrapped(lite.cumsum(x, op.params["axis"], op.params["reverse"]), op.dtype)
)
