"""Replaces primitives that a target lacks by their decompositions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pax_export._jax import find_expansion
from pax_export.export.portable import kept
from pax_export.export.portable.decompositions import (
    DECOMPOSITIONS,
    NotDecomposedError,
    decomposition,
)
from pax_export.export.portable.rewrite import rewritten
from pax_export.export.portable.sizes import is_number, trace

Has = Callable[[Any], bool]
#: So often an operation may be part of itself, as solving a system may be of solving another.
_DEEPEST = 3


def decompose(program: Any, has: Has, *, normal_forms: bool = True) -> Any:
    """Returns a program of primitives that a target has, as far as the others can be decomposed.

    A replaced operation becomes a call of its decomposition, with the source line of the operation.

    Args:
        program: a traced program, as from `jax.make_jaxpr`.
        has: whether the target has the operation of an equation; also called for those of
            decompositions.
        normal_forms: whether the target has all of `kept.NORMAL_FORMS`; otherwise operations that
            need a missing one are not decomposed.
    """
    return rewritten(program, _Pass(has, normal_forms).replace)


def not_decomposed(equation: Any) -> str:
    """Returns why an operation has no decomposition; empty if none is known at all."""
    try:
        if _is_known(equation):
            decomposed(equation)
    except NotDecomposedError as error:
        return str(error)
    return ""


def _is_known(equation: Any) -> bool:
    return equation.primitive.name in DECOMPOSITIONS or find_expansion(equation) is not None


def decomposed(equation: Any) -> Any:
    """The decomposition of an operation that has one, as a program."""
    operands = [atom.aval for atom in equation.invars]
    results = [variable.aval for variable in equation.outvars]
    if results and all(0 in filter(is_number, each.shape) for each in results):
        return trace(
            lambda *_: [jnp.zeros(each.shape, each.dtype) for each in results], operands, {}
        )
    # Newer versions of jax keep some functions whole until lowering, e.g. `searchsorted`.
    if (expand := find_expansion(equation)) is not None:
        return trace(expand, operands, {})
    return decomposition(equation.primitive.name, operands, equation.params)


class _Pass:
    def __init__(self, has: Has, normal_forms: bool):
        self._has, self._has_normal_forms = has, normal_forms
        self._inside: list[str] = []  # primitives being decomposed

    def replace(self, equation: Any) -> Any:
        """Returns the decomposition of an operation that the target lacks; None for others.

        Normal forms are not changed, including the operations inside them.
        """
        name = equation.primitive.name
        if name == "composite" and kept.name_of(equation.params) in kept.NORMAL_FORMS:
            if self._has_normal_forms or self._has(equation):
                return equation
            raise NotDecomposedError("into an operation that the target lacks")
        if not _is_known(equation) or self._has(equation):
            return None
        if self._inside.count(name) == _DEEPEST:
            return None  # two that are decomposed into each other, and the target has neither
        self._inside.append(name)
        try:
            return rewritten(decomposed(equation), self.replace)
        except NotDecomposedError:
            return None  # the emitter reports the reason
        finally:
            self._inside.pop()
