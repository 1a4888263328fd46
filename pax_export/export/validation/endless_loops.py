"""Loops that do not end for random inputs, in a file of its own: `probes` is read without jax."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from pax_export._foundations.errors import ValidationError
from pax_export._foundations.jaxpr import bind_equation, called_program, interpret
from pax_export._foundations.types import Array, Equation
from pax_export.export.tracing.source_lines import source_text

#: The seconds that a loop may take for random inputs, and the iterations that are tried first.
_PATIENCE, _FIRST_TRIAL = 20.0, 1000
_MOST_ITERATIONS = 1 << 30


def check_loops_end(
    function: Callable[..., Sequence[Any]], operands: Sequence[Any], key: str
) -> None:
    """Refuses a loop that does not end for random inputs: jax could not be interrupted.

    All loops outside of other loops run with a largest number of iterations, which is doubled.

    Raises:
        ValidationError: a loop took too long.
    """
    program = jax.make_jaxpr(function)(*operands)
    chains: list[tuple[Any, ...]] = []

    @jax.jit
    def unfinished(most: Array | int, *operands: Array) -> list[Any]:
        found, callers = list[Any](), list[Any]()
        chains.clear()

        def operate(equation: Equation, values: list[Any]) -> Sequence[Any] | None:
            if called_program(equation) is not None:
                return None
            if equation.primitive.name != "while":
                return bind_equation(equation, values)
            results, is_unfinished = _bounded_loop(equation, values, most)
            found.append(is_unfinished)
            chains.append((*callers, equation))
            return results

        interpret(program, operands, operate, callers=callers)
        return found

    most, begin = _FIRST_TRIAL, time.perf_counter()
    while True:
        found = unfinished(most, *operands)
        left = [chain for chain, each in zip(chains, found) if each]
        if not left:
            return
        if (seconds := time.perf_counter() - begin) > _PATIENCE or most > _MOST_ITERATIONS:
            raise ValidationError(
                "A loop of the model does not end for random inputs.",
                where=source_text(left[0]) or key,
                got=f"{most} iterations in {seconds:.0f} s",
                write="examples=[...], arguments with which it ends; or validate=False",
            )
        most *= 2


def _bounded_loop(
    equation: Equation, values: list[Any], most: Array | int
) -> tuple[list[Any], Any]:
    """The results of a loop after some iterations, and whether it would go on."""
    params = equation.params
    first = params["cond_nconsts"]
    start = first + params["body_nconsts"]
    test, step = (jaxpr_as_fun(params[name]) for name in ("cond_jaxpr", "body_jaxpr"))

    def goes_on(state: Any) -> Any:  # for each example, under `vmap`
        return test(*values[:first], *state)[0]

    def advance(state: list[Any]) -> list[Any]:
        new_state, going = step(*values[first:start], *state), goes_on(state)
        if not going.ndim:
            return new_state
        each = [going.reshape(going.shape + (1,) * (new.ndim - going.ndim)) for new in new_state]
        return [jax.numpy.where(*three) for three in zip(each, new_state, state)]

    _, results = jax.lax.while_loop(
        lambda state: (state[0] < most) & goes_on(state[1]).any(),
        lambda state: (state[0] + 1, advance(state[1])),
        (0, list(values[start:])),
    )
    return results, goes_on(results).any()
