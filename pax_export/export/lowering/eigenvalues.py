"""Calls of `Eigh`, which XLA writes out: all of them asked for the same.

XLA writes `Eigh` out once for each shape of matrices, and gives that to every call with
this shape, whatever else a call says: whether eigenvalues are sorted, and which triangle of the
matrix holds it.  A program with `svd`, which sorts by itself, and `eigh` would then get
eigenvalues in any order, or those of another matrix.  So every call asks for the same here:
sorted, of the lower triangle.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

_TARGET = "Eigh"
#: What a call says: lower triangle or not, sorted or not, most sweeps, and when to stop.
_ASKED = re.compile(r"([01]),([01]),(.*)")


def says_eigh(serialized: bytes) -> bool:
    """Whether a serialised module may call `Eigh`."""
    return _TARGET.encode() in serialized


def ask_alike(operations: Iterable[Any]) -> None:
    """Lets all calls of `Eigh` in a module, given by its operations, ask for the same."""
    for each in operations:
        operation = each.operation
        if _is_eigh(operation):
            asked = _ASKED.fullmatch(ir.StringAttr(operation.attributes["backend_config"]).value)
            if asked is None:
                continue  # what nobody knows is left as it is
            if asked[1] == "0":
                operation.operands[0] = _other_triangle(operation)
            alike = ir.StringAttr.get(f"1,1,{asked[3]}", operation.context)
            operation.attributes["backend_config"] = alike


def _is_eigh(operation: Any) -> bool:
    return (
        operation.name == "stablehlo.custom_call"
        and ir.StringAttr(operation.attributes["call_target_name"]).value == _TARGET
        and "backend_config" in operation.attributes
    )


def _other_triangle(operation: Any) -> Any:
    """The matrix that has below its diagonal what this one has above, conjugated."""
    matrix = operation.operands[0]
    kind = ir.RankedTensorType(matrix.type)
    order = [*range(kind.rank - 2), kind.rank - 1, kind.rank - 2]
    with operation.context, ir.Location.unknown(), ir.InsertionPoint(operation):
        turned = stablehlo.TransposeOp(matrix, order).result
        if not str(kind.element_type).startswith("complex"):
            return turned
        imaginary = stablehlo.NegOp(stablehlo.ImagOp(turned).result).result
        return stablehlo.ComplexOp(stablehlo.RealOp(turned).result, imaginary).result
