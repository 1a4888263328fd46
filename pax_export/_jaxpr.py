"""Traced programs: going through what `jax.make_jaxpr` and `trace` give.

Nothing here is imported from jax's internals: a program is data with names that
its text shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

#: Operations that only call a program, and the parameter that holds it.
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


def is_literal(atom: Any) -> bool:
    """Whether an operand is a value that stands in the program, and no variable."""
    return hasattr(atom, "val")


def is_program(value: Any) -> bool:
    """Whether a parameter of an equation is a program."""
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def inner_programs(equation: Any) -> Iterator[Any]:
    """The programs in an equation: what it calls, the body of a loop, branches."""
    for value in equation.params.values():
        for inner in value if isinstance(value, (tuple, list)) else (value,):
            if is_program(inner):
                yield inner


def called_program(equation: Any) -> Any:
    """The program that an operation only calls; None for any other operation."""
    parameter = _WRAPPERS.get(equation.primitive.name)
    return None if parameter is None else equation.params[parameter]


def wrapped_program(equation: Any) -> Any:
    """The only program in an operation that is nothing but a call of it, whatever its name.

    It takes and gives arrays of the same shapes.  That is a guess, for operations that nothing
    else is known of: a loop over nothing but its state looks the same.  Who must be sure asks
    `called_program`, which goes by names.
    """
    called = called_program(equation)
    if called is not None:
        return called
    held = equation.params.get("callee")  # which has a transpose beside it
    programs = [held] if is_program(held) else list(inner_programs(equation))
    if len(programs) == 1:
        jaxpr = getattr(programs[0], "jaxpr", programs[0])
        if _shapes(jaxpr.invars) == _shapes(equation.invars) and (
            _shapes(jaxpr.outvars) == _shapes(equation.outvars)
        ):
            return programs[0]
    return None


def _shapes(atoms: Iterable[Any]) -> list[tuple]:
    return [tuple(getattr(atom.aval, "shape", ())) for atom in atoms]


def branch_for_cpu(platforms: Sequence[Any]) -> int | None:
    """The branch of `jax.lax.platform_dependent` that jax takes on a CPU; None without one.

    A file for one runtime has no platform of jax's.  It is compared with jax on a CPU, so it
    computes what jax does there.
    """
    found = (at for at, names in enumerate(platforms) if names is None or "cpu" in names)
    return next(found, None)


def has_own_derivative(equation: Any) -> bool:
    """Whether an operation calls a program whose derivative is given apart."""
    return equation.primitive.name in _WITH_DERIVATIVE


def _equations(program: Any, callers: tuple = ()) -> Iterator[tuple[Any, tuple]]:
    """Every operation of a traced program, each before those inside of it, and what calls it."""
    for equation in getattr(program, "jaxpr", program).eqns:
        yield equation, callers
        for inner in inner_programs(equation):
            yield from _equations(inner, (*callers, equation))


def _programs(program: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """A program and those inside of it, each once however often it is called."""
    seen = set() if seen is None else seen
    if id(program) not in seen:
        seen.add(id(program))
        yield program
        for equation in getattr(program, "jaxpr", program).eqns:
            for inner in inner_programs(equation):
                yield from _programs(inner, seen)


def _equations_once(program: Any) -> Iterator[Any]:
    """Every operation of a traced program, in no order that means something."""
    for each in _programs(program):
        yield from getattr(each, "jaxpr", each).eqns


def jaxpr_constants(program: Any) -> Iterator[Any]:
    """The arrays that a traced program closes over, those of programs inside of it too."""
    for each in _programs(program):
        yield from getattr(each, "consts", ())


def jaxpr_primitives(program: Any) -> set[str]:
    """The names of the operations in a traced program."""
    return {equation.primitive.name for equation in _equations_once(program)}


def jaxpr_size(program: Any) -> int:
    """How many operations a traced program has, with those of what it calls."""
    return sum(1 for _ in _equations(program))


def jaxpr_dtypes(program: Any) -> set[Any]:
    """The dtypes of what the operations in a traced program give."""
    results = (each for equation in _equations_once(program) for each in equation.outvars)
    return {each.aval.dtype for each in results if hasattr(each.aval, "dtype")}


def jaxpr_parameters(program: Any, primitives: Iterable[str]) -> Iterator[Any]:
    """What the operations of these names are told, wherever they stand in a program."""
    names = set(primitives)
    for equation, _ in _equations(program) if names else ():
        if equation.primitive.name in names:
            yield from equation.params.values()


def bound(equation: Any, given: Sequence[Any]) -> Sequence[Any]:
    """The results of one operation, as the program has it."""
    parameters = equation.primitive.get_bind_params(equation.params)
    with equation.ctx.manager:
        results = equation.primitive.bind(*given, **parameters)
    return results if equation.primitive.multiple_results else [results]


def evaluate(
    jaxpr: Any,
    constants: Iterable[Any],
    arguments: Iterable[Any],
    operate: Callable[[Any, list[Any]], Sequence[Any]],
    literal: Callable[[Any], Any] = lambda value: value,
) -> list[Any]:
    """Goes through a program with any values; `operate(equation, operands)` makes new ones."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments)))

    def read(atom: Any) -> Any:
        return literal(atom.val) if is_literal(atom) else values[atom]

    for equation in jaxpr.eqns:
        results = operate(equation, [read(atom) for atom in equation.invars])
        values.update(zip(equation.outvars, results))
    return [read(atom) for atom in jaxpr.outvars]


def _inlined(
    program: Any,
    arguments: Sequence[Any],
    constant: Callable[[Any], Any],
    operate: Callable[[Any, list[Any]], Sequence[Any] | None],
) -> list[Any]:
    """Goes through a traced program and, where `operate` gives None, the one that is called there.

    `constant` gives what stands for an array that a program holds.
    """

    def results(equation: Any, given: list[Any]) -> Sequence[Any]:
        found = operate(equation, given)
        if found is None:
            found = _inlined(called_program(equation), given, constant, operate)
        return found

    constants = map(constant, getattr(program, "consts", ()))
    jaxpr = getattr(program, "jaxpr", program)
    return evaluate(jaxpr, constants, arguments, results, constant)


def interpret(
    program: Any,
    arguments: Sequence[Any],
    operate: Callable[[str, list[Any], Mapping[str, Any], list[tuple]], Sequence[Any]],
    constant: Callable[[Any], Any],
) -> list[Any]:
    """Goes through a traced program with something else in place of arrays.

    ``operate(name, operands, parameters, shapes of the results)`` gives what stands for
    the results of an operation, and ``constant`` for an array that the program holds.
    """

    def of_equation(equation: Any, given: list[Any]) -> Sequence[Any] | None:
        name = equation.primitive.name
        if name in _WRAPPERS:
            return None
        shapes = [tuple(variable.aval.shape) for variable in equation.outvars]
        return operate(name, given, equation.params, shapes)

    return _inlined(program, arguments, constant, of_equation)


def jaxpr_operations(program: Any, primitives: Iterable[str]) -> Iterator[tuple[Any, ...]]:
    """The operations of these names in a program, nested ones too, each after what calls it."""
    names = set(primitives)
    for equation, callers in _equations(program):
        if equation.primitive.name in names:
            yield (*callers, equation)


def equation_place(equation: Any) -> str:
    """Where an operation stands: ``file.py:line (Layer.__call__)``; empty for one of jax's own."""
    return line_of(equation).rsplit("/", 1)[-1]


def line_of(equation: Any) -> str:
    """The line of the user's code that an operation is from: ``path/file.py:line (function)``."""
    from jax.extend import source_info_util

    return source_info_util.summarize(equation.source_info)
