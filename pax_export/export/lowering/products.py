"""Removes redundant dot algorithms.

Since StableHLO 1.7, a product may name its algorithm: the dtypes of factors and sums. jax does so
in half-precision attention. If operands and result already have these dtypes, the algorithm is
redundant, and older readers support the product without it. In the gradient one operand is wider;
the other is widened, as jax does on CPUs. An algorithm for two wide operands is kept, because it
rounds both.
"""

from __future__ import annotations

import re
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

_NAME = "algorithm"
_PART = re.compile(r"(\w+) = ([\w<>]+)")
_WIDE = ("f32", "f64")


def drop_dot_algorithm(operation: Any) -> bool:
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


def _element(value: Any) -> str:
    return str(ir.RankedTensorType(value.type).element_type)


def _widen_operand(operation: Any, place: int) -> Any:
    """An operand in the type of the other one."""
    kind = ir.RankedTensorType(operation.operands[place].type)
    other = ir.RankedTensorType(operation.operands[1 - place].type)
    unknown = ir.ShapedType.get_dynamic_size()
    shape = [
        unknown if kind.is_dynamic_dim(axis) else kind.get_dim_size(axis)
        for axis in range(kind.rank)
    ]
    with operation.context, ir.Location.unknown(), ir.InsertionPoint(operation):
        wide = ir.RankedTensorType.get(shape, other.element_type)
        return stablehlo.ConvertOp(wide, operation.operands[place]).result
