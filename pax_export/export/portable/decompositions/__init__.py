"""Replaces primitives that a target lacks by their decompositions, functions of jax.

Each primitive is defined once for all targets, in any file of this folder.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from itertools import compress
from typing import Any

import jax.numpy as jnp
from jax import lax

from pax_export._foundations.jax import find_expansion, find_sparse
from pax_export._foundations.types import Array, DTypeLike, Equation, TracedProgram
from pax_export.export.portable import kept
from pax_export.export.portable.program import rewritten
from pax_export.export.portable.sizes import has_no_elements, trace

Decomposition = Callable[..., Any]

#: By the name of the primitive: ``function(*operands, **parameters)``.
DECOMPOSITIONS: dict[str, Decomposition] = {}

_HALVES = ("float16", "bfloat16")


class NotDecomposedError(Exception):
    """A primitive has no decomposition for these operands; the message has the reason."""


def decomposes(
    *names: str, single: bool = False, double: bool = True, any_dtype: bool = False
) -> Callable[[Decomposition], Decomposition]:
    """Registers a function as the decomposition of these primitives.

    The function takes the operands, and the parameters of the primitive by name, but `accuracy`,
    which is of XLA's approximations; it returns the only result, or a sequence of results.

    Args:
        names: the names of the primitives.
        single: compute smaller dtypes in float32, and round the result.
        double: whether the result has float64 accuracy.
        any_dtype: accept complex numbers, too.
    """

    def register(function: Decomposition) -> Decomposition:
        def run(*operands: Array, accuracy: object = None, **parameters: Any) -> Any:
            dtypes = {str(each.dtype) for each in operands}
            if not any_dtype and any(name.startswith("complex") for name in dtypes):
                raise NotDecomposedError("of complex numbers")
            if "float64" in dtypes and not double:
                raise NotDecomposedError("of float64")
            if not single or dtypes.isdisjoint(_HALVES):
                return function(*operands, **parameters)
            wide = [each.astype(jnp.float32) for each in operands]
            return function(*wide, **parameters).astype(operands[0].dtype)

        DECOMPOSITIONS.update(dict.fromkeys(names, run))
        return function

    return register


def least(dtype: DTypeLike) -> Any:
    """Returns the identity of the maximum."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.array(-jnp.inf, dtype)
    return jnp.array(False if dtype == jnp.bool_ else jnp.iinfo(dtype).min, dtype)


def greatest(dtype: DTypeLike) -> Any:
    """Returns the identity of the minimum."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.array(jnp.inf, dtype)
    return jnp.array(True if dtype == jnp.bool_ else jnp.iinfo(dtype).max, dtype)


# --- Replaces the primitives of a program ---


Has = Callable[[Any], bool]
#: So often an operation may be part of itself, as solving a system may be of solving another.
_DEEPEST = 3


def decompose(program: TracedProgram, has: Has, *, normal_forms: bool = True) -> Any:
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


def not_decomposed(equation: Equation) -> str:
    """Returns why an operation has no decomposition; empty if none is known at all."""
    try:
        if third_party_implementation(equation) is not None or _is_known(equation):
            decomposed(equation)
    except NotDecomposedError as error:
        return str(error)
    return ""


def _is_known(equation: Equation) -> bool:
    return equation.primitive.name in DECOMPOSITIONS or find_expansion(equation) is not None


def third_party_implementation(equation: Equation) -> Callable[..., Any] | None:
    """Returns the function of jax that implements a primitive of another library, or None.

    The primitive may have the name of one of jax's. `jax.experimental.sparse` is another library.
    """
    if (sparse := find_sparse(equation)) is not None:
        return sparse
    function = inner = equation.primitive.impl
    while isinstance(inner, functools.partial):
        inner = inner.func
    library = str(getattr(inner, "__module__", None)).partition(".")[0]
    return None if library in ("jax", "jaxlib", "pax_export") else function


def decomposed(equation: Equation) -> Any:
    """The decomposition of an operation that has one, as a program."""
    operands = [atom.aval for atom in equation.invars]
    if (empty := _without_elements(equation)) is not None:
        return empty
    if (function := third_party_implementation(equation)) is not None:
        try:
            several = str(getattr(function, "__module__", "")).startswith("jax.")  # a sparse one
            return trace(function, operands, equation.params, several=several)
        except Exception as error:  # of another library; the refusal quotes it
            reason = f"whose implementation jax cannot trace ({type(error).__name__}: {error})"
            raise NotDecomposedError(reason) from error
    # Newer versions of jax keep some functions whole until lowering, e.g. `searchsorted`.
    if (expand := find_expansion(equation)) is not None:
        return trace(expand, operands, {})
    return trace(DECOMPOSITIONS[equation.primitive.name], operands, equation.params)


#: Operations that reduce, and their results of no elements.
_OF_NONE: dict[str, Callable[[Any], Any]] = {
    "dot_general": lambda dtype: jnp.zeros((), dtype),
    "reduce_max": least,
    "reduce_min": greatest,
    "reduce_prod": lambda dtype: jnp.ones((), dtype),
    "reduce_sum": lambda dtype: jnp.zeros((), dtype),
}


def _without_elements(equation: Equation) -> Any:
    """Returns a program that computes with no array without elements, or None.

    It is for results without elements, reductions of none and concatenations with some. Kernels of
    runtimes fail at all three, or return uninitialized memory.
    """
    operands, results = ([each.aval for each in v] for v in (equation.invars, equation.outvars))
    some = [not has_no_elements(each) for each in operands]
    if equation.primitive.name == "concatenate" and any(some) and not all(some):
        joined = functools.partial(lax.concatenate, **equation.params)
        return trace(lambda *xs: joined(list(compress(xs, some))), operands, {})
    fill = None if all(some) else _OF_NONE.get(equation.primitive.name)
    if fill is None:
        fill = _OF_NONE["reduce_sum"]
        if not (results and operands and all(map(has_no_elements, results))):
            return None
    return trace(lambda *_: [jnp.full(r.shape, fill(r.dtype)) for r in results], operands, {})


class _Pass:
    def __init__(self, has: Has, normal_forms: bool):
        self._has, self._has_normal_forms = has, normal_forms
        self._inside: list[str] = []  # primitives being decomposed

    def replace(self, equation: Equation) -> Any:
        """Returns the decomposition of an operation that the target lacks; None for others.

        Normal forms are not changed, including the operations inside them.
        """
        name = equation.primitive.name
        if kept.operation(equation)[0] in kept.NORMAL_FORMS:
            if self._has_normal_forms or self._has(equation):
                return equation
            raise NotDecomposedError("into an operation that the target lacks")
        if (empty := _without_elements(equation)) is not None:
            return empty
        if third_party_implementation(equation) is None and (
            not _is_known(equation) or self._has(equation)
        ):
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


for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
