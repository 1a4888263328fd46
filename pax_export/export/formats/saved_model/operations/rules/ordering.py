"""Positions of extremes, and products along an axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pax_export.export.formats.saved_model.operations.graph import NodeBuilder, Output, rule


def _position(name: str, operator: str) -> None:
    @rule(name)
    def position(builder: NodeBuilder, x: Output, *, axes: Sequence[int], index_dtype: Any) -> Any:
        """The first of equal elements, or the first NaN, which TensorFlow skips."""
        axis = np.array(axes[0], np.int32)
        kind = np.dtype(np.int64 if np.dtype(index_dtype).itemsize > 4 else np.int32)
        made = builder(operator, x, axis, output_type=kind)
        if x.is_float:
            nan = builder("IsNan", x)
            first = builder("ArgMax", builder.cast(nan, np.float32), axis, output_type=kind)
            made = builder("SelectV2", builder("Any", nan, axis), first, made)
        return builder.cast(made, index_dtype)


_position("argmax", "ArgMax")
_position("argmin", "ArgMin")


@rule("cumprod")
def cumprod(builder: NodeBuilder, x: Output, *, axis: int, reverse: bool) -> Output:
    wide = builder.cast(x, np.float32) if x.is_half else x
    made = builder("Cumprod", wide, np.array(axis, np.int32), reverse=bool(reverse))
    return builder.cast(made, x.dtype)
