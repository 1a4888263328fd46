"""Gradients of a program, and gradients of these, as modules beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pax_export._errors import InvalidArgumentError, NotDifferentiableError, PaxError
from pax_export.export.artifact import compatibility
from pax_export.export.lowering.lower import Lowered, lower
from pax_export.export.lowering.signature import Call, Gradient, Pullback
from pax_export.export.lowering.variables import Store
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.exportable import Exportable
from pax_export.export.tracing.programs import Program
from pax_export.export.tracing.traced import Traced, vjp

#: What jax raises where it cannot differentiate, or not with unknown dimensions.
_REFUSALS = (ValueError, TypeError, NotImplementedError, PaxError)


@dataclass(frozen=True)
class Order:
    """How often an export is to be differentiable, and how often it must be."""

    wanted: int
    required: int

    @classmethod
    def of(cls, given: Any, trainable: bool) -> Order:
        """Reads ``vjp_order``."""
        if given is None:
            # What nobody asked for is left out where it cannot be had.
            return cls(2, 1) if trainable else cls(1, 0)
        if given not in (0, 1, 2) or isinstance(given, bool) or (trainable and given == 0):
            raise InvalidArgumentError(
                "A SavedModel can hold gradients, and gradients of gradients; trainable variables "
                "need the first.",
                got=f"vjp_order={given!r}",
                write="vjp_order=1" if trainable else "vjp_order=0, 1 or 2",
            )
        return cls(given, given)


def differentiate(
    model: Exportable,
    program: Program,
    forward: Lowered,
    store: Store,
    platforms: Sequence[str],
    order: Order,
    trainable: bool,
) -> tuple[Pullback | None, Gradient | None]:
    """The gradient of a program, traced and lowered; the arrays it needs go to the store."""
    if order.wanted == 0:
        return None, None
    found = _first(model, program, platforms, trainable, order, forward)
    if found is None:
        return None, None
    first, lowered = found
    second = _second(first, lowered, program, platforms, order) if order.wanted == 2 else None
    gradient = _gradient(first, lowered, store)
    if second is not None:
        gradient = Gradient(
            gradient.call, gradient.wrt, gradient.of, gradient.structs, _gradient(*second, store)
        )
    return first, gradient


def _first(
    model: Exportable,
    program: Program,
    platforms: Sequence[str],
    trainable: bool,
    order: Order,
    forward: Lowered,
) -> tuple[Pullback, Lowered] | None:
    """The gradient with respect to what the outputs read and what can have one."""

    def has_gradient(operand: int) -> bool:
        if operand < len(model.leaves):
            return trainable and model.leaves[operand].trainable
        return dtypes.is_floating(program.traced.structs[operand].dtype)

    wrt = tuple(filter(has_gradient, sorted(program.read)))
    of = _floating(program.outputs)
    if not (wrt and of):
        return None
    return _attempt(program.traced, wrt, of, program, platforms, order.required >= 1, forward)


def _second(
    first: Pullback,
    lowered: Lowered,
    program: Program,
    platforms: Sequence[str],
    order: Order,
) -> tuple[Pullback, Lowered] | None:
    """The gradient of the gradient: with respect to the same operands, and the cotangents."""
    count = len(first.traced.structs)
    wrt = (*first.wrt, *range(count - len(first.of), count))
    of = _floating(first.traced.results)
    required = order.required >= 2
    return _attempt(first.traced, wrt, of, program, platforms, required, lowered)


def _floating(structs: Sequence[Any]) -> tuple[int, ...]:
    return tuple(i for i, struct in enumerate(structs) if dtypes.is_floating(struct.dtype))


def _attempt(
    traced: Traced,
    wrt: tuple[int, ...],
    of: tuple[int, ...],
    program: Program,
    platforms: Sequence[str],
    required: bool,
    before: Lowered,
) -> tuple[Pullback, Lowered] | None:
    """The pullback of a function, or None if it cannot be had and need not be."""
    try:
        pullback = Pullback(vjp(traced, wrt, of), wrt, of)
        lowered = lower(pullback.traced, platforms, names=program.operand_names)
    except _REFUSALS as error:
        if not required:
            return None
        if isinstance(error, PaxError):
            raise
        raise NotDifferentiableError(
            "jax cannot make the gradient that the export was to hold.",
            where=program.key,
            got=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}",
            write="a lower vjp_order, and trainable=False if that is 0",
        ) from error
    older = compatibility.oldest_tensorflow(before.portable.stablehlo, before.calling_convention)
    newer = compatibility.oldest_tensorflow(lowered.portable.stablehlo, lowered.calling_convention)
    return None if newer > older and not required else (pullback, lowered)


def _gradient(pullback: Pullback, lowered: Lowered, store: Store) -> Gradient:
    constants = tuple(store.of_constant(value) for value in lowered.constants)
    held = tuple(dtypes.struct_of(value) for value in lowered.constants)
    structs = (*pullback.traced.structs, *held)
    return Gradient(Call(lowered, (), constants), pullback.wrt, pullback.of, structs)
