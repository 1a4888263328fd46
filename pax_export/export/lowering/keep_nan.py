"""Maxima and minima that propagate NaN.

TensorFlow lets XLA return the first of two numbers that are unordered: ``max(1, NaN)`` is 1 there,
and NaN in jax. So a NaN in the second operand is selected explicitly; one in the first operand, or
next to a constant, propagates anyway.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

_EXTREMES = ("stablehlo.maximum", "stablehlo.minimum")
_CLAMP = "stablehlo.clamp"
#: Bytes of a module that contains such operations.
_SIGNS = (b"maximum", b"minimum", b"clamp")
#: Operations that only repeat or convert their operand, and create no NaN.
_REPEATS = tuple(
    f"stablehlo.{name}"
    for name in ("broadcast_in_dim", "dynamic_broadcast_in_dim", "reshape", "convert")
)


def says_extremes(serialized: bytes) -> bool:
    """Whether a serialized module may look for largest or smallest values."""
    return any(sign in serialized for sign in _SIGNS)


def keep_nan(operations: Iterable[Any]) -> int:
    """Lets the extremes of a module, given by its operations, keep NaN; how many it changed."""
    changed = 0
    for each in operations:
        operation = each.operation
        if operation.name in _EXTREMES:
            changed += _keep_second(operation)
        elif operation.name == _CLAMP:
            changed += _keep_bounds(operation)
    return changed


def _keep_second(operation: Any) -> bool:
    first, second = operation.operands
    if not _is_float(second) or first == second or _is_number(second):
        return False
    if _is_number(first):
        operation.operands[0], operation.operands[1] = second, first
        return True
    _choose(operation, [second])
    return True


def _keep_bounds(operation: Any) -> bool:
    """A clamp: the older XLA of TensorFlow takes a bound for a value that is NaN."""
    least, value, most = operation.operands
    # A bound that is itself NaN for all elements is not changed: it would have to be broadcast.
    bounds = [each for each in (value, most, least) if each.type == value.type]
    bounds = [each for each in bounds if _is_float(each) and not _is_number(each)]
    if bounds:
        _choose(operation, bounds)
    return bool(bounds)


def _choose(operation: Any, values: list[Any]) -> None:
    """Selects a value where it is NaN, else the result of the operation."""
    result = operation.results[0]
    chosen, added = result, []
    with operation.context, operation.location, ir.InsertionPoint.after(operation):
        for value in values:
            unequal = stablehlo.ComparisonDirectionAttr.get("NE")
            is_nan = stablehlo.compare(value, value, unequal)
            chosen = stablehlo.select(is_nan, value, chosen)
            added.append(chosen.owner.operation)
    result.replace_all_uses_except(chosen, added[0])


def _is_float(value: Any) -> bool:
    return str(ir.ShapedType(value.type).element_type).startswith(("f", "bf"))


def _is_number(value: Any) -> bool:
    """Whether a value is one number, not NaN, that is written in the program."""
    owner = value.owner
    while not isinstance(owner, ir.Block) and owner.name in _REPEATS:
        owner = owner.operands[0].owner
    if isinstance(owner, ir.Block) or owner.name != "stablehlo.constant":
        return False
    numbers = ir.DenseElementsAttr(owner.attributes["value"])
    return numbers.is_splat and not math.isnan(ir.FloatAttr(numbers.get_splat_value()).value)
