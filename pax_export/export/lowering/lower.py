"""From a traced function to a portable module, for machines that no consumer may know."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import export as jax_export

from pax_export._errors import UnsupportedOperationError
from pax_export._jax import allow_symbolic_padding, call_here, neutral_platform
from pax_export.export.lowering.portable import CALLING_CONVENTION, XLA_EXPANDS, Portable, portable
from pax_export.export.tracing.traced import Traced, places


@dataclass(frozen=True)
class Lowered:
    """A function as portable StableHLO.

    Its operands are those of the function, then the `constants`; only the ones
    that `kept` counts are used, in that order.
    """

    portable: Portable
    kept: tuple[int, ...]
    constants: tuple[Any, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]  # as they stand outside of jax
    platforms: tuple[str, ...]
    neutral: bool = False  # lowered with rules that hold on every platform
    calling_convention: int = CALLING_CONVENTION
    exported: Any = None  # of jax, where it is neutral

    def run(self, operands: Sequence[Any]) -> list[Any]:
        """Runs in jax what was lowered, with the rules that it was lowered with.

        jax by itself calls LAPACK, which may choose other signs of eigenvectors,
        and rounds in another way; so this is for modules that are `neutral`.
        """
        return call_here(self.exported, [*operands, *self.constants])


def lower(
    traced: Traced,
    platforms: Sequence[str],
    count: int | None = None,
    names: Mapping[int, str] | None = None,
) -> Lowered:
    """Lowers a traced function to portable StableHLO.

    Args:
        traced: the function.
        platforms: for which machines: `cpu`, `cuda`, `rocm`, `tpu`.
        count: lower only so many of its results, the first ones.
        names: how messages at run time call the operands with these numbers.
    """
    operands: tuple[Any, ...] = traced.structs
    function = traced.lowerable
    if traced.constants or (count is not None and count < len(traced.results)):
        operands += tuple(jax.ShapeDtypeStruct(np.shape(c), c.dtype) for c in traced.constants)
        function = jax.jit(lambda values: traced.with_constants(values, count, False))
    try:
        exported = _export(function, operands, platforms)
        module, neutral = portable(exported.mlir_module_serialized, names=names), False
    except (NotImplementedError, UnsupportedOperationError) as error:
        # Rules for real machines call their libraries (LAPACK, cuSOLVER), which
        # no consumer has.  A machine that nobody knows gets rules for all.
        exported = _export_neutral(traced, function, operands, error)
        module, neutral = portable(exported.mlir_module_serialized, XLA_EXPANDS, names), True
    return Lowered(
        module,
        tuple(exported.module_kept_var_idx),
        traced.constants,
        traced.results[:count],
        tuple(platforms),
        neutral,
        exported=exported if neutral else None,
    )


def _export(function: Any, operands: Sequence[Any], platforms: Sequence[str]) -> Any:
    # Which custom calls a consumer knows is our own check, with its own words.
    allow_symbolic_padding()
    unchecked = jax_export.DisabledSafetyCheck.custom_call("ALL")
    export = jax_export.export(function, platforms=tuple(platforms), disabled_checks=(unchecked,))
    return export(list(operands))


def _export_neutral(
    traced: Traced, function: Any, operands: Sequence[Any], cause: Exception
) -> Any:
    try:
        return _export(function, operands, (neutral_platform(),))
    except NotImplementedError as error:
        if isinstance(cause, UnsupportedOperationError):
            raise cause from None
        name = re.search(r"primitive '(\w+)'", str(error))
        if name is None:
            raise
        raise UnsupportedOperationError(
            f"The operation {name[1]} exists in jax only.",
            where=places(traced.program, [name[1]]) or None,
            write="the same in other operations of jax.numpy and jax.lax",
        ) from error
