"""Moves padding into the following convolution or pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pax_export._foundations.jaxpr import bind_equation
from pax_export._foundations.types import Equation
from pax_export.export.portable import kept
from pax_export.export.portable.arithmetic import KnownValues
from pax_export.export.portable.program import PortableProgram, again
from pax_export.export.portable.sizes import is_number

#: The padding values.
_NEUTRAL = {"conv_general_dilated": 0.0, "reduce_window_sum": 0.0}
_NEUTRAL |= {"reduce_window_max": -np.inf, "reduce_window_min": np.inf}


def padded_inside(program: PortableProgram) -> PortableProgram:
    """Returns the program with paddings moved into the convolutions and pools that read them."""
    known = KnownValues(program)
    pads: dict[Any, tuple[Any, Any]] = {}

    def operate(equation: Equation, operands: list[Any]) -> Sequence[Any]:
        name = equation.primitive.name
        if name == "pad":
            pads[equation.outvars[0]] = equation, operands[0]
        neutral = _NEUTRAL.get(name)
        found = None if neutral is None else pads.get(equation.invars[0])
        if found is not None:
            pad, x = found
            padding = _combine_padding(equation, pad)
            value = pad.invars[1]
            if padding is not None and value in known and is_neutral(equation, pad, padding):
                return again(equation, [x, *operands[1:]], padding=padding)
        return bind_equation(equation, operands)

    def is_neutral(equation: Any, pad: Any, padding: Sequence[tuple[int, int]]) -> bool:
        number = known.array(pad.invars[1])
        if number == _NEUTRAL[equation.primitive.name]:
            return True
        if equation.primitive.name != "reduce_window_max" or pad.invars[0] not in at_least:
            return False
        # Nothing is smaller, and every window has something that is no padding.
        widths = equation.params["window_dimensions"]
        inside = all(max(ends) < width for ends, width in zip(padding, widths))
        return bool(inside and number <= at_least[pad.invars[0]])

    operations = ((each.outvars, *kept.operation(each)) for each in program.jaxpr.eqns)
    clips = ((made[0], told) for made, name, told in operations if name == "clip")
    at_least = {result: told.get("low", -np.inf) for result, told in clips}
    if not any(each.primitive.name == "pad" for each in program.jaxpr.eqns):
        return program
    return program.rebuilt(operate)


def _combine_padding(equation: Any, pad: Any) -> tuple[tuple[int, int], ...] | None:
    """Returns the sum of both paddings, or None if it is not equivalent."""
    config, told = pad.params["padding_config"], equation.params
    if not all(is_number(n) for ends in (*config, *told["padding"]) for n in ends):
        return None
    if any(inner or low < 0 or high < 0 for low, high, inner in config):
        return None
    outer = [(low, high) for low, high, _ in config]
    if equation.primitive.name == "conv_general_dilated":
        batch, feature, *space = told["dimension_numbers"].lhs_spec
        if any(outer[batch] + outer[feature]):
            return None
        outer = [outer[axis] for axis in space]
    dilation = told.get("lhs_dilation", told.get("base_dilation"))
    if any(each != 1 for each in dilation):
        return None
    both = zip(told["padding"], outer)
    return tuple((int(low + more[0]), int(high + more[1])) for (low, high), more in both)
