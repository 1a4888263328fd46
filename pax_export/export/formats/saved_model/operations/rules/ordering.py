"""Positions of extremes, and products along an axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pax_export.export.formats.saved_model.operations.graph import GraphBuilder, Tensor, rule
from pax_export.export.formats.saved_model.operations.rules.indexing import integers_in_order


def _position(name: str, operator: str, of_nan: str) -> None:
    @rule(name)
    def position(builder: GraphBuilder, x: Tensor, *, axes: Sequence[int], index_dtype: Any) -> Any:
        """The first of equal elements, and the first NaN, which TensorFlow skips."""
        key = integers_in_order(builder, x)
        if x.is_float:
            nan = np.array(getattr(np.iinfo(key.dtype), of_nan), key.dtype)
            key = builder("SelectV2", builder("IsNan", x), nan, key)
        kind = np.dtype(np.int64 if np.dtype(index_dtype).itemsize > 4 else np.int32)
        (axis,) = axes
        made = builder(operator, key, np.array(axis, np.int32), output_type=kind)
        return builder.cast(made, index_dtype)


_position("argmax", "ArgMax", "max")
_position("argmin", "ArgMin", "min")


@rule("cumprod")
def cumprod(builder: GraphBuilder, x: Tensor, *, axis: int, reverse: bool) -> Tensor:
    wide = builder.cast(x, np.float32) if x.is_half else x
    made = builder("Cumprod", wide, np.array(axis, np.int32), reverse=bool(reverse))
    return builder.cast(made, x.dtype)
