"""The table of rules that write primitives as ONNX operators.

A rule is a function ``rule(builder, results, *operands, **parameters)``: `operands` are `Value`s,
`results` the shapes and dtypes of the results, `parameters` those of the primitive. It returns the
name of its only result, or one per result. It raises `Refused` for what ONNX cannot express; the
caller adds the operation and its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pax_export.export.formats.onnx.values import is_number
from pax_export.export.portable.decompositions.ordering import has_order

Rule = Callable[..., Any]

#: By the name of the primitive.
RULES: dict[str, Rule] = {}
#: The condition for equations of the rule; None for all.
WHEN: dict[str, Callable[[Any], bool]] = {}


class Refused(Exception):
    """A rule cannot write this in ONNX; the message has the reason."""


def rule(*names: str, when: Callable[[Any], bool] | None = None) -> Callable[[Rule], Rule]:
    """Registers a function as the rule of these primitives, for all equations or for some."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        if when is not None:
            WHEN.update(dict.fromkeys(names, when))
        return function

    return register


def has(equation: Any) -> bool:
    """Whether ONNX has the operation of an equation, by a rule."""
    name = equation.primitive.name
    return name in RULES and has_order(equation) and (name not in WHEN or WHEN[name](equation))


def is_pool(equation: Any) -> bool:
    """Whether windows are those of a pool: over the last axes, padded by less than a window."""
    told, x = equation.params, equation.invars[0].aval
    widths, steps = told["window_dimensions"], told["window_strides"]
    sides = [side for pair in told["padding"] for side in pair]
    if x.dtype != np.float32 or not all(map(is_number, (*widths, *steps, *sides))):
        return False
    plain = (*widths[:2], *steps[:2], *told["base_dilation"], *told["window_dilation"])
    if not 3 <= x.ndim <= 5 or any(each != 1 for each in plain):
        return False
    return all(0 <= side < width for pair, width in zip(told["padding"], widths) for side in pair)
