"""A program for several devices as one for a single device, which is what serves it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.mlir import ir

from pax_export._errors import UnsupportedOperationError

#: Of the dialect for shardings, these only ask for a place; the numbers stay the same.
_HINTS = ("sdy.sharding_constraint", "sdy.reshard", "sdy.propagation_barrier")
_GROUPS = ("sdy.sharding_group", "sdy.mesh")
_ATTRIBUTES = ("sdy.sharding", "mhlo.sharding")


def says_shardings(serialized: bytes) -> bool:
    """Whether a serialised module may speak of shardings."""
    return b"sdy" in serialized or b"Sharding" in serialized


def drop_shardings(module: Any, operations: Sequence[Any]) -> None:
    """Drops what the operations of a module say of devices.

    Raises:
        UnsupportedOperationError: it computes another thing on each device.
    """
    last = []
    for each in operations:
        operation = each.operation
        if operation.name in _HINTS or _is_hint(operation):
            operation.results[0].replace_all_uses_with(operation.operands[0])
            operation.erase()
        elif operation.name in _GROUPS:
            last.append(operation)  # when nobody names them any more
        elif operation.name.startswith("sdy."):
            raise UnsupportedOperationError(
                "The model says what each device computes, and an export for one device cannot.",
                got="jax.shard_map"
                if operation.name in ("sdy.manual_computation", "sdy.return")
                else operation.name,
                write="a model without shard_map (with_sharding_constraint is fine), or "
                "to_stablehlo, which keeps the devices",
            )
        else:
            _drop_attributes(operation)
    for operation in last:
        operation.erase()
    count = "mhlo.num_partitions"
    if count in module.operation.attributes:
        kind = ir.IntegerType.get_signless(32)
        module.operation.attributes[count] = ir.IntegerAttr.get(kind, 1)


def _is_hint(operation: Any) -> bool:
    """Whether this is how older programs ask for a place."""
    if operation.name != "stablehlo.custom_call":
        return False
    return ir.StringAttr(operation.attributes["call_target_name"]).value == "Sharding"


def _drop_attributes(operation: Any) -> None:
    for name in _ATTRIBUTES:
        if name in operation.attributes:
            del operation.attributes[name]
    for name in ("arg_attrs", "res_attrs"):  # of a function's arguments and results
        if name in operation.attributes:
            kept = [
                ir.DictAttr.get(
                    {each.name: each.attr for each in given if each.name not in _ATTRIBUTES}
                )
                for given in map(ir.DictAttr, ir.ArrayAttr(operation.attributes[name]))
            ]
            operation.attributes[name] = ir.ArrayAttr.get(kept)
