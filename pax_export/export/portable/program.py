"""PortableProgram, the record that passes transform, and replacement of operations in programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import jax
import jax.export
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import primitives

from pax_export._foundations.jax import without_references
from pax_export._foundations.jaxpr import (
    bind_equation,
    inner_programs,
    interpret,
    is_literal,
    is_program,
    jaxpr_of,
)
from pax_export._foundations.jaxpr import needed_equations as needed
from pax_export._foundations.types import Array, Equation, Jaxpr, TracedProgram
from pax_export.export.portable.sizes import is_number

#: Primitives with inner programs that they do not only call.
CONTROL = frozenset({"scan", "while", "cond"})
#: Returns the results of an equation from its operands.
Operate = Callable[[Any, list[Any]], Sequence[Any]]


@dataclass(frozen=True)
class Weight:
    """An array of a program that is known at export.

    Attributes:
        name: the name of the stored array; empty for a small constant.
        array: its values.
        sources: names of the weights that it was computed from; empty for an original one.
    """

    name: str
    array: Any
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class PortableProgram:
    """A traced program whose first operands are known arrays.

    Attributes:
        program: a closed jaxpr; its operands are the weights, then the inputs.
        weights: the known arrays, in the order of the operands.
        notes: parts that passes did not optimize, with reasons, for the report.
        fixed: whether weights stay as they are; the values of those that are trained are not read.
    """

    program: Any
    weights: tuple[Weight, ...]
    notes: tuple[str, ...] = field(default=())
    fixed: bool = True

    @property
    def jaxpr(self) -> Any:
        return self.program.jaxpr

    @property
    def inputs(self) -> Sequence[Any]:
        """The variables that are not weights."""
        return self.jaxpr.invars[len(self.weights) :]

    def run(self, *inputs: Array) -> list[Any]:
        """Runs the program in jax, for arrays of any sizes that fit: how passes are tested."""
        arrays = [each.array for each in self.weights]

        def function(*operands: Array) -> list[Any]:
            return evaluated(self.program, operands, _without_composites)

        structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self.jaxpr.invars]
        return list(jax.export.export(jax.jit(function))(*structs).call(*arrays, *inputs))

    def noted(self, *notes: str) -> PortableProgram:
        return replace(self, notes=tuple(dict.fromkeys((*self.notes, *notes))))

    def rebuilt(
        self,
        operate: Operate,
        wrap: Callable[[Any], Any] = lambda value: value,
        unwrap: Callable[[Any], Any] = lambda value: value,
    ) -> PortableProgram:
        """Returns the program rebuilt by ``operate(equation, operands)``.

        Args:
            operate: returns the new results of an equation.
            wrap: returns the new value of an operand of the program.
            unwrap: returns the array of a result of the program.
        """

        def run(*operands: Array) -> list[Any]:
            results = evaluated(self.program, [wrap(each) for each in operands], operate)
            return [unwrap(each) for each in results]

        return replace(self, program=traced(run, self.jaxpr.invars))


def traced(function: Callable[..., Any], like: Sequence[Any]) -> Any:
    """A function traced for operands like some variables."""
    structs = [jax.ShapeDtypeStruct(each.aval.shape, each.aval.dtype) for each in like]
    return jax.make_jaxpr(function)(*structs)


def evaluated(program: TracedProgram, arguments: Sequence[Any], operate: Operate) -> list[Any]:
    """Evaluates the operations that the results of a program need."""

    def in_place(equation: Equation, operands: list[Any]) -> Sequence[Any]:
        with source_of(equation):
            return operate(equation, operands)

    return interpret(program, arguments, in_place, equations=needed)


def _without_composites(equation: Equation, operands: list[Any]) -> Sequence[Any]:
    """The results of an equation; jax does not export composites of symbolic sizes."""
    if equation.primitive.name != "composite":
        return bind_equation(
            with_bodies(equation, lambda body: body.rebuilt(_without_composites)), operands
        )
    (inner,) = inner_programs(equation)
    return evaluated(inner, operands, _without_composites)


def with_bodies(equation: Equation, change: Callable[[PortableProgram], PortableProgram]) -> Any:
    """Returns an equation with changed loop body or branches, as programs without weights."""
    if equation.primitive.name not in CONTROL:
        return equation

    def changed(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(changed, value))
        return change(PortableProgram(value, ())).program if is_program(value) else value

    return equation.replace(params={name: changed(v) for name, v in equation.params.items()})


def uses(jaxpr: Jaxpr) -> dict[Any, int]:
    """Counts the readers of each variable, including results."""
    read = chain(*(each.invars for each in needed(jaxpr)), jaxpr.outvars)
    return Counter(atom for atom in read if not is_literal(atom))


def source_of(equation: Equation) -> AbstractContextManager[Any]:
    """Context manager whose operations have the source line and module of an equation."""
    source = equation.source_info
    return source_info_util.user_context(source.traceback, name_stack=source.name_stack)


def again(equation: Equation, operands: Sequence[Any], **changed: Any) -> Sequence[Any]:
    """The results of an equation for other operands, with some parameters changed."""
    return bind_equation(equation.replace(params={**equation.params, **changed}), operands)


def is_static(shape: Sequence[Any]) -> bool:
    return all(map(is_number, shape))


# --- Replaces operations of a program, including nested ones ---


_MAKES_REFERENCE = ("new_ref", "empty_ref")

#: Returns the program that replaces an equation; None to continue inside it, or the equation to
#: keep it.
Replace = Callable[[Any], Any]


def rewritten(program: TracedProgram, replace: Replace) -> Any:
    """Returns a program with some operations replaced by programs.

    A replaced operation becomes a call with its source line. Loops, branches and calls are entered;
    a program with several callers is rewritten once.

    Args:
        program: a traced program, as from `jax.make_jaxpr`.
        replace: a `Replace`; it is not called for the operations of its results.
    """
    return ProgramRewriter(replace).program(program)


def with_python_numbers(program: TracedProgram) -> Any:
    """Returns a program whose parameters have no integers of numpy, which `isinstance` misses."""
    return _PythonNumbers(lambda _: None).program(program)


def discharged(program: TracedProgram) -> Any:
    """Returns a program in which references (`jax.new_ref`) and hijax types are plain values."""
    return _Discharged(lambda _: None).program(program)


class ProgramRewriter:
    """Rewrites programs and those inside them; one with several callers is rewritten once."""

    def __init__(self, replace: Replace):
        self._replace = replace
        self._programs: dict[int, tuple[Any, Any]] = {}  # by id; kept alive, so that ids stay

    def program(self, program: TracedProgram) -> Any:
        if id(program) not in self._programs:
            self._programs[id(program)] = program, self._rewritten(program)
        return self._programs[id(program)][1]

    def _rewritten(self, program: TracedProgram) -> Any:
        jaxpr = jaxpr_of(program)
        equations = [self._equation(each) for each in jaxpr.eqns]
        if all(new is old for new, old in zip(equations, jaxpr.eqns)):
            return program
        changed = jaxpr.replace(eqns=equations)
        if jaxpr is program:  # since jax 0.12 a program and its jaxpr are one class
            return changed
        return program.replace(jaxpr=changed)

    def _equation(self, equation: Equation) -> Any:
        called = self._replace(equation)
        if called is equation:
            return equation
        if called is not None:
            return call_of(equation, called, equation.invars, equation.outvars)
        has_programs = any(True for _ in inner_programs(equation))
        return self._with_parameters(equation) if has_programs else equation

    def _with_parameters(self, equation: Equation) -> Any:
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

    def _equation(self, equation: Equation) -> Any:
        return self._with_parameters(equation)

    def _parameter(self, value: Any) -> Any:
        return int(value) if isinstance(value, np.integer) else super()._parameter(value)


class _Discharged(ProgramRewriter):
    def _rewritten(self, program: TracedProgram) -> Any:
        jaxpr = jaxpr_of(program)
        has_references = any(each.primitive.name in _MAKES_REFERENCE for each in jaxpr.eqns)
        if has_references or getattr(jaxpr, "is_high", False):
            program = without_references(program)
        return super()._rewritten(program)


def call_of(
    equation: Equation, program: TracedProgram, operands: Sequence[Any], results: Sequence[Any]
) -> Any:
    """Returns a call of a program that replaces an equation, with its source line."""
    params = {"call_jaxpr": program}
    return equation.replace(
        primitive=primitives.closed_call_p, params=params, invars=operands, outvars=results
    )
