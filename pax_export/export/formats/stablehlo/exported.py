"""Creates and rewrites `jax.export.Exported` functions."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import export as jax_export
from jax.extend.core import jaxpr_as_fun

from pax_export._foundations.errors import (
    InvalidArgumentTypeError,
    NotDifferentiableError,
    PaxError,
    SymbolicDimensionError,
    UnsupportedOperationError,
    first_line,
    named_line,
)
from pax_export._foundations.types import Array
from pax_export.export.artifact import saved_models
from pax_export.export.lowering.lower import Portable, portable
from pax_export.export.portable.any_size import differentiable, lowerable
from pax_export.export.portable.for_xla import (
    ANY_PLATFORM,
    XLA_EXPANDS,
    guaranteed,
    without_libraries,
)
from pax_export.export.tracing.trace_errors import line_of_model, named_refusals

Exported = jax_export.Exported
Structs = Mapping[str, jax.ShapeDtypeStruct]
_CUSTOM_CALL = "disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(name)]"


@dataclass(frozen=True)
class PortableModule:
    """A portable module, and which of the flat operands it takes."""

    portable: Portable
    used: tuple[int, ...]
    neutral: bool = False  # lowered without a platform: it has no platform index


def make(
    function: Callable[..., Any],
    args: Sequence[Any],
    platforms: Sequence[str],
    disabled_checks: Sequence[Any] = (),
) -> Exported:
    checks = read_checks(disabled_checks)
    export = jax_export.export(
        jax.jit(function), platforms=tuple(platforms), disabled_checks=checks
    )
    try:
        with named_refusals():
            return export(*args)
    except PaxError:
        raise
    except (ValueError, NotImplementedError) as error:
        if isinstance(error, NotImplementedError) or "custom calls" in str(error):
            targets = dict.fromkeys(re.findall(r"custom_call @(\w+)", str(error)))
            called = f", calls={', '.join(targets)}" if targets else ""
            raise UnsupportedOperationError(
                f"jax does not export this model: {first_line(error)}.",
                got=f"platforms={tuple(platforms)}{called}",
                write="other platforms or operations; or, for a call that you keep stable "
                f"yourself, {_CUSTOM_CALL}",
            ) from error
        raise


def named_operations(error: BaseException | None) -> set[str]:
    """Returns the names of the operations that jax's error about custom calls is about."""
    return {name for path in re.findall(r'loc\("([^"]*)"', str(error)) for name in path.split("/")}


def read_checks(
    value: jax_export.DisabledSafetyCheck | Sequence[jax_export.DisabledSafetyCheck],
) -> tuple[jax_export.DisabledSafetyCheck, ...]:
    checks = tuple(value) if isinstance(value, Iterable) else (value,)
    if all(isinstance(check, jax_export.DisabledSafetyCheck) for check in checks):
        return checks
    raise InvalidArgumentTypeError(
        "disabled_checks must contain checks of jax.export.",
        where="disabled_checks",
        got=repr(value),
        write=_CUSTOM_CALL,
    )


def export_gradients(
    function: Callable[..., Any],
    exported: Exported,
    order: int,
    disabled_checks: Sequence[Any] = (),
) -> list[Exported]:
    """An exported function, its gradient, and so on, as `vjp_order` asks for them."""
    found = [exported]
    if exported.nr_devices > 1:  # shardings of cotangents are jax's own affair
        for _ in range(order):
            found.append(_make_gradient(found[-1], found[-1].vjp))
        return found
    flat = _flat(function, exported)
    for _ in range(order):
        cotangents = [each.to_tangent_aval() for each in found[-1].out_avals]
        structs = structs_of([*found[-1].in_avals, *cotangents])
        flat = _vjp_function(flat, found[-1])
        change = partial(guaranteed, platforms=() if disabled_checks else exported.platforms)
        lowered = _lowerable(flat, change)
        export = partial(make, lowered, structs, exported.platforms, disabled_checks)
        found.append(_make_gradient(exported, export))
    return found


def _flat(function: Callable[..., Any], exported: Exported) -> Callable[..., Sequence[Any]]:
    def flat(*values: Array) -> list[Any]:
        args, kwargs = jax.tree_util.tree_unflatten(exported.in_tree, values)
        return jax.tree_util.tree_leaves(function(*args, **kwargs))

    flat.__name__ = exported.fun_name
    return flat


def _vjp_function(flat: Callable[..., Any], exported: Exported) -> Callable[..., Sequence[Any]]:
    """Returns the gradient function, with the operands and results of `Exported.vjp`."""
    count = len(exported.in_avals)

    def gradient(*values: Array) -> Sequence[Any]:
        primals, cotangents = values[:count], values[count:]
        program = differentiable(jax.make_jaxpr(flat)(*primals))
        return jax.vjp(jaxpr_as_fun(program), *primals)[1](list(cotangents))

    return gradient


