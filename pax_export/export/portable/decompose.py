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
    """Returns a program in which a target has every primitive that can be decomposed.

    An operation that is replaced becomes a call of its decomposition, in the same place
    of the program: it still says the line of the user that it comes from.

    Args:
        program: a traced program, as `jax.make_jaxpr` gives it.
        has: whether the target has the operation of an equation; asked for those of the
            decompositions too.
        normal_forms: whether the target has all of `kept.NORMAL_FORMS`; otherwise what is
            decomposed into one that it lacks stays as it is.
    """
    return rewritten(program, _Pass(has, normal_forms).replace)


def not_decomposed(equation: Any) -> str:
    """Why an operation has no decomposition; empty where none is known at all."""
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
    # What newer versions of jax keep whole until it is lowered, e.g. `searchsorted`.
    if (expand := find_expansion(equation)) is not None:
        return trace(expand, operands, {})
    return decomposition(equation.primitive.name, operands, equation.params)


class _Pass:
    def __init__(self, has: Has, normal_forms: bool):
        self._has, self._has_normal_forms = has, normal_forms
        self._inside: list[str] = []  # what is being decomposed

    def replace(self, equation: Any) -> Any:
        """The decomposition of an operation that the target lacks; None for any other.

        A normal form is left as it is, with the operations inside of it.
        """
        name = equation.primitive.name
        if name == "composite" and kept.name_of(equation.params) in kept.NORMAL_FORMS:
            if self._has_normal_forms or self._has(equation):
                return equation
            raise NotDecomposedError("into an operation that the target lacks")
        if not _is_known(equation) or self._has(equation):
            return None
        if self._inside.count(name) == _DEEPEST:
            return None  # two that are made of each other, and the target has neither
        self._inside.append(name)
        try:
            return rewritten(decomposed(equation), self.replace)
        except NotDecomposedError:
            return None  # whoever writes it says why
        finally:
            self._inside.pop()
