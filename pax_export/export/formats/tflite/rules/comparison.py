"""Comparisons, selection, logical and bitwise operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pax_export._foundations.types import Equation
from pax_export.export.formats.tflite.builder import moves
from pax_export.export.formats.tflite.builder import operators as lite
from pax_export.export.formats.tflite.builder.graph import Tensor, TensorLike
from pax_export.export.formats.tflite.rules.arithmetic import like, logical_shift
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
from pax_export.export.portable.decompositions.control import is_choice


def _compare(function: Callable[..., Any]) -> Callable:
    return lambda op, x, y: broadcast(function, x, y)


for _name, _function in {
    "eq": lite.equal, "ne": lite.not_equal, "lt": lite.less, "le": lite.less_equal,
    "gt": lite.greater, "ge": lite.greater_equal,
}.items():  # fmt: skip
    rule(_name, thin=True)(_compare(_function))


def ordered(x: Tensor, equal_zeros: bool) -> Any:
    """Integers in the order of these values; NaN is the largest, and both zeros may be one."""
    if x.dtype != lite.float32:
        return x
    if equal_zeros:
        x = lite.where(lite.equal(x, like(x, 0)), like(x, 0), x)
    bits = lite.bitcast(lite.where(lite.not_equal(x, x), like(x, np.nan), x), lite.int32)
    # Those of negative numbers count downwards.
    return lite.where(lite.less(bits, like(bits, 0)), like(bits, -(1 << 31)) - bits - 1, bits)


@rule("select_n", thin=True, when=is_choice)
def select(op: Operation, which: Tensor, no: Tensor, yes: Tensor) -> Any:
    known = single(which)
    if known is not None and which.shape.rank == 0:
        return yes if known else no
    return broadcast(lite.where, which, yes, no)


def _check_bits(op: Operation) -> None:
    if op.dtype == "int64":
        raise NotInTargetError("it has bits of 32-bit numbers only")


def _xor(op: Operation, x: Tensor, y: Tensor) -> Any:
    _check_bits(op)
    return broadcast(lite.bitwise_xor, x, y)


def bits_of_both(op: Operation, x: Tensor, y: Tensor) -> Any:
    """TFLite has an exclusive or only: x + y = (x ^ y) + 2 * (x & y), for all bits but the last."""
    _check_bits(op)
    half_x, half_y = _shifted(x, 1), _shifted(y, 1)
    both = half_x + half_y - broadcast(lite.bitwise_xor, half_x, half_y)
    return both + (x - 2 * half_x) * (y - 2 * half_y)


def _logical(of_truth: Callable, of_bits: Callable) -> Callable:
    def apply(op: Operation, *xs: Tensor) -> Any:
        return broadcast(of_truth, *xs) if op.dtype == "bool" else of_bits(op, *xs)

    return apply


for _name, *_functions in (
    ("and", lite.logical_and, bits_of_both),
    ("or", lite.logical_or, lambda op, x, y: _xor(op, x, y) + bits_of_both(op, x, y)),
    ("xor", lite.not_equal, _xor),
    ("not", lite.logical_not, lambda op, x: wrapped(lite.subtract(-1, x), op.dtype)),
):
    rule(_name, thin=True)(_logical(*_functions))


def _shifted(x: Tensor, bits: Any) -> Any:
    bits = like(x, bits) if is_static(bits) else bits
    return broadcast(lite.right_shift, x, bits)


_POWERS = np.array([*(1 << bit for bit in range(31)), -(1 << 31), 0], np.int64).astype(np.int32)


@rule("shift_left", thin=True)
def shift_left(op: Operation, x: Tensor, y: Tensor) -> Any:
    _check_bits(op)
    bits = _distance(y, 32)
    known = is_static(bits)
    factor = like(x, int(_POWERS[bits])) if known else moves.gather(constant(_POWERS), bits)
    return wrapped(broadcast(lite.multiply, x, factor), op.dtype)


def _distance(y: Tensor, most: int) -> Any:
    """Returns the shift; a negative one shifts out all bits, as its unsigned value would.

    A number if it is known.
    """
    known = single(y)
    if known is not None:
        return min(int(known) & 0xFFFFFFFF, most)
    return lite.where(lite.less(y, 0), like(y, most), lite.minimum(y, like(y, most)))


@rule("shift_right_arithmetic", thin=True)
def shift_right_arithmetic(op: Operation, x: Tensor, y: Tensor) -> Any:
    _check_bits(op)
    signed_x = wrapped(x, op.dtype.removeprefix("u"))
    return wrapped(_shifted(signed_x, _distance(y, 31)), op.dtype)


@rule("shift_right_logical", thin=True)
def shift_right_logical(op: Operation, x: Tensor, y: Tensor) -> Any:
    _check_bits(op)
    bits = _distance(y, 32)
    if op.dtype in NARROW:
        last = min(bits, 31) if is_static(bits) else lite.minimum(bits, 31)
        return wrapped(_shifted(_unsigned(op, x), last), op.dtype)
    if is_static(bits):
        return logical_shift(x, bits)

    def shift(x: Tensor, bits: TensorLike) -> Any:
        shifted = lite.right_shift(x, lite.minimum(bits, 31))
        # The zeros that come from the left, instead of the signs.
        fill = moves.gather(constant(_POWERS), lite.subtract(32, bits))
        result = lite.where(lite.less(x, 0), shifted + fill, shifted)
        return lite.where(lite.greater(bits, 31), like(result, 0), result)

    return broadcast(shift, x, bits)


def _unsigned(op: Operation, x: Tensor) -> Any:
    """Reads the bits of a narrow integer as an unsigned one."""
    return wrapped(x, op.dtype if op.dtype.startswith("u") else f"u{op.dtype}")


def _has_no_halves(equation: Equation) -> bool:
    dtypes = equation.invars[0].aval.dtype.name, np.dtype(equation.params["new_dtype"]).name
    return not {"float16", "bfloat16"} & set(dtypes)


@rule("bitcast_convert_type", when=_has_no_halves)
def bitcast(op: Operation, x: Tensor) -> Any:
    new = np.dtype(op.params["new_dtype"]).name
    words = ("int32", "uint32")
    if op.dtype == new or (op.dtype in words and new in words):
        return x
    if new in NARROW and new.removeprefix("u") == op.dtype.removeprefix("u"):
        return wrapped(x, new)
    if op.dtype == "float32" and new in words:
        return lite.bitcast(x, lite.int32)
    if op.dtype in words and new == "float32":
        return lite.bitcast(x, lite.float32)
    raise NotInTargetError(f"it does not read {op.dtype} as {new}.")
