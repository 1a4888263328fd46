"""An interpreter of jaxprs with hooks.

Nothing here is imported from jax's internals: a program is data, with the names in its text.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from pax_export._foundations.types import Atom, Equation, Jaxpr, Literal, TracedProgram

#: The hook of `interpret`: returns the results of an equation.
Operate = Callable[[Any, list[Any]], Sequence[Any] | None]

#: Operations that only call a program, and the parameter with that program.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",  # the same, since jax 0.12
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
}
#: Those that have a derivative of their own, which is lost where the program takes their place.
_WITH_DERIVATIVE = {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}
_WRAPPERS = {**_CALLS, **_WITH_DERIVATIVE}


def is_literal(atom: Atom) -> TypeGuard[Literal]:
    """Returns whether an operand is a literal, not a variable."""
    return hasattr(atom, "val")


def jaxpr_of(program: TracedProgram) -> Jaxpr:
    """The jaxpr of a traced program, which is one class with it since jax 0.12."""
    opened: Any = getattr(program, "jaxpr", program)
    return opened


def is_program(value: object) -> bool:
    """Whether a parameter of an equation is a program."""
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def inner_programs(equation: Equation) -> Iterator[Any]:
    """Yields the programs in an equation: a called one, the body of a loop, branches."""
    for value in equation.params.values():
        for inner in value if isinstance(value, (tuple, list)) else (value,):
            if is_program(inner):
                yield inner


def called_program(equation: Equation) -> Any:
    """The program that an operation only calls; None for any other operation."""
    parameter = _WRAPPERS.get(equation.primitive.name)
    return None if parameter is None else equation.params[parameter]


def wrapped_program(equation: Equation) -> Any:
    """Returns the only program of an equation, if it has the same operands and results.

    The equation may be a call or a loop; `called_program` decides by name.
    """
    called = called_program(equation)
    if called is not None:
        return called
    inner: Any = equation.params.get("callee")  # which also has a transpose
    programs = [inner] if is_program(inner) else list(inner_programs(equation))
    if len(programs) == 1:
        jaxpr = jaxpr_of(programs[0])
        if _shapes_of(jaxpr.invars) == _shapes_of(equation.invars) and (
            _shapes_of(jaxpr.outvars) == _shapes_of(equation.outvars)
        ):
            return programs[0]
    return None


def _shapes_of(atoms: Iterable[Any]) -> list[tuple]:
    return [tuple(getattr(atom.aval, "shape", ())) for atom in atoms]


def branch_for_cpu(platforms: Sequence[Any]) -> int | None:
    """The branch of `jax.lax.platform_dependent` that jax takes on a CPU; None without one."""
    found = (at for at, names in enumerate(platforms) if names is None or "cpu" in names)
    return next(found, None)


def has_own_derivative(equation: Equation) -> bool:
    """Returns whether an operation calls a program with a custom derivative."""
    return equation.primitive.name in _WITH_DERIVATIVE


def walk_equations(program: TracedProgram, callers: tuple = ()) -> Iterator[tuple[Any, tuple]]:
    """Each equation of a program, before those nested in it, with the equations around it."""
    for equation in jaxpr_of(program).eqns:
        yield equation, callers
        for inner in inner_programs(equation):
            yield from walk_equations(inner, (*callers, equation))


def _walk_programs(program: TracedProgram, seen: set[int] | None = None) -> Iterator[Any]:
    """Yields a program and its inner programs, each once."""
    seen = set() if seen is None else seen
    if id(program) not in seen:
        seen.add(id(program))
        yield program
        for equation in jaxpr_of(program).eqns:
            for inner in inner_programs(equation):
                yield from _walk_programs(inner, seen)


def _equations_once(program: TracedProgram) -> Iterator[Any]:
    """Every operation of a traced program, in no order that means something."""
    for each in _walk_programs(program):
        yield from jaxpr_of(each).eqns


def jaxpr_constants(program: TracedProgram) -> Iterator[Any]:
    """Yields the constants of a traced program and its inner programs."""
    for each in _walk_programs(program):
        yield from getattr(each, "consts", ())


def jaxpr_primitives(program: TracedProgram) -> set[str]:
    """The names of the operations in a traced program."""
    return {equation.primitive.name for equation in _equations_once(program)}


def jaxpr_size(program: TracedProgram) -> int:
    """Returns the number of operations of a traced program and the programs it calls."""
    return sum(1 for _ in walk_equations(program))


def jaxpr_dtypes(program: TracedProgram) -> set[Any]:
    """Returns the dtypes of the results of all operations in a traced program."""
    results = (each for equation in _equations_once(program) for each in equation.outvars)
    return {each.aval.dtype for each in results if hasattr(each.aval, "dtype")}


def jaxpr_sizes(program: TracedProgram) -> set[str]:
    """Returns symbolic sizes of a traced program, as text, that are at least 1 where it can run.

    They are those of the results of all operations; jax takes a reshape of any symbolic sizes, so
    there is one more that is 1 only where it keeps the number of elements, and another.
    """
    sizes = set()
    for equation in _equations_once(program):
        shapes = [getattr(each.aval, "shape", ()) for each in equation.outvars]
        sizes.update(itertools.chain(*shapes))
        if equation.primitive.name == "reshape":
            lost = math.prod(equation.invars[0].aval.shape) - math.prod(shapes[0])
            sizes |= {1 - lost, 1 + lost}
    return {str(size) for size in sizes if not isinstance(size, int)}


def jaxpr_parameters(program: TracedProgram, primitives: Iterable[str]) -> Iterator[Any]:
    """Yields the parameters of the operations with these names, at any depth."""
    names = set(primitives)
    for equation, _ in walk_equations(program) if names else ():
        if equation.primitive.name in names:
            yield from equation.params.values()


def bind_equation(equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
    """Returns the results of one operation, executed with its parameters."""
    parameters = equation.primitive.get_bind_params(equation.params)
    with equation.ctx.manager:
        results = equation.primitive.bind(*operands, **parameters)
    return results if equation.primitive.multiple_results else [results]


def needed_equations(jaxpr: Jaxpr) -> list[Any]:
    """Returns the equations that the results of a program need, and those with effects."""
    used = {atom for atom in jaxpr.outvars if not is_literal(atom)}
    needed = []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not used.isdisjoint(equation.outvars):
            needed.append(equation)
            used.update(atom for atom in equation.invars if not is_literal(atom))
    return needed[::-1]


def interpret(
    program: TracedProgram,
    arguments: Iterable[Any],
    operate: Operate,
    *,
    constant: Callable[[Any], Any] = lambda value: value,
    equations: Callable[[Any], Iterable[Any]] = lambda jaxpr: jaxpr.eqns,
    callers: list[Any] | None = None,
) -> list[Any]:
    """Evaluates a traced program with any values in place of arrays.

    Args:
        program: a jaxpr, open or closed.
        arguments: the operands.
        operate: ``operate(equation, operands)`` returns the results, or None to evaluate the
            program that the equation calls (see `called_program`); `bind_equation` runs it in jax.
        constant: maps constants and literals.
        equations: the equations of a jaxpr to evaluate, in order.
        callers: a list that is kept equal to the enclosing equations, the outermost first.

    Returns:
        The results of the program.
    """
    stack = [] if callers is None else callers

    def run(program: TracedProgram, arguments: Iterable[Any]) -> list[Any]:
        jaxpr = jaxpr_of(program)
        inner = map(constant, getattr(program, "consts", ()))
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*inner, *arguments)))

        def read(atom: Atom) -> Any:
            return constant(atom.val) if is_literal(atom) else values[atom]

        for equation in equations(jaxpr):
            operands = [read(atom) for atom in equation.invars]
            results = operate(equation, operands)
            if results is None:
                stack.append(equation)
                try:
                    results = run(called_program(equation), operands)
                finally:
                    stack.pop()
            values.update(zip(equation.outvars, results))
        return [read(atom) for atom in jaxpr.outvars]

    return run(program, arguments)


def jaxpr_operations(
    program: TracedProgram, primitives: Iterable[str]
) -> Iterator[tuple[Any, ...]]:
    """Yields the operations with these names, at any depth, each after its callers."""
    names = set(primitives)
    for equation, callers in walk_equations(program):
        if equation.primitive.name in names:
            yield (*callers, equation)


def line_of(equation: Equation) -> str:
    """The line of the user's code that an operation is from: ``path/file.py:line (function)``."""
    return _lines().summarize(equation.source_info)


def line_now() -> str:
    """The line of the user's code that runs now, as `line_of` writes it."""
    return _lines().summarize(_lines().current())


@functools.cache
def _lines() -> Any:
    from jax.extend import source_info_util  # which loads Pallas

    # Users look for the line that calls a layer, as for the one that calls jax.
    source_info_util.register_exclusion(str(Path(__file__).parents[1]) + os.sep)
    return source_info_util
