"""Reference results of matrix decompositions on the CPU.

Signs of eigenvectors and equal pivots are ambiguous. jax repeats a call with LAPACK, but uses the
export's choice if its factors are those of the same matrices as LAPACK's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.extend.core import jaxpr_as_fun

from pax_export._foundations.jax import call_with_constants
from pax_export._foundations.jaxpr import jaxpr_constants
from pax_export._foundations.types import Array, Equation
from pax_export.export.lowering.lower import export_unchecked, portable
from pax_export.export.portable.for_xla import (
    ANY_PLATFORM,
    XLA_EXPANDS,
    without_libraries,
)
from pax_export.export.portable.program import rewritten, traced
from pax_export.export.tracing import dtypes
from pax_export.export.validation.cases import tolerances
from pax_export.export.validation.serve import Arrays
from pax_export.export.validation.validate import largest_size

#: The tolerance of a product of factors, in roundings per row of the matrix.
_ROUNDINGS = 500.0
#: With 64 bits, the iterations that XLA unrolls are no more exact than this.
_FINEST = 1e-10
#: The largest part of a result that rounding may explain: larger differences are errors.
_MOST = 0.05


def judge_results(
    function: Callable[[list[Any]], Sequence[Any]],
    operands: Sequence[Any],
    named: Callable[[Sequence[Any]], Arrays],
) -> tuple[Arrays, dict[str, Any]]:
    """Results of a function by LAPACK, but for ambiguous choices, and their error by rounding."""
    program = rewritten(jax.make_jaxpr(function)(list(operands)), _replace_choice)
    # Constants are arguments: XLA would fold them.
    constants = {id(value): value for value in jaxpr_constants(program)}

    @jax.jit
    def compiled(values: list[Any], arrays: list[Any]) -> list[Any]:
        return call_with_constants(program, dict(zip(constants, arrays)), values)

    def run(values: Sequence[Any]) -> Arrays:
        return named(compiled(list(values), list(constants.values())))

    exact = run(operands)
    allowed = next(iter(tolerances(run, operands, exact, program)))
    for name, most in allowed.items():
        if not isinstance(most, np.ndarray):
            allowed[name] = min(most, _MOST * largest_size(exact[name]))
    return exact, allowed


def _replace_choice(equation: Equation) -> Any:
    """An operation that leaves a choice, and makes that of the export, as a program."""
    choice = CHOICES.get(equation.primitive.name)
    return choice and traced(partial(_choose, equation, *choice), equation.invars)


# --- one operation ------------------------------------------------------------


def _choose(
    equation: Equation, matrices_of: Callable[..., Any], keep: Sequence[int], *operands: Any
) -> list[Any]:
    """Returns the export's results where they are right, otherwise, and for `keep`, LAPACK's."""
    theirs = _results_of(equation, *operands)
    ours = _exported_results(equation, operands)
    if ours is None:
        return theirs
    ours = [their if at in keep else our for at, (their, our) in enumerate(zip(theirs, ours))]
    right = jnp.ones(operands[0].shape[:-2], bool)
    for one, other in zip(matrices_of(*ours), matrices_of(*theirs)):
        right &= _is_near(one, other)
    return [
        jnp.where(right.reshape(right.shape + (1,) * (our.ndim - right.ndim)), our, their)
        for our, their in zip(ours, theirs)
    ]


def _results_of(equation: Equation, *operands: Array) -> list[Any]:
    results = equation.primitive.bind(*operands, **equation.params)
    return list(results) if equation.primitive.multiple_results else [results]


def _exported_results(equation: Equation, operands: Sequence[Any]) -> list[Any] | None:
    """Returns the results of an operation as exported alone."""
    structs = list(map(dtypes.struct_of, operands))
    program = without_libraries(jax.make_jaxpr(partial(_results_of, equation))(*structs))
    try:
        exported = export_unchecked(jax.jit(jaxpr_as_fun(program)), (ANY_PLATFORM,), *structs)
    except NotImplementedError:
        return None
    here = jax.default_backend()
    # jax names GPU platforms by vendor only.
    names = {"gpu": ("cuda", "rocm")}.get(here, (here,))
    module = portable(exported.mlir_module_serialized, XLA_EXPANDS).module
    changed = dataclasses.replace(exported, mlir_module_serialized=module, platforms=names)
    return list(changed.call(*operands))


def _is_near(one: Array, other: Array) -> Any:
    """Returns whether matrices differ only by rounding of their largest numbers."""
    rows = max(1, *one.shape[-2:])
    apart, size = (jnp.max(jnp.abs(x), axis=(-2, -1), initial=0.0) for x in (one - other, other))
    rounding = max(_FINEST, float(jnp.finfo(one.dtype).eps))
    return apart <= _ROUNDINGS * rows * rounding * size


def _gram_of(columns: Array) -> Any:
    """The inner products of columns: the identity where they are orthonormal."""
    return jnp.conj(jnp.swapaxes(columns, -1, -2)) @ columns


def _of_eigh(vectors: Array, values: Array) -> list[Any]:
    scaled = vectors * values[..., None, :].astype(vectors.dtype)
    return [scaled @ jnp.conj(jnp.swapaxes(vectors, -1, -2)), _gram_of(vectors)]


def _of_svd(values: Array, left: Array | None = None, right: Array | None = None) -> list[Any]:
    if left is None or right is None:
        return []
    count = values.shape[-1]
    scaled = left[..., :count] * values[..., None, :].astype(left.dtype)
    rows = jnp.swapaxes(right, -1, -2)
    return [scaled @ right[..., :count, :], _gram_of(left), _gram_of(rows)]


def _of_qr(left: Array, right: Array, *_: Array) -> list[Any]:
    below = jnp.tril(right, -1) + jnp.eye(*right.shape[-2:], dtype=right.dtype)
    return [left @ right, _gram_of(left), below]


def _of_reflectors(packed: Array, scales: Array) -> list[Any]:
    count = min(packed.shape[-2:])
    left = jax.lax.linalg.householder_product(packed[..., :count], scales)
    return _of_qr(left, jnp.triu(packed)[..., :count, :])


def _of_lu(both: Array, _: Array, order: Array) -> list[Any]:
    rows, columns = both.shape[-2:]
    count = min(rows, columns)
    lower = jnp.tril(both[..., :count], -1) + jnp.eye(rows, count, dtype=both.dtype)
    product = lower @ jnp.triu(both)[..., :count, :]
    unsorted = jnp.take_along_axis(product, jnp.argsort(order)[..., None], axis=-2)
    return [unsorted, jnp.maximum(jnp.abs(lower), 1)]  # pivots are the largest numbers


#: Operations of jax that leave a choice: the matrices by which their results are judged, and the
#: results that are LAPACK's.
CHOICES: dict[str, tuple[Callable[..., list[Any]], tuple[int, ...]]] = {
    "eigh": (_of_eigh, (1,)),
    "svd": (_of_svd, (0,)),
    "qr": (_of_qr, ()),
    "geqrf": (_of_reflectors, ()),
    "lu": (_of_lu, ()),
}
