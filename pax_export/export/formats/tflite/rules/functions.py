"""Exponentials, trigonometry and other functions of one number, exact to rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pax_export.export.formats.series import ERF_INV_CENTRAL, ERF_INV_TAIL, LANCZOS
from pax_export.export.formats.tflite.rule import Operation, rule
from pax_export.export.formats.tflite.rules.arithmetic import like
from pax_export.export.formats.tflite.swaps import minus, over
from pax_export.export.formats.tflite.tensors import broadcast, tf


def _plain(name: str, function: Callable[[Any], Any]) -> None:
    rule(name, thin=True)(lambda op, x: function(x))


def exp(x: Any) -> Any:
    """LiteRT's fast kernel makes 0 of NaN."""
    return tf.where(tf.not_equal(x, x), x, tf.exp(x))


def log(x: Any) -> Any:
    """LiteRT's fast kernel makes 88 of infinity and NaN, where a processor has no AVX-512."""
    return tf.where(tf.less(x, like(x, np.inf)), tf.math.log(x), x)


def rsqrt(x: Any) -> Any:
    """LiteRT's fast kernel makes NaN of 0."""
    return tf.where(tf.equal(x, like(x, 0)), like(x, np.inf), tf.math.rsqrt(x))


for _name, _function in {
    "exp": lambda x: exp(x),
    "log": lambda x: log(x),
    "tanh": lambda x: tf.tanh(x),
    "logistic": lambda x: tf.sigmoid(x),
    "sin": lambda x: tf.sin(x),
    "cos": lambda x: tf.cos(x),
    "sqrt": lambda x: tf.sqrt(x),
    "rsqrt": lambda x: rsqrt(x),
    "tan": lambda x: tf.sin(x) / tf.cos(x),
    "exp2": lambda x: tf.pow(like(x, 2.0), x),
    "log2": lambda x: log(x) * float(1 / math.log(2)),
}.items():
    _plain(_name, _function)


def horner(x: Any, coefficients: Sequence[float]) -> Any:
    """A polynomial, its highest coefficient first."""
    result = like(x, coefficients[0])
    for each in coefficients[1:]:
        result = result * x + each
    return result


def _cut(x: Any, most: float) -> Any:
    """A number within bounds, so that what is not chosen does not overflow."""
    return tf.minimum(tf.maximum(x, like(x, -most)), like(x, most))


@rule("expm1", thin=True)
def expm1(op: Operation, x: Any) -> Any:
    near = x * horner(x, [1 / math.factorial(n) for n in range(9, 0, -1)])
    return tf.where(tf.less(tf.abs(x), like(x, 0.5)), near, exp(x) - 1.0)


@rule("log1p", thin=True)
def log1p_rule(op: Operation, x: Any) -> Any:
    return log1p(x)


def log1p(x: Any) -> Any:
    small = tf.less(tf.abs(x), like(x, 0.3))
    part = tf.where(small, x, like(x, 0)) / (2.0 + tf.where(small, x, like(x, 0)))
    near = 2.0 * part * horner(part * part, [1 / n for n in range(13, 0, -2)])
    return tf.where(small, near, log(1.0 + x))


@rule("sinh", thin=True)
def sinh(op: Operation, x: Any) -> Any:
    near = x * horner(x * x, [1 / math.factorial(n) for n in range(11, 0, -2)])
    # Half of it first: exp(x) may be infinite where its half is not.
    half = exp(x * 0.5)
    other = exp(x * -0.5)
    far = 0.5 * half * half - 0.5 * other * other
    return tf.where(tf.less(tf.abs(x), like(x, 1.0)), near, far)


@rule("cosh", thin=True)
def cosh(op: Operation, x: Any) -> Any:
    half = exp(tf.abs(x) * 0.5)
    return (0.5 * half) * half + over(0.5, half) / half


@rule("asinh", thin=True)
def asinh(op: Operation, x: Any) -> Any:
    size = tf.abs(x)
    bounded = tf.minimum(size, like(x, 1e9))
    square = bounded * bounded
    near = log1p(bounded + square / (1.0 + tf.sqrt(square + 1.0)))
    far = log(size) + math.log(2)
    found = tf.where(tf.greater(size, like(x, 1e9)), far, near)
    found = tf.where(tf.not_equal(x, x), x, found)
    return tf.where(tf.less(x, like(x, 0)), -found, found)


@rule("acosh", thin=True)
def acosh(op: Operation, x: Any) -> Any:
    bounded = tf.minimum(x, like(x, 1e9))
    above = bounded - 1.0
    near = log1p(above + tf.sqrt(above * (bounded + 1.0)))
    found = tf.where(tf.greater(x, like(x, 1e9)), log(x) + math.log(2), near)
    return tf.where(tf.less(x, like(x, 1)), like(x, np.nan), found)


@rule("atanh", thin=True)
def atanh(op: Operation, x: Any) -> Any:
    return 0.5 * log1p(2.0 * x / minus(1.0, x))


@rule("atan2", thin=True)
def atan2(op: Operation, y: Any, x: Any) -> Any:
    return _atan2(y, x)


