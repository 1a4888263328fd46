"""Elementwise mathematical functions."""

from __future__ import annotations

from typing import Any

import numpy as np

from pax_export.export.formats.tflite.builder import operators as lite
from pax_export.export.formats.tflite.builder.bounds import at_least
from pax_export.export.formats.tflite.builder.graph import Tensor
from pax_export.export.formats.tflite.rule import Operation, rule
from pax_export.export.formats.tflite.rules.arithmetic import elementwise, like


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
