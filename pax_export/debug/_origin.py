"""Traces a non-finite result back to the operation that produced it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from pax_export._errors import NonFiniteError
from pax_export._jax import call_with_constants, scan_operands
from pax_export._jaxpr import bind_equation, called_program, interpret, is_literal, line_of
from pax_export._types import Equation, PyTree, TracedProgram
from pax_export.core import path_in

_ADVICE = {
    "log": "jnp.log(jnp.maximum(x, 1e-12)), or jnp.log1p",
    "log1p": "an operand above -1",
    "div": "x / jnp.where(y == 0, 1, y), with jnp.where around it for the result",
    "rsqrt": "jax.lax.rsqrt(x + 1e-6)",
    "sqrt": "jnp.sqrt(jnp.maximum(x, 1e-12)): at zero its derivative is infinite",
    "exp": "jax.nn.softmax or jax.nn.logsumexp, which subtract the largest first",
    "pow": "a base above zero where the exponent is no integer",
    "dot_general": "smaller numbers, or a dtype with a larger range",
}


@dataclass(frozen=True)
class _Producer:
    """An operation of a program with its operands; None for a constant."""

    equation: Any
    path: str
    operands: Sequence[Any]
    results: Sequence[Any]
    rounds: tuple[int, ...] = ()
    line: str = ""  # of the call around it, where jax keeps none for the operation


def operation_error(
    program: TracedProgram, arguments: Sequence[Any], line: str = "", path: str = ""
) -> NonFiniteError:
    """Names the first operation with a non-finite result; `line` and `path` are the call's."""
    found = _first_producer(program, arguments, path)
    if found.equation is None:
        return NonFiniteError(
            "A constant that is returned is not finite.",
            where=found.path or "(the root)",
            got=_text(found.results[0]),
            write="finite numbers",
        )
    name, source = found.equation.primitive.name, line_of(found.equation) or found.line or line
    bad = next(value for value in found.results if is_bad(value))
    rounds = "".join(f", round {number} of a loop" for number in found.rounds)
    return NonFiniteError(
        f"{name} produced {_kind_of(bad)} from finite numbers.",
        where=f"{found.path or '(the root)'}, {source or 'an unknown line'}{rounds}",
        got=", ".join(map(_text, found.operands)),
        write=_ADVICE.get(name, "operands for which it is defined and does not overflow"),
    )


def argument_error(value: object, where: str) -> NonFiniteError:
    """The message for inputs that are not finite."""
    return NonFiniteError(
        "An argument is not finite already.", where=where, got=_text(value), write="finite numbers"
    )


def all_finite(values: Sequence[Any]) -> Any:
    """Whether each of some arrays is finite, as a value on the device."""
    # Zeros add up to zero: XLA sums numbers faster than it joins truth values, and its largest
    # number of some is no NaN on every machine.
    sums = [jnp.abs(jnp.sum(jnp.asarray(value) * 0)) for value in values if is_inexact(value)]
    return jnp.isfinite(sum(each.astype(jnp.float32) for each in sums))


def is_inexact(value: PyTree) -> bool:
    """Whether a value can have NaN or infinities in it."""
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.inexact)


def is_bad(value: PyTree) -> bool:
    """Whether NaN or an infinity is in a value."""
    return is_inexact(value) and not bool(jnp.isfinite(value).all())


def _kind_of(value: PyTree) -> str:
    if bool(jnp.isnan(value).any()):
        return "NaN"
    return "inf" if bool((value == jnp.inf).any()) else "-inf"


def _text(value: object) -> str:
    value = jnp.asarray(value)
    text = f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if not value.size or not jnp.issubdtype(value.dtype, jnp.number) or jnp.iscomplexobj(value):
        return text
    low, high = float(jnp.nanmin(value)), float(jnp.nanmax(value))
    share = float(jnp.isnan(value).mean()) if is_inexact(value) else 0.0
    return f"{text} from {low:.4g} to {high:.4g}" + (f", {share:.1%} NaN" if share else "")


def _first_producer(program: TracedProgram, arguments: Sequence[Any], around: str) -> _Producer:
    """The operation that produced the non-finite values of the results."""
    made: dict[Any, _Producer] = {}  # by variable

    def operate(equation: Equation, operands: list[Any]) -> Sequence[Any]:
        results = bind_equation(equation, operands)
        path = path_in(equation, around)
        made.update(dict.fromkeys(equation.outvars, _Producer(equation, path, operands, results)))
        return results

    outputs = zip(
        getattr(program, "jaxpr", program).outvars, interpret(program, arguments, operate)
    )
    atom, value = next((atom, value) for atom, value in outputs if is_bad(value))
    found = None if is_literal(atom) else made.get(atom)
    if found is None:
        return _Producer(None, around, (), (value,))
    while before := _bad_operand(found, made):
        found = before
    inside = _find_inside(found)
    if inside is None:
        return found
    return replace(inside, line=inside.line or line_of(found.equation))


def _bad_operand(found: _Producer, made: dict[Any, _Producer]) -> _Producer | None:
    """Returns the operation that produced a non-finite operand; None if all are finite."""
    operands = zip(found.equation.invars, found.operands)
    bad = (atom for atom, value in operands if not is_literal(atom) and is_bad(value))
    return next((made[atom] for atom in bad if atom in made), None)


def _find_inside(found: _Producer) -> _Producer | None:
    """The operation in the program that this one calls, if it calls any."""
    path, operands = found.path, list(found.operands)
    name, params = found.equation.primitive.name, found.equation.params
    if name == "scan":
        return _in_scan(params, operands, path)
    if name == "cond":
        index, *rest = operands
        branches = params["branches"]
        return _first_producer(branches[min(max(int(index), 0), len(branches) - 1)], rest, path)
    if name == "while":
        return _in_while(params, operands, path)
    inner = called_program(found.equation)
    return None if inner is None else _first_producer(inner, operands, path)


def _in_scan(params: PyTree, operands: list[Any], path: str) -> _Producer | None:
    fixed, carry, inputs = scan_operands(params, operands)
    body = params["jaxpr"]
    run = jax.jit(lambda *values: call_with_constants(body, {}, values))
    order = range(params["length"])
    for number in reversed(order) if params["reverse"] else order:
        given = [*fixed, *carry, *(each[number] for each in inputs)]
        results = run(*given)
        if any(map(is_bad, results)):
            found = _first_producer(body, given, path)
            return replace(found, rounds=(number, *found.rounds))
        carry = results[: len(carry)]
    return None


def _in_while(params: PyTree, operands: list[Any], path: str) -> _Producer | None:
    of_test, of_body = params["cond_nconsts"], params["body_nconsts"]
    test, fixed = operands[:of_test], operands[of_test : of_test + of_body]
    state, number = operands[of_test + of_body :], 0
    again, body = params["cond_jaxpr"], params["body_jaxpr"]
    goes_on = jax.jit(lambda *values: call_with_constants(again, {}, values)[0])
    run = jax.jit(lambda *values: call_with_constants(body, {}, values))
    while bool(goes_on(*test, *state)):
        results = run(*fixed, *state)
        if any(map(is_bad, results)):
            found = _first_producer(body, [*fixed, *state], path)
            return replace(found, rounds=(number, *found.rounds))
        state, number = results, number + 1
    return None
