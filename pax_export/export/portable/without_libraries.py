"""Lowers to StableHLO without LAPACK or other custom calls.

jax's rules for real platforms call their libraries. For an unknown platform, jax uses its general
rules, which write products and loops, or calls that XLA expands; operations without such a rule, or
with one that returns numbers where no decomposition exists, become programs here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pax_export.export.portable.decompose import decomposed, third_party_implementation
from pax_export.export.portable.decompositions import NotDecomposedError
from pax_export.export.portable.program import traced
from pax_export.export.portable.rewrite import rewritten

#: Operations that jax writes as calls without a guarantee of compatibility, by platform, where it
#: guarantees other platforms'.
_WITHOUT_GUARANTEE = {
    "cholesky_update": ("cuda",),
    "ormqr": ("cpu", "cuda", "rocm"),
    "symmetric_product": ("cuda",),
    "tridiagonal_solve": ("rocm",),
}
#: A platform to lower for that no machine has.
ANY_PLATFORM = "pax_export_any"
#: Decompositions that XLA itself writes out, where no library does it.
XLA_EXPANDS = frozenset(("Qr", "ProductOfElementaryHouseholderReflectors"))
_LACKS = frozenset(("eigh", "svd"))


def guaranteed(program: Any, platforms: Sequence[str]) -> Any:
    """Returns the program without calls that jax exports for these platforms only if told to.

    jax lowers an operation for all platforms of an export, in each branch of
    `jax.lax.platform_dependent` too, so one that lacks the guarantee decides for all.
    """

    def replacement(equation: Any) -> Any:
        lacks = _WITHOUT_GUARANTEE.get(equation.primitive.name, ())
        is_third_party = third_party_implementation(equation) is not None
        if frozenset(platforms).isdisjoint(lacks) and not is_third_party:
            return None
        try:
            found = decomposed(equation)
        except NotDecomposedError:  # jax refuses it
            return None
        if not is_third_party:
            return found
        inside = rewritten(found, replacement)
        return None if inside is found else inside

    return rewritten(program, replacement)


def without_libraries(program: Any) -> Any:
    """Returns the program without operations that need a library on all platforms.

    Raises:
        NotDecomposedError: for symbolic sizes.
    """
    return rewritten(program, _replacement)


def _replacement(equation: Any) -> Any:
    name = equation.primitive.name
    if name in _LACKS:
        return decomposed(equation)
    function = {"cholesky": _cholesky, "approx_top_k": _exact_top_k}.get(name)
    if function is None:
        return None

    return traced(lambda operand: function(operand, equation), equation.invars)


def _cholesky(matrix: Any, equation: Any) -> Any:
    """NaN for a matrix that is not positive definite, which the general rule does not look at."""
    factor = equation.primitive.bind(matrix, **equation.params)
    right = (jnp.diagonal(factor, 0, -2, -1).real > 0).all(-1)
    return jnp.where(right[..., None, None], factor, jnp.nan)


def _exact_top_k(operand: Any, equation: Any) -> tuple[Any, Any]:
    """Returns jax's result on CPUs: the exact top k, in order."""
    axis = equation.params["reduction_dimension"]
    sign = 1 if equation.params["is_max_k"] else -1
    count = equation.outvars[0].aval.shape[axis]
    values, places = jax.lax.top_k(sign * jnp.moveaxis(operand, axis, -1), count)
    return jnp.moveaxis(sign * values, -1, axis), jnp.moveaxis(places, -1, axis)
