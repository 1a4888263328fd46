"""Whether two operations of a traced program are the same, whatever they are given."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

from pax_export._jax import needed_part
from pax_export._jaxpr import bound, inner_programs, is_literal, is_program

_OWN_DERIVATIVE = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


class Alike:
    """Numbers equations, so that equal ones have the same number.

    Equations are equal if they have the same primitive, parameters, literals, and
    shapes and dtypes of operands and results.  Programs among the parameters, the
    body of a loop, say, are compared operation by operation.  Functions that
    define their derivative hold it as a function of Python, new each time; so what
    it gives when traced is compared.

    Args:
        derivatives: how many derivatives of such functions are compared; they may
            differ in higher ones.
    """

    def __init__(self, derivatives: int) -> None:
        self._numbers: dict[Hashable, int] = {}
        # By id; what is numbered is kept alive, so that ids stay theirs.
        self._equations: dict[int, tuple[Any, int]] = {}
        self._programs: dict[int, tuple[Any, int]] = {}
        self._traced: list[Any] = []
        self._lower = Alike(derivatives - 1) if derivatives else None

    def numbers(self, equations: Sequence[Any]) -> np.ndarray:
        """A number for each equation."""
        return np.array([self._number(equation) for equation in equations], np.int64)

    def _number(self, equation: Any) -> int:
        if id(equation) not in self._equations:
            self._equations[id(equation)] = equation, self._of(self._kind(equation))
        return self._equations[id(equation)][1]

    def _of(self, kind: Hashable) -> int:
        try:
            return self._numbers.setdefault(kind, len(self._numbers))
        except TypeError:  # it holds what cannot be compared
            return self._numbers.setdefault(object(), len(self._numbers))

    def _kind(self, equation: Any) -> Hashable:
        if equation.effects:
            return object()  # equal to itself only
        if equation.primitive.name in _OWN_DERIVATIVE:
            derivative = self._lower and self._lower._derivative(equation)
            parameters = (self._program(next(inner_programs(equation))), derivative)
        else:
            parameters = tuple((name, self._comparable(v)) for name, v in equation.params.items())
        operands = tuple(map(_comparable_atom, equation.invars))
        results = tuple(variable.aval for variable in equation.outvars)
        return equation.primitive, id(equation.ctx), parameters, operands, results

    def _comparable(self, value: Any) -> Hashable:
        """A parameter as something that equals that of an equal equation."""
        if is_program(value):
            return self._program(value)
        if isinstance(value, (tuple, list)):
            return tuple(map(self._comparable, value))
        return value

    def _program(self, program: Any) -> int:
        if id(program) not in self._programs:
            jaxpr, constants = getattr(program, "jaxpr", program), getattr(program, "consts", ())
            self._programs[id(program)] = program, self._of(self._described(jaxpr, constants))
        return self._programs[id(program)][1]

    def _described(self, jaxpr: Any, constants: Sequence[Any]) -> Hashable:
        """A whole program: its equations, how they are wired, and the arrays that it holds."""
        wires = {variable: i for i, variable in enumerate((*jaxpr.constvars, *jaxpr.invars))}
        equations = []
        for equation in jaxpr.eqns:
            read = tuple(wires.get(a) for a in equation.invars if not is_literal(a))
            equations.append((self._number(equation), read))
            for variable in equation.outvars:
                wires[variable] = len(wires)
        results = tuple(_comparable_atom(a) if is_literal(a) else wires[a] for a in jaxpr.outvars)
        arguments = tuple(variable.aval for variable in jaxpr.invars)
        return arguments, tuple(equations), results, tuple(map(id, constants))

    def _derivative(self, equation: Any) -> Hashable:
        """What a function with a derivative of its own says that this is, as a program."""
        operands = [_struct(atom.aval) for atom in equation.invars]
        results = [_struct(variable.aval) for variable in equation.outvars]

        def pull_back(given: list[Any], cotangents: list[Any]) -> Any:
            return jax.vjp(lambda *values: list(bound(equation, values)), *given)[1](cotangents)

        try:
            program = jax.make_jaxpr(pull_back)(operands, results)
            self._traced.append(program)
            return self._described(needed_part(program), program.consts)
        except Exception:  # whatever somebody's rule raises: the export itself will say it
            return object()  # equal to itself only


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _comparable_atom(atom: Any) -> Hashable:
    """What an operand says of an equation: the value of a literal, the type of a variable."""
    if not is_literal(atom):
        return atom.aval
    if np.ndim(atom.val):
        return id(atom.val)
    return atom.aval, np.asarray(atom.val).tobytes()
