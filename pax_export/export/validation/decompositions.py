"""Reference results of matrix decompositions on the CPU.

Signs of eigenvectors and equal pivots are ambiguous. jax repeats a call with LAPACK, but uses the
export's choice if it decomposes the same matrix with LAPACK's eigenvalues.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import export as jax_export
from jax import numpy as jnp
from jax.extend.core import jaxpr_as_fun

from pax_export._jax import call_with_constants
from pax_export._jaxpr import jaxpr_constants
from pax_export._types import Equation
from pax_export.export.lowering.lower import portable
from pax_export.export.portable.program import traced
from pax_export.export.portable.rewrite import rewritten
from pax_export.export.portable.without_libraries import (
    ANY_PLATFORM,
    XLA_EXPANDS,
    without_libraries,
)

Arrays = Sequence[Any]
#: The tolerance of a product of factors, in roundings per row of the matrix.
_ROUNDINGS = 500.0
#: With 64 bits, the iterations that XLA unrolls are no more exact than this.
_FINEST = 1e-10
#: The number of trials with rounding errors, the allowed multiple of their effect, and the largest
#: part of a result that may be explained so: larger differences are errors.
_PERTURBED, _TOLERATED, _MOST = 2, 4.0, 0.05


def judge_results(
    function: Callable[[list[Any]], Sequence[Any]],
    operands: Sequence[Any],
    named: Callable[[Sequence[Any]], dict[str, np.ndarray]],
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Results of a function by LAPACK, but for ambiguous choices, and their error by rounding."""
    run = _with_choices(function, operands)
    exact = named(run(list(operands)))
    allowed = dict.fromkeys(exact, 0.0)
    for seed in range(_PERTURBED):
        random = np.random.default_rng(seed)
        found = named(run([_perturb_value(value, random) for value in operands]))
        for name in exact.keys() & found.keys():
            allowed[name] = max(allowed[name], _tolerance_of(exact[name], found[name]))
    return exact, allowed


def _with_choices(function: Callable, operands: Sequence[Any]) -> Callable[[list[Any]], Arrays]:
    program = rewritten(jax.make_jaxpr(function)(list(operands)), _replace_choice)
    # Constants are arguments: XLA would fold them.
    constants = {id(value): value for value in jaxpr_constants(program)}

    def run(values: list[Any], held: list[Any]) -> list[Any]:
        replaced = dict(zip(constants, held))
        return call_with_constants(program, replaced, values)

    compiled = jax.jit(run)
    return lambda values: compiled(values, list(constants.values()))


def _replace_choice(equation: Equation) -> Any:
    """An operation that leaves a choice, and makes that of the export, as a program."""
    rule = RULES.get(equation.primitive.name)
    return None if rule is None else traced(lambda *given: rule(equation, given), equation.invars)


def _perturb_value(value: Any, random: np.random.Generator) -> Any:
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return value
    noise = 4 * float(jnp.finfo(value.dtype).eps) * random.normal(size=value.shape)
    return (np.asarray(value) * (1 + noise)).astype(value.dtype)


def _tolerance_of(exact: np.ndarray, other: np.ndarray) -> float:
    if not jnp.issubdtype(exact.dtype, jnp.inexact) or not exact.size:
        return 0.0
    wide = np.complex128 if jnp.issubdtype(exact.dtype, jnp.complexfloating) else np.float64
    one, two = exact.astype(wide), other.astype(wide)
    finite = np.isfinite(one) & np.isfinite(two)
    apart = float(np.max(np.abs(one - two), initial=0.0, where=finite))
    return min(_TOLERATED * apart, _MOST * float(np.max(np.abs(one), initial=0.0, where=finite)))


# --- one operation ------------------------------------------------------------


def _find_rule(is_right: Callable[..., Any], keep: Sequence[int] = ()) -> Callable[..., list[Any]]:
    """Returns the rule of an ambiguous operation: ``is_right(operands, theirs, ours, parameters)``.

    Results `keep` are always LAPACK's.
    """

    def rule(equation: Equation, given: Arrays) -> list[Any]:
        theirs = _results_of(equation, given)
        ours = _exported_results(equation, given)
        if ours is None:
            return theirs
        right = is_right(given, theirs, ours, equation.params)
        return [
            their if place in keep else _where_right(right, our, their)
            for place, (their, our) in enumerate(zip(theirs, ours))
        ]

    return rule


def _results_of(equation: Equation, given: Sequence[Any]) -> list[Any]:
    results = equation.primitive.bind(*given, **equation.params)
    return list(results) if equation.primitive.multiple_results else [results]


