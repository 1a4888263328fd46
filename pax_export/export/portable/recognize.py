"""Recognizes functions that runtimes have an operator for, by their arithmetic.

Who wrote them does not matter, jax, flax, equinox or a model itself: what is found is the
arithmetic, of numbers of 32 bits and more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pax_export._jaxpr import bound, is_literal
from pax_export.export.portable import activations as activations
from pax_export.export.portable import along_axes as along_axes
from pax_export.export.portable import kept
from pax_export.export.portable.graph import PATTERNS, Producers
from pax_export.export.portable.program import (
    CONTROL,
    PortableProgram,
    source_of,
    traced,
    with_bodies,
)

_DTYPES = frozenset({"float32"})


def recognized(program: PortableProgram) -> PortableProgram:
    """The program with calls of kept functions in place of what they are made of.

    They are found in loops and branches, too.
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

    def read(atom: Any) -> Any:
        return atom.val if is_literal(atom) else values[atom]

    def run(*operands: object) -> list[Any]:
        values.update(zip(program.jaxpr.invars, operands))
        values.update(zip(program.jaxpr.constvars, program.program.consts))
        for equation in program.jaxpr.eqns:
            match = found.get(equation.outvars[0]) if equation.outvars else None
            with source_of(equation):
                if match is None:
                    equation = with_bodies(equation, recognized)
                    results = bound(equation, [read(atom) for atom in equation.invars])
                else:
                    given = [read(atom) for atom in match.operands]
                    results = [kept.call(match.name, *given, **match.attributes)]
            values.update(zip(equation.outvars, results))
        return [read(atom) for atom in program.jaxpr.outvars]

    return replace(program, program=traced(run, program.jaxpr.invars))
