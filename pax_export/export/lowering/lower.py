"""From a traced function to a portable module; one function of an export, as writers get it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import export as jax_export

from pax_export._errors import UnsupportedOperationError
from pax_export._jax import allow_symbolic_padding, call_here, neutral_platform
from pax_export.export.artifact.report import ArrayInfo
from pax_export.export.lowering.portable import CALLING_CONVENTION, XLA_EXPANDS, Portable, portable
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.spec import Inputs
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


def lower_traced(
    traced: Traced,
    platforms: Sequence[str],
    count: int | None = None,
    names: Mapping[int, str] | None = None,
) -> Lowered:
    """Lowers a traced function, or the first so many of its results, to portable StableHLO.

    Messages at run time call operands by their `names`.
    """
    operands: tuple[Any, ...] = traced.structs
    function = traced.lowerable
    if traced.constants or (count is not None and count < len(traced.results)):
        operands += tuple(map(dtypes.struct_of, traced.constants))
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


@dataclass(frozen=True)
class Signature:
    key: str
    input_names: tuple[str, ...]
    input_structs: tuple[jax.ShapeDtypeStruct, ...]
    output_names: tuple[str, ...]
    forward: Call
    assigned: tuple[int, ...]  # the variables that take the results after the outputs
    gradient: Gradient | None
    processing: Processing | None = None  # what stands around it

    @property
    def gradients(self) -> tuple[Gradient, ...]:
        """Its gradient, and the gradient of that."""
        first = self.gradient
        return tuple(each for each in (first, first and first.next) if each is not None)

    @property
    def modules(self) -> list[Lowered]:
        """The function and its gradients."""
        return [call.lowered for call in (self.forward, *(each.call for each in self.gradients))]


@dataclass(frozen=True)
class Call:
    """A module, and where its operands are: variables by place, then the inputs, then constants."""

    lowered: Lowered
    variables: tuple[int, ...]
    constants: tuple[int, ...]  # the variables that hold its constants


@dataclass(frozen=True)
class Gradient:
    """A module that takes all operands of the forward one and cotangents of `of`.

    It gives the cotangents of the operands `wrt`.  `next` is its own gradient.
    """

    call: Call
    wrt: tuple[int, ...]
    of: tuple[int, ...]
    structs: tuple[jax.ShapeDtypeStruct, ...]  # of its operands
    next: Gradient | None = None


@dataclass(frozen=True)
class Pullback:
    traced: Traced
    wrt: tuple[int, ...]  # operands of the program
    of: tuple[int, ...]  # its results


@dataclass(frozen=True)
class Processing:
    """TensorFlow functions around a signature; the outer signature that they make of it."""

    inputs: Inputs
    outputs: tuple[ArrayInfo, ...]
    structure: dict[str, Any]  # of the outputs, nested
    preprocess: Any  # a tf.function of the outer inputs that gives those of the model, in order
    postprocess: Any  # a tf.function of the model's outputs, in order, that gives the outer ones
    trackables: tuple[Any, ...]  # what they hold
