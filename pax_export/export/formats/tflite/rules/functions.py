"""Exponentials, trigonometry and other functions of one number, exact to rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pax_export.export.formats.tflite.rule import Operation, rule
from pax_export.export.formats.tflite.rules.arithmetic import like
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
}.items():
    _plain(_name, _function)


def horner(x: Any, coefficients: Sequence[float]) -> Any:
    """A polynomial, its highest coefficient first."""
    result = like(x, coefficients[0])
    for each in coefficients[1:]:
        result = result * x + each
    return result


def log1p(x: Any) -> Any:
    small = tf.less(tf.abs(x), like(x, 0.3))
    part = tf.where(small, x, like(x, 0)) / (2.0 + tf.where(small, x, like(x, 0)))
    near = 2.0 * part * horner(part * part, [1 / n for n in range(13, 0, -2)])
    return tf.where(small, near, log(1.0 + x))


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
