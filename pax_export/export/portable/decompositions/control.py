"""Control flow, and primitives with nested programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from pax_export._jaxpr import bound, branch_for_cpu, interpret
from pax_export.export.portable.decompositions.registry import NotDecomposedError, decomposes


@decomposes("custom_linear_solve", "linear_solve", any_dtype=True)
def custom_linear_solve(
    *operands: object, const_lengths: Any, jaxprs: Any, **_: object
) -> list[Any]:
    """The program that solves, with the arrays that are for it."""
    start = const_lengths.matvec + const_lengths.vecmat
    stop = start + const_lengths.solve
    given = operands[stop + const_lengths.transpose_solve :]
    return interpret(jaxprs.solve, (*operands[start:stop], *given), bound)


@decomposes("platform_index")
def platform_index(*, platforms: Sequence[Any]) -> Any:
    """Of `jax.lax.platform_dependent`: the branch that jax takes on a CPU."""
    branch = branch_for_cpu(platforms)
    if branch is None:
        raise NotDecomposedError("of a program that is for other machines than CPUs")
    return jnp.array(branch, jnp.int32)