def _lowerable(
    flat: Callable[..., Any], change: Callable[[Any], Any] = lambda program: program
) -> Callable[..., Sequence[Any]]:
    """Returns the function, retraced so that jax lowers it for any size."""

    def function(*values: Array) -> Sequence[Any]:
        program = jax.make_jaxpr(flat)(*values)
        return tuple(jaxpr_as_fun(change(lowerable(program)))(*values))

    return function


def _make_gradient(exported: Exported, make: Callable[[], Exported]) -> Exported:
    """The gradient of a function, which was asked for by `vjp_order`."""
    try:
        return make()
    except PaxError:
        raise
    except Exception as error:  # of jax, or of a custom derivative
        line = line_of_model(error)
        raise NotDifferentiableError(
            "jax cannot compute the requested gradient.",
            where=f"{exported.fun_name} ({line})" if line else exported.fun_name,
            got=named_line(error),
            write="a lower vjp_order",
        ) from error


def make_portable_modules(found: Sequence[Exported]) -> Exported:
    """A function and its gradients in the oldest StableHLO that can express them."""
    exported, *rest = found
    if exported.nr_devices > 1:
        return exported  # its shardings are written in a dialect of their own
    gradient = make_portable_modules(rest) if rest else None
    try:
        # jax checks itself which calls it may contain.
        module = portable(exported.mlir_module_serialized, allowed=None).module
    except UnsupportedOperationError:  # some calls of LAPACK are in no old version
        module = exported.mlir_module_serialized
    return dataclasses.replace(exported, mlir_module_serialized=module, _get_vjp=lambda _: gradient)


def neutral_modules(function: Callable, found: Sequence[Exported]) -> tuple[PortableModule, ...]:
    """A function, its gradient, and so on, as modules that need no jax.

    They end at the first that needs operations that only jax has.
    """
    modules: list[PortableModule] = []
    flat = _flat(function, found[0])
    neutral = False
    for order, exported in enumerate(found):
        structs = structs_of(exported.in_avals)
        neutral = neutral or _without_jax(exported.mlir_module_serialized) is None
        if neutral:
            everywhere = _export_neutral(flat, structs) if exported.nr_devices == 1 else None
            if everywhere is None:
                break
            exported = everywhere
        module = _without_jax(exported.mlir_module_serialized, XLA_EXPANDS)
        if module is None:
            break
        modules.append(PortableModule(module, tuple(exported.module_kept_var_idx), neutral))
        flat = _vjp_function(flat, found[order])
    return tuple(modules)


def without_jax(exported: Exported) -> tuple[PortableModule, ...]:
    """Returns an exported function of another program as a module without jax, if possible."""
    module = _without_jax(exported.mlir_module_serialized) if exported.nr_devices == 1 else None
    return (PortableModule(module, tuple(exported.module_kept_var_idx)),) if module else ()


def _without_jax(serialized: bytes, allowed: frozenset[str] = frozenset()) -> Portable | None:
    try:
        return portable(serialized, allowed)
    except UnsupportedOperationError:
        return None


def _export_neutral(flat: Callable, structs: Sequence[Any]) -> Exported | None:
    """Lowers the function with rules for all platforms, without LAPACK."""
    unchecked = jax_export.DisabledSafetyCheck.custom_call("ALL")
    function = _lowerable(flat, without_libraries)
    try:
        return make(function, structs, (ANY_PLATFORM,), (unchecked,))
    except (NotImplementedError, SymbolicDimensionError, UnsupportedOperationError):
        return None


def runs_on_all(disabled_checks: Sequence[Any]) -> bool:
    """Whether a function may be called on platforms that it was not exported for."""
    return jax_export.DisabledSafetyCheck.platform() in disabled_checks


def rebuild_functions(
    name: str,
    found: Sequence[PortableModule],
    weights: Structs,
    inputs: Structs,
    outputs: Any,
    platforms: Sequence[str],
) -> Exported:
    """Makes functions of this jax version from modules of a function and its gradients.

    `outputs` is the structure of the result with a `jax.ShapeDtypeStruct` for each array, with the
    symbolic dimensions of the inputs.
    """

    def same_types(weights: dict[str, Any], inputs: dict[str, Any]) -> Any:
        return jax.tree.map(lambda out: jax.numpy.zeros(out.shape, out.dtype), outputs)

    # A function of equal types has everything of an Exported but the module.
    if found[0].neutral:
        platforms = (jax_export.default_export_platform(),)
    same_types.__name__ = name
    frame = make(same_types, (dict(weights), dict(inputs)), platforms)
    return _fill_frame(frame, found)


def _fill_frame(frame: Exported, found: Sequence[PortableModule]) -> Exported:
    first, *rest = found
    gradient = _fill_frame(frame.vjp(), rest) if rest else None
    return dataclasses.replace(
        frame,
        mlir_module_serialized=first.portable.module,
        module_kept_var_idx=first.used,
        _get_vjp=(lambda _: gradient) if gradient else None,
    )


def structs_of(avals: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]


def oldest_stablehlo(found: Sequence[PortableModule]) -> str:
    newest = max((each.portable.stablehlo for each in found), default=None)
    return "" if newest is None else saved_models.format_version(newest)
