"""Functions as `jax.export.Exported`: made, written for old readers, made again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import export as jax_export

from pax_export._errors import (
    InvalidArgumentTypeError,
    NotDifferentiableError,
    PaxError,
    UnsupportedOperationError,
)
from pax_export._jax import neutral_platform, symbolic_rules
from pax_export.export.artifact import compatibility
from pax_export.export.lowering.lower import XLA_EXPANDS, Portable, portable
from pax_export.export.lowering.refusals import named_refusals
from pax_export.export.tracing.programs import line_of_model

Exported = jax_export.Exported
Structs = Mapping[str, jax.ShapeDtypeStruct]
_CUSTOM_CALL = "disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(name)]"


@dataclass(frozen=True)
class Module:
    """A portable module, and which of the flat operands it takes."""

    portable: Portable
    kept: tuple[int, ...]
    neutral: bool = False  # lowered for no platform in particular, so not told on which it runs


def make(
    function: Callable[[dict[str, Any], dict[str, Any]], Any],
    weights: Structs,
    inputs: Structs,
    platforms: Sequence[str],
    disabled_checks: Sequence[Any] = (),
) -> Exported:
    checks = _unchecked(disabled_checks)
    export = jax_export.export(
        jax.jit(function), platforms=tuple(platforms), disabled_checks=checks
    )
    try:
        with named_refusals():
            return export(dict(weights), dict(inputs))
    except PaxError:
        raise
    except (ValueError, NotImplementedError) as error:
        if isinstance(error, NotImplementedError) or "custom calls" in str(error):
            raise UnsupportedOperationError(
                "jax does not export this model: "
                + str(error).strip().splitlines()[0].rstrip(".:")
                + ".",
                got=f"platforms={tuple(platforms)}",
                write="other platforms or operations; or, for a call that you keep stable "
                f"yourself, {_CUSTOM_CALL}",
            ) from error
        raise


def _unchecked(given: Any) -> tuple[jax_export.DisabledSafetyCheck, ...]:
    checks = tuple(given) if isinstance(given, Iterable) else (given,)
    if all(isinstance(check, jax_export.DisabledSafetyCheck) for check in checks):
        return checks
    raise InvalidArgumentTypeError(
        "What jax is not to check is told by checks of jax.export.",
        where="disabled_checks",
        got=repr(given),
        write=_CUSTOM_CALL,
    )


def _gradient(exported: Exported) -> Exported:
    """The gradient of a function, which was asked for by `vjp_order`."""
    try:
        with symbolic_rules():
            return exported.vjp()
    except PaxError:
        raise
    except Exception as error:  # of jax, or of a derivative that somebody wrote
        line = line_of_model(error)
        said = str(error).strip().splitlines()[:1]
        raise NotDifferentiableError(
            "jax cannot make the gradient that the export was to hold.",
            where=f"{exported.fun_name} ({line})" if line else exported.fun_name,
            got=": ".join((type(error).__name__, *said)),
            write="a lower vjp_order",
        ) from error


def widened(exported: Exported, order: int) -> Exported:
    """The same functions in the oldest StableHLO that says them, for older readers."""
    if exported.nr_devices > 1:
        return exported  # its shardings are written in a dialect of their own
    gradient = widened(_gradient(exported), order - 1) if order else None
    try:
        # What jax's calls of it may hold is jax's own check.
        module = portable(exported.mlir_module_serialized, allowed=None).module
    except UnsupportedOperationError:  # some calls of LAPACK stand in no old version
        module = exported.mlir_module_serialized
    return dataclasses.replace(exported, mlir_module_serialized=module, _get_vjp=lambda _: gradient)


def modules(
    function: Callable, exported: Exported, weights: Structs, inputs: Structs, order: int
) -> tuple[Module, ...]:
    """A function, its gradient, and so on, as modules that need no jax.

    They end where one cannot be said without what only jax has.
    """
    found = []
    current, neutral = exported, None
    for _ in range(order + 1):
        module = _without_jax(current.mlir_module_serialized)
        kept = current.module_kept_var_idx
        if module is None:
            neutral = neutral or _neutral(function, weights, inputs, len(found))
            if neutral is None:
                break
            module = _without_jax(neutral.mlir_module_serialized, XLA_EXPANDS)
            kept = neutral.module_kept_var_idx
        if module is None:
            break
        found.append(Module(module, tuple(kept), neutral is not None))
        if len(found) <= order:
            current, neutral = _gradient(current), neutral and _gradient(neutral)
    return tuple(found)


def without_jax(exported: Exported) -> tuple[Module, ...]:
    """A function that somebody else exported, as a module that needs no jax; or nothing."""
    module = _without_jax(exported.mlir_module_serialized) if exported.nr_devices == 1 else None
    return (Module(module, tuple(exported.module_kept_var_idx)),) if module else ()


def _without_jax(serialized: bytes, allowed: frozenset[str] = frozenset()) -> Portable | None:
    try:
        return portable(serialized, allowed)
    except UnsupportedOperationError:
        return None


def _neutral(function: Callable, weights: Structs, inputs: Structs, order: int) -> Any:
    """The function lowered by rules that hold everywhere, without LAPACK."""
    unchecked = jax_export.DisabledSafetyCheck.custom_call("ALL")
    try:
        exported = make(function, weights, inputs, (neutral_platform(),), (unchecked,))
        for _ in range(order):
            exported = _gradient(exported)
        return exported
    except (NotImplementedError, UnsupportedOperationError):
        return None


def remade(
    name: str,
    found: Sequence[Module],
    weights: Structs,
    inputs: Structs,
    outputs: Any,
    platforms: Sequence[str],
) -> Exported:
    """Makes functions of this jax from modules, of a function and its gradients, of any jax.

    `outputs` is the structure of the result with a `jax.ShapeDtypeStruct` for each array, whose
    symbolic dimensions are those of the inputs.
    """

    def same_types(weights: dict[str, Any], inputs: dict[str, Any]) -> Any:
        return jax.tree.map(lambda out: jax.numpy.zeros(out.shape, out.dtype), outputs)

    # A function of equal types has everything of an Exported but the module.
    if found[0].neutral:
        platforms = (jax_export.default_export_platform(),)
    same_types.__name__ = name
    frame = make(same_types, weights, inputs, platforms)
    return _filled(frame, found)


def _filled(frame: Exported, found: Sequence[Module]) -> Exported:
    first, *rest = found
    gradient = _filled(frame.vjp(), rest) if rest else None
    return dataclasses.replace(
        frame,
        mlir_module_serialized=first.portable.module,
        module_kept_var_idx=first.kept,
        _get_vjp=(lambda _: gradient) if gradient else None,
    )


def structs_of(avals: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]


def oldest(found: Sequence[Module]) -> str:
    """The version of StableHLO that reads all modules."""
    return compatibility.text(max(each.portable.stablehlo for each in found)) if found else ""
