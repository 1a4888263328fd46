"""The table of rules that write primitives as ONNX operators.

A rule is a function ``rule(builder, *operands, **parameters)``: `operands` are `Value`s,
`parameters` those of the primitive, and `builder.results` the shapes and dtypes of the results. It
returns the name of its only result, or one per result, not yet rounded to its dtype, and raises
`NotInTargetError` for unsupported cases.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pax_export.export.formats.onnx.values import is_number
from pax_export.export.portable import RuleTable
from pax_export.export.portable.decompositions.convolutions import is_padded_as_same

RULES = RuleTable()
rule = RULES.rule


def is_pool(equation: Any) -> bool:
    """Whether windows are those of a pool: over the last axes, padded by less than a window."""
    told, x = equation.params, equation.invars[0].aval
    widths, steps = told["window_dimensions"], told["window_strides"]
    sides = [side for pair in told["padding"] for side in pair]
    if x.dtype != np.float32 or not all(map(is_number, (*widths, *steps))):
        return False
    plain = (*widths[:2], *steps[:2], *told["base_dilation"], *told["window_dilation"])
    if not 3 <= x.ndim <= 5 or any(each != 1 for each in plain):
        return False
    if not all(map(is_number, sides)):
        return equation.primitive.name == "reduce_window_max" and is_padded_as_same(equation)
    return all(0 <= side < width for pair, width in zip(told["padding"], widths) for side in pair)
