"""Complex numbers by their parts, and Fourier transforms as products with matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pax_export.export.formats.tflite.builder import layers
from pax_export.export.formats.tflite.builder import operators as lite
from pax_export.export.formats.tflite.rule import (
    NotInTfliteError,
    Operation,
    complex_rule,
)
from pax_export.export.formats.tflite.rules.functions import exp as real_exp
from pax_export.export.formats.tflite.rules.functions import log as real_log
from pax_export.export.formats.tflite.rules.functions import log1p
from pax_export.export.formats.tflite.rules.products import dot_general, product
from pax_export.export.formats.tflite.tensors import (
    Pair,
    Sizes,
    broadcast,
    constant,
    is_static,
    reshape,
    transpose,
)


def _pair(x: Any) -> Pair:
    return x if isinstance(x, Pair) else Pair(x, lite.zeros_like(x))


@complex_rule("complex", thin=True)
def joined(op: Operation, x: Any, y: Any) -> Pair:
    return Pair(*_alike(x, y))


def _alike(x: Any, y: Any) -> tuple[Any, Any]:
    """Both parts thin in the same dimensions."""
    if x.shape.as_list() == y.shape.as_list():
        return x, y
    return broadcast(lambda a, b: a + lite.zeros_like(b), x, y), broadcast(
        lambda a, b: lite.zeros_like(a) + b, x, y
    )


@complex_rule("real", thin=True)
def real(op: Operation, x: Any) -> Any:
    return x.real


@complex_rule("imag", thin=True)
def imag(op: Operation, x: Any) -> Any:
    return x.imag


@complex_rule("conj", thin=True)
def conj(op: Operation, x: Any) -> Pair:
    x = _pair(x)
    return Pair(x.real, -x.imag)


@complex_rule("neg", thin=True)
def neg(op: Operation, x: Any) -> Pair:
    return Pair(-x.real, -x.imag)


@complex_rule("add", "add_any", thin=True)
def add(op: Operation, x: Any, y: Any) -> Pair:
    x, y = _pair(x), _pair(y)
    return Pair(broadcast(lite.add, x.real, y.real), broadcast(lite.add, x.imag, y.imag))


@complex_rule("sub", thin=True)
def sub(op: Operation, x: Any, y: Any) -> Pair:
    x, y = _pair(x), _pair(y)
    return Pair(broadcast(lite.subtract, x.real, y.real), broadcast(lite.subtract, x.imag, y.imag))


@complex_rule("mul", thin=True)
def mul(op: Operation, x: Any, y: Any) -> Pair:
    return times(_pair(x), _pair(y))


def times(x: Pair, y: Pair) -> Pair:
    def part(function: Callable, a: Any, b: Any, c: Any, d: Any) -> Any:
        return function(broadcast(lite.multiply, a, b), broadcast(lite.multiply, c, d))

    return Pair(
        part(lite.subtract, x.real, y.real, x.imag, y.imag),
        part(lite.add, x.real, y.imag, x.imag, y.real),
    )


def _inverse(x: Pair) -> Pair:
    # Scaled by the larger part, whose square might be infinite.
    scale = lite.maximum(lite.abs(x.real), lite.abs(x.imag))
    a, b = x.real / scale, x.imag / scale
    size = (a * a + b * b) * scale
    return Pair(a / size, -b / size)


@complex_rule("div", thin=True)
def div(op: Operation, x: Any, y: Any) -> Pair:
    return times(_pair(x), _inverse(_pair(y)))


@complex_rule("abs", thin=True)
def absolute(op: Operation, x: Any) -> Any:
    return _size(x)


def _size(x: Pair) -> Any:
    larger = lite.maximum(lite.abs(x.real), lite.abs(x.imag))
    scale = lite.where(lite.equal(larger, 0.0), lite.ones_like(larger), larger)
    a, b = x.real / scale, x.imag / scale
    return scale * lite.sqrt(a * a + b * b) * lite.cast(lite.not_equal(larger, 0.0), lite.float32)


@complex_rule("exp", thin=True)
def exp(op: Operation, x: Any) -> Pair:
    size = real_exp(x.real)
    return Pair(size * lite.cos(x.imag), size * lite.sin(x.imag))


@complex_rule("log", thin=True)
def log(op: Operation, x: Any) -> Pair:
    return Pair(real_log(_size(x)), lite.atan2(x.imag, x.real))


@complex_rule("log1p", thin=True)
def log_1p(op: Operation, x: Any) -> Pair:
    part = x.real * (2.0 + x.real) + x.imag * x.imag
    return Pair(0.5 * log1p(part), lite.atan2(x.imag, 1.0 + x.real))


@complex_rule("sqrt", thin=True)
def sqrt(op: Operation, x: Any) -> Pair:
    size = _size(x)
    real_part = lite.sqrt(lite.maximum(0.5 * (size + x.real), 0.0))
    imag_part = lite.sqrt(lite.maximum(0.5 * (size - x.real), 0.0))
    return Pair(real_part, lite.where(lite.less(x.imag, 0.0), -imag_part, imag_part))


@complex_rule("eq", thin=True)
def equal(op: Operation, x: Any, y: Any) -> Any:
    x, y = _pair(x), _pair(y)
    same = broadcast(lite.equal, x.real, y.real)
    return broadcast(lite.logical_and, same, broadcast(lite.equal, x.imag, y.imag))


@complex_rule("ne", thin=True)
def not_equal(op: Operation, x: Any, y: Any) -> Any:
    return lite.logical_not(equal(op, x, y))


@complex_rule("is_finite", thin=True)
def is_finite(op: Operation, x: Any) -> Any:
    return lite.logical_and(*(lite.less(lite.abs(each), np.inf) for each in (x.real, x.imag)))


@complex_rule("convert_element_type", thin=True)
def convert(op: Operation, x: Any) -> Any:
    if isinstance(x, Pair):
        if np.dtype(op.params["new_dtype"]).name == "complex64":
            return x
        raise NotInTfliteError("complex numbers become no others.")
    return _pair(lite.cast(x, lite.float32))


@complex_rule("dot_general")
def dot(op: Operation, x: Any, y: Any) -> Pair:
    x, y = _pair(x), _pair(y)
    real_op = _Real(op)
    both = [
        dot_general(real_op, a, b)
        for a, b in ((x.real, y.real), (x.imag, y.imag), (x.real, y.imag), (x.imag, y.real))
    ]
    return Pair(both[0] - both[1], both[2] + both[3])


class _Real:
    """An operation as it is for each part."""

    def __init__(self, op: Operation):
        self.params, self.sizes, self.name = op.params, op.sizes, op.name
        self.operands = [_Struct(each.shape) for each in op.operands]
        self.results = [_Struct(each.shape) for each in op.results]


class _Struct:
    dtype = np.dtype("float32")

    def __init__(self, shape: Sequence[Any]):
        self.shape = shape


#: A transform of so many elements is a product with one matrix; a longer one is split in two.
_LONGEST = 128


@complex_rule("fft")
def fft(op: Operation, x: Any) -> Any:
    name = str(getattr(op.params["fft_type"], "name", op.params["fft_type"])).upper().split(".")[-1]
    lengths = list(op.params["fft_lengths"])
    rank = len(op.operands[0].shape)
    axes = list(range(rank - len(lengths), rank))
    shape = list(op.operands[0].shape)
    if name == "RFFT":
        found = _along(op, _pair(x), shape, axes[-1], lengths[-1], -1.0)
        kept = lengths[-1] // 2 + 1
        found = Pair(*(each[..., : op.sizes.of(kept)] for each in (found.real, found.imag)))
        shape[-1] = kept
        rest = axes[:-1]
    elif name == "IRFFT":
        found, rest = x, axes[:-1]
    else:
        found, rest = x, axes
    sign = 1.0 if name.startswith("I") else -1.0
    for axis in rest:
        found = _along(op, found, shape, axis, shape[axis], sign)
    if name == "IRFFT":
        found = _to_real(op, found, shape, lengths[-1])
    if sign < 0:
        return found
    count = product(lengths)
    scale = 1.0 / (
        float(count) if is_static(count) else lite.cast(op.sizes.of(count), lite.float32)
    )
    if isinstance(found, Pair):
        return Pair(found.real * scale, found.imag * scale)
    return found * scale


def _to_real(op: Operation, x: Pair, shape: Sequence[Any], length: Any) -> Any:
    """The half that is stored, and what it says of the other half, as real numbers."""
    count = op.sizes.of(shape[-1])
    sizes = op.sizes
    even = lite.cast(lite.equal(_scalar(sizes.of(length)) % 2, 0), lite.float32)
    numbers = lite.range(count)
    ends = lite.cast(lite.equal(numbers, 0), lite.float32)
    ends = ends + even * lite.cast(
        lite.equal(numbers, _scalar(sizes.of(length)) // 2), lite.float32
    )
    weight = 2.0 - lite.minimum(ends, 1.0)
    cosine, sine = _matrix(shape[-1], length, length, sizes)
    x = Pair(x.real * weight, x.imag * weight)
    rows = [reshape(p, [product(shape[:-1]), shape[-1]], sizes) for p in (x.real, x.imag)]
    found = layers.matmul(rows[0], cosine) - layers.matmul(rows[1], sine)
    return reshape(found, [*shape[:-1], length], sizes)


def _scalar(value: Any) -> Any:
    return lite.constant(value) if is_static(value) else value


def _matrix(rows: Any, columns: Any, length: Any, sizes: Sizes) -> tuple[Any, Any]:
    """Cosines and sines of 2 * pi * row * column / length."""
    if all(map(is_static, (rows, columns, length))):
        angle = 2 * math.pi * np.mod(np.outer(np.arange(rows), np.arange(columns)), length) / length
        return constant(np.cos(angle).astype("f")), constant(np.sin(angle).astype("f"))
    row, column = (lite.range(sizes.of(size)) for size in (rows, columns))
    # The product is reduced before it becomes a float, which holds 24 bits only.
    place = lite.floormod(row[:, None] * column[None, :], _scalar(sizes.of(length)))
    angle = lite.cast(place, lite.float32) * (
        2 * math.pi / lite.cast(sizes.of(length), lite.float32)
    )
    return lite.cos(angle), lite.sin(angle)


def _along(
    op: Operation, x: Pair, shape: Sequence[Any], axis: int, length: Any, sign: float
) -> Pair:
    """The transform along one axis, without a scale."""
    rank = len(shape)
    order = [*(each for each in range(rank) if each != axis), axis]
    rows = product([shape[each] for each in order[:-1]])
    moved = [reshape(transpose(p, order), [rows, length], op.sizes) for p in (x.real, x.imag)]
    found = _transform(Pair(*moved), rows, length, sign, op.sizes)
    back = [order.index(each) for each in range(rank)]
    whole = [shape[each] for each in order]
    return Pair(*(transpose(reshape(p, whole, op.sizes), back) for p in (found.real, found.imag)))


def _transform(x: Pair, rows: Any, length: Any, sign: float, sizes: Sizes) -> Pair:
    factor = _factor(length)
    if factor == 1:
        cosine, sine = _matrix(length, length, length, sizes)
        return _multiplied(x, cosine, sign * sine)
    # Columns first, then a twist, then rows: as Cooley and Tukey do it.
    one, two = int(length) // factor, factor
    inner = [_swapped(p, rows, one, two, sizes) for p in (x.real, x.imag)]
    found = _transform(Pair(*inner), rows * two, one, sign, sizes)
    cosine, sine = _matrix(two, one, length, sizes)
    cosine, sine = lite.reshape(cosine, [1, two, one]), sign * lite.reshape(sine, [1, two, one])
    parts = [reshape(p, [rows, two, one], sizes) for p in (found.real, found.imag)]
    found = times(Pair(*parts), Pair(cosine, sine))
    outer = [
        reshape(transpose(p, [0, 2, 1]), [rows * one, two], sizes) for p in (found.real, found.imag)
    ]
    found = _transform(Pair(*outer), rows * one, two, sign, sizes)
    parts = [
        reshape(transpose(reshape(p, [rows, one, two], sizes), [0, 2, 1]), [rows, length], sizes)
        for p in (found.real, found.imag)
    ]
    return Pair(*parts)


def _swapped(x: Any, rows: Any, one: int, two: int, sizes: Sizes) -> Any:
    """Rows of every `two`-th element."""
    return reshape(
        transpose(reshape(x, [rows, one, two], sizes), [0, 2, 1]), [rows * two, one], sizes
    )


def _factor(length: Any) -> int:
    """The factor of a length next to its root, if it is long and has one."""
    if not is_static(length) or length <= _LONGEST:
        return 1
    return max(each for each in range(1, math.isqrt(int(length)) + 1) if length % each == 0)


def _multiplied(x: Pair, cosine: Any, sine: Any) -> Pair:
    return Pair(
        layers.matmul(x.real, cosine) - layers.matmul(x.imag, sine),
        layers.matmul(x.real, sine) + layers.matmul(x.imag, cosine),
    )
