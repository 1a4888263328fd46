"""Replaces operations of a program, including nested ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import primitives

from pax_export._foundations.jax import without_references
from pax_export._foundations.jaxpr import inner_programs, is_program

_MAKES_REFERENCE = ("new_ref", "empty_ref")

#: Returns the program that replaces an equation; None to continue inside it, or the equation to
#: keep it.
Replace = Callable[[Any], Any]


def rewritten(program: Any, replace: Replace) -> Any:
    """Returns a program with some operations replaced by programs.

    A replaced operation becomes a call with its source line. Loops, branches and calls are entered;
    a program with several callers is rewritten once.

    Args:
        program: a traced program, as from `jax.make_jaxpr`.
        replace: a `Replace`; it is not called for the operations of its results.
    """
    return ProgramRewriter(replace).program(program)


def with_python_numbers(program: Any) -> Any:
    """Returns a program whose parameters have no integers of numpy, which `isinstance` misses."""
    return _PythonNumbers(lambda _: None).program(program)


def discharged(program: Any) -> Any:
    """Returns a program in which references (`jax.new_ref`) and hijax types are plain values."""
    return _Discharged(lambda _: None).program(program)


class ProgramRewriter:
    """Rewrites programs and those inside them; one with several callers is rewritten once."""

    def __init__(self, replace: Replace):
        self._replace = replace
        self._programs: dict[int, tuple[Any, Any]] = {}  # by id; kept alive, so that ids stay

    def program(self, program: Any) -> Any:
        if id(program) not in self._programs:
            self._programs[id(program)] = program, self._rewritten(program)
        return self._programs[id(program)][1]

    def _rewritten(self, program: Any) -> Any:
        jaxpr = getattr(program, "jaxpr", program)
        equations = [self._equation(each) for each in jaxpr.eqns]
        if all(new is old for new, old in zip(equations, jaxpr.eqns)):
            return program
        if jaxpr is program:  # since jax 0.12 a program and its jaxpr are one class
            return program.replace(eqns=equations)
        return program.replace(jaxpr=jaxpr.replace(eqns=equations))

    def _equation(self, equation: Any) -> Any:
        called = self._replace(equation)
        if called is equation:
            return equation
        if called is not None:
            return call_of(equation, called, equation.invars, equation.outvars)
        has_programs = any(True for _ in inner_programs(equation))
        return self._with_parameters(equation) if has_programs else equation

    def _with_parameters(self, equation: Any) -> Any:
        params = {name: self._parameter(value) for name, value in equation.params.items()}
        if all(params[name] is value for name, value in equation.params.items()):
            return equation
        return equation.replace(params=params)

    def _parameter(self, value: Any) -> Any:
        if is_program(value):
            return self.program(value)
        if isinstance(value, (tuple, list)):
            new: Sequence[Any] = [self._parameter(each) for each in value]
            make: Any = getattr(value, "_make", type(value))
            return value if all(a is b for a, b in zip(new, value)) else make(new)
        return value


class _PythonNumbers(ProgramRewriter):
    """Replaces no operation, but integers of numpy among the parameters."""

    def _equation(self, equation: Any) -> Any:
        return self._with_parameters(equation)

    def _parameter(self, value: Any) -> Any:
        return int(value) if isinstance(value, np.integer) else super()._parameter(value)


class _Discharged(ProgramRewriter):
    def _rewritten(self, program: Any) -> Any:
        jaxpr = getattr(program, "jaxpr", program)
        made = any(each.primitive.name in _MAKES_REFERENCE for each in jaxpr.eqns)
        if made or getattr(jaxpr, "is_high", False):
            program = without_references(program)
        return super()._rewritten(program)


def call_of(equation: Any, program: Any, operands: Sequence[Any], results: Sequence[Any]) -> Any:
    """Returns a call of a program that replaces an equation, with its source line."""
    params = {"call_jaxpr": program}
    return equation.replace(
        primitive=primitives.closed_call_p, params=params, invars=operands, outvars=results
    )
