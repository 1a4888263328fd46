"""Replaces the primitives that a target lacks by what they are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import primitives

from pax_export._jax import expanded
from pax_export._jaxpr import inner_programs, is_program
from pax_export.export.portable.decompositions import (
    DECOMPOSITIONS,
    NotDecomposedError,
    decomposition,
)
from pax_export.export.portable.sizes import trace

Has = Callable[[Any], bool]
#: So often an operation may be part of itself, as solving a system may be of solving another.
_DEEPEST = 3


def decompose(program: Any, has: Has) -> Any:
    """Returns a program in which a target has every primitive that can be decomposed.

    An operation that is replaced becomes a call of its decomposition, in the same place
    of the program: it still says the line of the user that it comes from.

    Args:
        program: a traced program, as `jax.make_jaxpr` gives it.
        has: whether the target has the operation of an equation; asked for those of the
            decompositions too.
    """
    return _Pass(has).program(program)


def not_decomposed(equation: Any) -> str:
    """Why an operation has no decomposition; empty where none is known at all."""
    try:
        if _is_known(equation):
            _traced(equation)
    except NotDecomposedError as error:
        return str(error)
    return ""


def _is_known(equation: Any) -> bool:
    return equation.primitive.name in DECOMPOSITIONS or expanded(equation) is not None


def _traced(equation: Any) -> Any:
    operands = [atom.aval for atom in equation.invars]
    results = [variable.aval for variable in equation.outvars]
    if results and all(0 in filter(_is_number, each.shape) for each in results):
        return trace(
            lambda *_: [jnp.zeros(each.shape, each.dtype) for each in results], operands, {}
        )
    # What newer versions of jax keep whole until it is lowered, e.g. `searchsorted`.
    if (expand := expanded(equation)) is not None:
        return trace(expand, operands, {})
    return decomposition(equation.primitive.name, operands, equation.params)


def _is_number(size: Any) -> bool:
    return isinstance(size, int)


class _Pass:
    def __init__(self, has: Has):
        self._has = has
        self._programs: dict[int, tuple[Any, Any]] = {}  # by id; kept alive, so that ids stay
        self._inside: list[str] = []  # what is being decomposed

    def program(self, program: Any) -> Any:
        if id(program) not in self._programs:
            self._programs[id(program)] = program, self._replaced(program)
        return self._programs[id(program)][1]

    def _replaced(self, program: Any) -> Any:
        jaxpr = getattr(program, "jaxpr", program)
        equations = [self._equation(each) for each in jaxpr.eqns]
        if all(new is old for new, old in zip(equations, jaxpr.eqns)):
            return program
        if jaxpr is program:  # since jax 0.12 a program and its jaxpr are one class
            return program.replace(eqns=equations)
        return program.replace(jaxpr=jaxpr.replace(eqns=equations))

    def _equation(self, equation: Any) -> Any:
        if _is_known(equation) and not self._has(equation):
            return self._decomposed(equation)
        if not any(True for _ in inner_programs(equation)):
            return equation
        params = {name: self._parameter(value) for name, value in equation.params.items()}
        if all(params[name] is value for name, value in equation.params.items()):
            return equation
        return equation.replace(params=params)

    def _decomposed(self, equation: Any) -> Any:
        name = equation.primitive.name
        if self._inside.count(name) == _DEEPEST:
            return equation  # two that are made of each other, of which the target has neither
        self._inside.append(name)
        try:
            called = self.program(_traced(equation))
        except NotDecomposedError:
            return equation  # whoever writes it says why
        finally:
            self._inside.pop()
        params = {"call_jaxpr": called}
        return equation.replace(primitive=primitives.closed_call_p, params=params)

    def _parameter(self, value: Any) -> Any:
        if is_program(value):
            return self.program(value)
        if isinstance(value, (tuple, list)) and any(map(is_program, value)):
            new: Sequence[Any] = [self._parameter(each) for each in value]
            return value if all(a is b for a, b in zip(new, value)) else type(value)(new)
        return value
