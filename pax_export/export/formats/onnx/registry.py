"""The table of rules that write primitives as ONNX operators.

A rule is a function ``rule(builder, *operands, **parameters)``: `operands` are `Value`s,
`parameters` those of the primitive, and `builder.results` the shapes and dtypes of the results. It
returns the name of its only result, or one per result, not yet rounded to its dtype, and raises
`NotInTargetError` for unsupported cases.
"""

from __future__ import annotations

from typing import Any

from pax_export.export.formats.onnx.values import is_number
from pax_export.export.portable import RuleTable
from pax_export.export.portable.decompositions.windows import is_plain_window

RULES = RuleTable()
rule = RULES.rule


def is_pool(equation: Any) -> bool:
    """Whether windows are those of a pool: over the last axes, padded by less than a window."""
    told, rank = equation.params, equation.invars[0].aval.ndim
    widths = told["window_dimensions"]
    if not 3 <= rank <= 5 or any(each != 1 for each in (*widths[:2], *told["window_strides"][:2])):
        return False
    ends = ((side, width) for pair, width in zip(told["padding"], widths) for side in pair)
    return is_plain_window(equation) and all(
        side < width for side, width in ends if is_number(side)
    )
