"""Elementwise mathematical functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pax_export.export.formats.tflite.builder import moves
from pax_export.export.formats.tflite.builder import operators as lite
from pax_export.export.formats.tflite.builder.bounds import at_least
from pax_export.export.formats.tflite.builder.graph import Tensor
from pax_export.export.formats.tflite.rule import Operation, rule
from pax_export.export.formats.tflite.rules.arithmetic import like
from pax_export.export.formats.tflite.tensors import broadcast


def _plain(name: str, function: Callable[[Any], Any]) -> None:
    rule(name, thin=True)(lambda op, x: function(x))


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
    "exp": lambda x: exp(x),
    "log": lambda x: log(x),
    "tanh": lambda x: lite.tanh(x),
    "logistic": lambda x: lite.sigmoid(x),
    "sin": lambda x: lite.sin(x),
    "cos": lambda x: lite.cos(x),
    "sqrt": lambda x: lite.sqrt(x),
    "rsqrt": lambda x: rsqrt(x),
}.items():
    _plain(_name, _function)


@rule("atan2", thin=True)
def atan2(op: Operation, y: Tensor, x: Tensor) -> Any:
    return _atan2(y, x)


def _atan2(y: Tensor, x: Tensor) -> Any:
    # Its kernel does not broadcast.
    zero = broadcast(lambda a, b: moves.zeros_like(a) * moves.zeros_like(b), y, x)
    if y.shape.as_list() != zero.shape.as_list():
        y = y + zero
    if x.shape.as_list() != zero.shape.as_list():
        x = x + zero
    return lite.atan2(y, x)
