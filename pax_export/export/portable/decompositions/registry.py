"""The table of decompositions by primitive name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pax_export._foundations.types import Array

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

    The function takes the operands, and the parameters of the primitive by name; it returns the
    only result, or a sequence of results.

    Args:
        names: the names of the primitives.
        single: compute smaller dtypes in float32, and round the result.
        double: whether the result has float64 accuracy.
        any_dtype: accept complex numbers, too.
    """

    def register(function: Decomposition) -> Decomposition:
        def run(*operands: Array, **parameters: Any) -> Any:
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