def _atan2(y: Any, x: Any) -> Any:
    # Its kernel broadcasts nothing.
    zero = broadcast(lambda a, b: tf.zeros_like(a) * tf.zeros_like(b), y, x)
    if y.shape.as_list() != zero.shape.as_list():
        y = y + zero
    if x.shape.as_list() != zero.shape.as_list():
        x = x + zero
    return tf.math.atan2(y, x)


@rule("atan", thin=True)
def atan(op: Operation, x: Any) -> Any:
    return _atan2(x, tf.ones_like(x))


@rule("asin", thin=True)
def asin(op: Operation, x: Any) -> Any:
    return _atan2(x, tf.sqrt(minus(1.0, x) * (1.0 + x)))


@rule("acos", thin=True)
def acos(op: Operation, x: Any) -> Any:
    return _atan2(tf.sqrt(minus(1.0, x) * (1.0 + x)), x)


@rule("cbrt", thin=True)
def cbrt(op: Operation, x: Any) -> Any:
    size = tf.abs(x)
    root = tf.pow(size, like(x, 1 / 3))
    return tf.where(tf.less(x, like(x, 0)), -root, root)


#: Of erfc(x) * exp(x*x), by t = 1 / (1 + x / 2), as Press et al. give them.
_COMPLEMENT = (
    *(0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807),
    *(-0.18628806, 0.09678418, 0.37409196, 1.00002368, -1.26551223),
)


def _upper(x: Any) -> Any:
    """`erfc` of numbers that are not negative."""
    t = over(1.0, 1.0 + 0.5 * x)
    return t * tf.exp(horner(t, _COMPLEMENT) - x * x)


@rule("erf", thin=True)
def erf_rule(op: Operation, x: Any) -> Any:
    return erf(x)


def erf(x: Any) -> Any:
    bounded = _cut(x, 1.0)
    series = [(-1) ** n / (math.factorial(n) * (2 * n + 1)) for n in range(10, -1, -1)]
    near = 2 / math.sqrt(math.pi) * bounded * horner(bounded * bounded, series)
    far = 1.0 - _upper(tf.minimum(tf.abs(x), like(x, 10.0)))
    far = tf.where(tf.less(x, like(x, 0)), -far, far)
    found = tf.where(tf.less(tf.abs(x), like(x, 1.0)), near, far)
    return tf.where(tf.not_equal(x, x), x, found)


@rule("erfc", thin=True)
def erfc(op: Operation, x: Any) -> Any:
    far = _upper(tf.minimum(tf.abs(x), like(x, 10.0)))
    far = tf.where(tf.less(x, like(x, 0)), minus(2.0, far), far)
    return tf.where(
        tf.less(tf.abs(x), like(x, 0.5)), minus(1.0, erf(x)), tf.where(tf.not_equal(x, x), x, far)
    )


@rule("erf_inv", thin=True)
def erf_inv(op: Operation, x: Any) -> Any:
    w = -log1p(-x * x)
    middle = horner(w - 2.5, ERF_INV_CENTRAL)
    ends = horner(tf.sqrt(tf.maximum(w, like(w, 5.0))) - 3.0, ERF_INV_TAIL)
    found = x * tf.where(tf.less(w, like(w, 5.0)), middle, ends)
    found = tf.where(tf.equal(tf.abs(x), like(x, 1.0)), x * np.float32(np.inf), found)
    return tf.where(tf.not_equal(x, x), x, found)


@rule("lgamma", thin=True)
def lgamma(op: Operation, x: Any) -> Any:
    reflected = tf.less(x, like(x, 0.5))
    z = tf.where(reflected, -x, x - 1.0)
    t = z + 7.5
    total = like(z, 1.0)
    for number, each in enumerate(LANCZOS, 1):
        total = total + each / (z + float(number))
    found = 0.5 * math.log(2 * math.pi) + (z + 0.5) * tf.math.log(t) - t + tf.math.log(total)
    part = tf.abs(x) - tf.floor(tf.abs(x))
    part = tf.minimum(part, minus(1.0, part))
    sine = tf.math.log(tf.sin(math.pi * part))
    result = tf.where(reflected, math.log(math.pi) - sine - found, found)
    infinite = tf.logical_and(tf.less_equal(x, like(x, 0)), tf.equal(x, tf.floor(x)))
    infinite = tf.logical_or(infinite, tf.equal(tf.abs(x), like(x, np.inf)))
    return tf.where(infinite, like(x, np.inf), result)


@rule("digamma", thin=True)
def digamma(op: Operation, x: Any) -> Any:
    reflected = tf.less(x, like(x, 0.5))
    z = tf.where(reflected, minus(1.0, x), x)
    total = like(z, 0.0)
    for step in range(8):
        total = total - over(1.0, z + float(step))
    far = z + 8.0
    inverse = over(1.0, far * far)
    series = inverse * horner(inverse, [1 / 252, -1 / 120, 1 / 12])
    found = total + tf.math.log(far) - over(0.5, far) - series
    part = x + tf.floor(minus(0.5, x))  # tan has this period
    angle = math.pi * part
    mirrored = found - math.pi * tf.cos(angle) / tf.sin(angle)
    pole = tf.logical_and(tf.less_equal(x, like(x, 0)), tf.equal(x, tf.floor(x)))
    result = tf.where(pole, like(x, np.nan), tf.where(reflected, mirrored, found))
    return tf.where(tf.equal(x, like(x, 0)), like(x, -np.inf), result)
