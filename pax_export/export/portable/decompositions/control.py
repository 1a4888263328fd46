"""Control flow, selection, identities, and primitives with nested programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pax_export._foundations.jaxpr import bind_equation, branch_for_cpu, interpret, jaxpr_of
from pax_export._foundations.types import Array, Equation, TracedProgram
from pax_export.export.portable.decompositions import NotDecomposedError, decomposes
from pax_export.export.portable.kept import call


@decomposes("custom_linear_solve", any_dtype=True)
def custom_linear_solve(
    *operands: Array, const_lengths: Any, jaxprs: Any, **_: object
) -> list[Any]:
    """The program that solves, with the arrays that are for it."""
    start = const_lengths.matvec + const_lengths.vecmat
    stop = start + const_lengths.solve
    b = operands[stop + const_lengths.transpose_solve :]
    return interpret(jaxprs.solve, (*operands[start:stop], *b), bind_equation)


@decomposes(
    *"copy stop_gradient optimization_barrier device_put name pvary stage".split(),
    *"reduced_vary_cast sharding_constraint reshard layout_constraint".split(),
    any_dtype=True,
)
def unchanged(*operands: Array, **_: object) -> Sequence[Any]:
    """Returns operands unchanged, for primitives that only annotate arrays."""
    return operands


decomposes("empty", any_dtype=True)(lambda *, shape, dtype, **_: jnp.zeros(shape, dtype))
decomposes("tie", any_dtype=True)(lambda _, y: y)


@decomposes("stack", any_dtype=True)
def stack(*operands: Array, axis: int = 0) -> Any:
    return lax.concatenate([lax.expand_dims(each, (axis,)) for each in operands], axis)


@decomposes("unstack", any_dtype=True)
def unstack(x: Array, *, axis: int = 0, **_: object) -> list[Any]:
    return [call("take", x, np.int32(index), axis=axis) for index in range(x.shape[axis])]


def is_choice(equation: Equation) -> bool:
    """Whether a `select_n` is one of two arrays by truth values, as targets have it."""
    return len(equation.invars) == 3 and equation.invars[0].aval.dtype == np.bool_


@decomposes("select_n", any_dtype=True)
def select_n(which: Array, *cases: Array) -> Any:
    """Selects by booleans; numbers beyond the last case select the last one."""
    chosen = cases[0]
    for number, case in enumerate(cases[1:], 1):
        chosen = lax.select(which >= number, case, chosen)
    return chosen


def is_of_two(equation: Equation) -> bool:
    """Whether a `cond` has two branches, as targets have it."""
    return len(equation.params["branches"]) == 2


@decomposes("cond", any_dtype=True)
def branch(which: Array, *operands: Array, branches: Sequence[Any], **_: object) -> Sequence[Any]:
    """The first branch or one of the others."""
    first, *rest = branches

    def run(*values: Array) -> Sequence[Any]:
        return interpret(first, values, bind_equation)

    def others(*values: Array) -> Sequence[Any]:
        return branch(which - 1, *values, branches=rest)

    return lax.cond(which <= 0, run, others, *operands) if rest else run(*operands)


def is_of_one(equation: Equation) -> bool:
    """Returns whether a `while` is a single loop, unlike those of `jax.vmap`."""
    program = equation.params["cond_jaxpr"]
    return not jaxpr_of(program).outvars[0].aval.shape


@decomposes("while", any_dtype=True)
def while_any(
    *operands: Array,
    cond_jaxpr: TracedProgram,
    body_jaxpr: TracedProgram,
    cond_nconsts: int,
    body_nconsts: int,
    **_: Any,
) -> Sequence[Any]:
    """Continues while any condition holds; finished elements keep their state."""
    of_condition, start = operands[:cond_nconsts], operands[cond_nconsts + body_nconsts :]
    of_body = operands[cond_nconsts : cond_nconsts + body_nconsts]

    def going(state: Sequence[Any]) -> Any:
        return interpret(cond_jaxpr, (*of_condition, *state), bind_equation)[0]

    def step(state: Sequence[Any]) -> Sequence[Any]:
        flags, new = going(state), interpret(body_jaxpr, (*of_body, *state), bind_equation)
        wide = (lax.expand_dims(flags, range(flags.ndim, each.ndim)) for each in new)
        return [jnp.where(*each) for each in zip(wide, new, state)]

    return lax.while_loop(lambda state: going(state).any(), step, list(start))


@decomposes("platform_index")
def platform_index(*, platforms: Sequence[Any]) -> Any:
    """Returns jax's CPU branch of `jax.lax.platform_dependent`."""
    branch = branch_for_cpu(platforms)
    if branch is None:
        raise NotDecomposedError("of a program that is for other machines than CPUs")
    return jnp.array(branch, jnp.int32)
