"""Rewrites of StableHLO operations that some readers have not, or compute differently.

- Maxima and minima propagate NaN. TensorFlow lets XLA return the first of two numbers that are
  unordered: ``max(1, NaN)`` is 1 there, and NaN in jax. So a NaN in the second operand is selected
  explicitly; one in the first operand, or next to a constant, propagates anyway.
- Redundant dot algorithms are dropped. Since StableHLO 1.7, a product may name its algorithm: the
  dtypes of factors and sums. jax does so in half-precision attention. If operands and result
  already have these dtypes, older readers support the product without it. In the gradient one
  operand is wider; the other is widened, as jax does on CPUs. An algorithm for two wide operands
  is kept, because it rounds both.
- Symbolic sizes may be 0. If every result has a dimension that is 0 whenever a size is 0, the
  results are empty and cannot be wrong. So the program need not check that size, and an empty
  batch works.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from pax_export.export.artifact import dimensions

if TYPE_CHECKING:
    from jax.extend.mlir.ir import Operation

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


def _keep_second(operation: Operation) -> bool:
    first, second = operation.operands
    if not _is_float(second) or first == second or _is_number(second):
        return False
    if _is_number(first):
        operation.operands[0], operation.operands[1] = second, first
        return True
    _choose(operation, [second])
    return True


def _keep_bounds(operation: Operation) -> bool:
    """A clamp: the older XLA of TensorFlow takes a bound for a value that is NaN."""
    least, value, most = operation.operands
    # A bound that is itself NaN for all elements is not changed: it would have to be broadcast.
    bounds = [each for each in (value, most, least) if each.type == value.type]
    bounds = [each for each in bounds if _is_float(each) and not _is_number(each)]
    if bounds:
        _choose(operation, bounds)
    return bool(bounds)


def _choose(operation: Operation, values: list[ir.Value]) -> None:
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


def _is_float(value: ir.Value) -> bool:
    return str(ir.ShapedType(value.type).element_type).startswith(("f", "bf"))


def _is_number(value: ir.Value) -> bool:
    """Whether a value is one number, not NaN, that is written in the program."""
    owner = value.owner
    while not isinstance(owner, ir.Block) and owner.name in _REPEATS:
        owner = owner.operands[0].owner
    if isinstance(owner, ir.Block) or owner.name != "stablehlo.constant":
        return False
    numbers = ir.DenseElementsAttr(owner.attributes["value"])
    return numbers.is_splat and not math.isnan(ir.FloatAttr(numbers.get_splat_value()).value)


_NAME = "algorithm"
_PART = re.compile(r"(\w+) = ([\w<>]+)")
_WIDE = ("f32", "f64")


def drop_dot_algorithm(operation: Operation) -> bool:
    """Drops the algorithm of a product that is the plain one of its types."""
    if operation.name != "stablehlo.dot_general" or _NAME not in operation.attributes:
        return False
    parts = dict(_PART.findall(str(operation.attributes[_NAME])))
    kinds = [_element(value) for value in operation.operands]
    named = [parts.get("lhs_precision_type"), parts.get("rhs_precision_type")]
    counts = ("lhs_component_count", "rhs_component_count", "num_primitive_operations")
    wide = [kind in _WIDE for kind in kinds]
    if (
        all(wide)
        or any(parts.get(name) != "1" for name in counts)
        or parts.get("accumulation_type") != _element(operation.results[0])
        or any(kind != name for kind, name, is_wide in zip(kinds, named, wide) if not is_wide)
    ):
        return False
    del operation.attributes[_NAME]
    if any(wide):
        narrow = wide.index(False)
        operation.operands[narrow] = _widen_operand(operation, narrow)
    return True


def _element(value: ir.Value) -> str:
    return str(ir.RankedTensorType(value.type).element_type)


def _widen_operand(operation: Operation, index: int) -> ir.Value:
    """An operand in the type of the other one."""
    kind = ir.RankedTensorType(operation.operands[index].type)
    other = ir.RankedTensorType(operation.operands[1 - index].type)
    with operation.context, ir.Location.unknown(), ir.InsertionPoint(operation):
        wide = ir.RankedTensorType.get(tensor_shape(kind), other.element_type)
        return stablehlo.ConvertOp(wide, operation.operands[index]).result


def tensor_shape(kind: ir.ShapedType) -> list[int]:
    """The sizes, with MLIR's own number for a dynamic one."""
    return [
        ir.ShapedType.get_dynamic_size() if kind.is_dynamic_dim(i) else kind.get_dim_size(i)
        for i in range(kind.rank)
    ]


_INSISTS = re.compile(r"Expected value >= 1 for dimension variable '(\w+)'")
#: Values of the other sizes while one of them is 0.
_OTHERS = (1, 2, 7)


def may_be_empty(results: Iterable[Sequence[Any]]) -> frozenset[str]:
    """Returns the symbolic sizes that make all results of these shapes empty when they are 0."""
    shapes = [[size if isinstance(size, int) else str(size) for size in each] for each in results]
    names = {name for shape in shapes for size in shape for name in dimensions.names(size)}
    return frozenset(name for name in names if all(_is_empty(each, name) for each in shapes))


def _is_empty(shape: Sequence[int | str], zero: str) -> bool:
    def vanishes(size: int | str) -> bool:
        others = set(dimensions.names(size)) - {zero}
        return all(
            dimensions.defined_value(size, {**dict.fromkeys(others, other), zero: 0}) == 0
            for other in _OTHERS
        )

    return any(map(vanishes, shape))


def let_be_empty(operations: Sequence[Any], names: Collection[str]) -> None:
    """Drops the checks of a module, given by its operations, that these sizes are 1 or more."""
    for each in operations:
        operation = each.operation
        if "error_message" in operation.attributes and operation.name == "stablehlo.custom_call":
            message = ir.StringAttr(operation.attributes["error_message"]).value
            found = _INSISTS.search(message)
            if found and found[1] in names:
                operation.erase()