def _exported_results(equation: Equation, given: Sequence[Any]) -> list[Any] | None:
    """Returns the results of an operation as exported alone."""
    structs = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in given]
    unchecked = jax_export.DisabledSafetyCheck.custom_call("ALL")
    program = without_libraries(jax.make_jaxpr(partial(_results_of, equation))(structs))
    options: Any = {"platforms": (ANY_PLATFORM,), "disabled_checks": [unchecked]}
    try:
        exported = jax_export.export(jax.jit(jaxpr_as_fun(program)), **options)(*structs)
    except NotImplementedError:
        return None
    here = jax.default_backend()
    # jax names GPU platforms by vendor only.
    names = {"gpu": ("cuda", "rocm")}.get(here, (here,))
    module = portable(exported.mlir_module_serialized, XLA_EXPANDS).module
    return list(
        dataclasses.replace(exported, mlir_module_serialized=module, platforms=names).call(*given)
    )


def _where_right(right: Any, ours: Any, theirs: Any) -> Any:
    return jnp.where(right.reshape(right.shape + (1,) * (ours.ndim - right.ndim)), ours, theirs)


def _adjoint_of(matrix: Any) -> Any:
    return jnp.conj(jnp.swapaxes(matrix, -1, -2))


def _is_near(one: Any, other: Any, size: Any) -> Any:
    """Returns whether two matrices differ only by rounding of numbers of some size."""
    rows = max(1, *one.shape[-2:])
    apart = jnp.max(jnp.abs(one - other), axis=(-2, -1), initial=0.0)
    rounding = max(_FINEST, float(jnp.finfo(one.dtype).eps))
    return apart <= _ROUNDINGS * rows * rounding * size


def _largest_entry(matrix: Any) -> Any:
    return jnp.max(jnp.abs(matrix), axis=(-2, -1), initial=0.0)


def _is_unitary(columns: Any) -> Any:
    one = jnp.eye(columns.shape[-1], dtype=columns.dtype)
    return _is_near(_adjoint_of(columns) @ columns, jnp.broadcast_to(one, one.shape), 1.0)


def _is_eigh(given: Arrays, theirs: Arrays, ours: Arrays, parameters: Mapping[str, Any]) -> Any:
    (matrix,), (vectors, _), values = given, ours, theirs[1]
    half = jnp.tril(matrix) if parameters["lower"] else jnp.triu(matrix)
    rest = jnp.tril(matrix, -1) if parameters["lower"] else jnp.triu(matrix, 1)
    whole = half + _adjoint_of(rest)
    found = (vectors * values[..., None, :].astype(vectors.dtype)) @ _adjoint_of(vectors)
    return _is_near(found, whole, _largest_entry(whole)) & _is_unitary(vectors)


def _is_svd(given: Arrays, theirs: Arrays, ours: Arrays, parameters: Mapping[str, Any]) -> Any:
    (matrix,), values = given, theirs[0]
    if len(ours) == 1:
        return jnp.zeros(matrix.shape[:-2], bool)
    left, right = ours[1], ours[2]
    count = values.shape[-1]
    product = left[..., :count] * values[..., None, :].astype(left.dtype)
    found = product @ right[..., :count, :]
    is_product = _is_near(found, matrix, _largest_entry(matrix))
    return is_product & _is_unitary(left) & _is_unitary(_adjoint_of(right))


def _is_qr(given: Arrays, theirs: Arrays, ours: Arrays, parameters: Mapping[str, Any]) -> Any:
    (matrix,), (left, right) = given, ours[:2]
    is_product = _is_near(left @ right, matrix, _largest_entry(matrix))
    return is_product & _is_unitary(left) & _is_near(jnp.tril(right, -1), 0 * right, 1.0)


def _is_reflectors(
    given: Arrays, theirs: Arrays, ours: Arrays, parameters: Mapping[str, Any]
) -> Any:
    (matrix,), (packed, scales) = given, ours
    count = min(matrix.shape[-2:])
    left = jax.lax.linalg.householder_product(packed[..., :count], scales)
    right = jnp.triu(packed)[..., :count, :]
    return _is_near(left @ right, matrix, _largest_entry(matrix)) & _is_unitary(left)


def _is_lu(given: Arrays, theirs: Arrays, ours: Arrays, parameters: Mapping[str, Any]) -> Any:
    (matrix,), (both, _, order) = given, ours
    rows, columns = matrix.shape[-2:]
    count = min(rows, columns)
    lower = jnp.tril(both[..., :count], -1) + jnp.eye(rows, count, dtype=both.dtype)
    upper = jnp.triu(both)[..., :count, :]
    sorted_rows = jnp.take_along_axis(matrix, order[..., None], axis=-2)
    is_product = _is_near(lower @ upper, sorted_rows, _largest_entry(matrix))
    return is_product & (_largest_entry(lower) <= 1.001)


#: The operations of jax that leave a choice, and have a rule without LAPACK.
RULES: dict[str, Callable] = {
    "eigh": _find_rule(_is_eigh, keep=(1,)),
    "svd": _find_rule(_is_svd, keep=(0,)),
    "qr": _find_rule(_is_qr),
    "geqrf": _find_rule(_is_reflectors),
    "lu": _find_rule(_is_lu),
}
