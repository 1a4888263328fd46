"""Recognizes functions for which runtimes have an operator, by their arithmetic.

The source may be jax, flax, Equinox or the model itself: only the arithmetic is matched, for
numbers of 32 bits and more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pax_export._foundations.jaxpr import bind_equation, is_literal
from pax_export.export.portable import kept
from pax_export.export.portable import patterns as patterns
from pax_export.export.portable.graph import PATTERNS, Producers
from pax_export.export.portable.program import CONTROL, PortableProgram, with_bodies

_DTYPES = frozenset({"float32"})


def recognized(program: PortableProgram) -> PortableProgram:
    """Returns the program with calls of kept functions instead of their definitions.

    Loops and branches are searched, too.
    """
    graph = Producers(program)
    found = {}
    for equation in program.jaxpr.eqns:
        if equation.primitive.name in PATTERNS:
            (result, *_) = equation.outvars
            if result.aval.dtype.name in _DTYPES:
                matches = (match(graph, equation) for match in PATTERNS[equation.primitive.name])
                match = next((each for each in matches if each is not None), None)
                if match is not None:
                    found[result] = match
    if not found and CONTROL.isdisjoint(each.primitive.name for each in program.jaxpr.eqns):
        return program
    values: dict[Any, Any] = {}

    def operate(equation: Any, operands: list[Any]) -> Sequence[Any]:
        values.update((a, x) for a, x in zip(equation.invars, operands) if not is_literal(a))
        match = found.get(equation.outvars[0]) if equation.outvars else None
        if match is None:
            return bind_equation(with_bodies(equation, recognized), operands)
        given = [each.val if is_literal(each) else values[each] for each in match.operands]
        return [kept.call(match.name, *given, **match.attributes)]

    return program.rebuilt(operate)
