"""Converts programs for several devices to single-device programs.

Sharding annotations are dropped. Collectives over a single device are identities; over several
devices they are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from pax_export._foundations.errors import UnsupportedOperationError

if TYPE_CHECKING:
    from jax.extend.mlir.ir import Operation

#: Of the dialect for shardings, these only ask for a place; the numbers stay the same.
_HINTS = ("sdy.sharding_constraint", "sdy.reshard", "sdy.propagation_barrier")
_GROUPS = ("sdy.sharding_group", "sdy.mesh")
_ATTRIBUTES = ("sdy.sharding", "mhlo.sharding")
#: How older programs ask for a place, and go to one device's part and back.
_CALLS = ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape")
_BY_HAND, _END_BY_HAND = "sdy.manual_computation", "sdy.return"
#: Collectives that are the identity on a single device.
_COLLECTIVES = tuple(
    f"stablehlo.{name}"
    for name in (
        *("all_reduce", "all_gather", "all_to_all", "reduce_scatter"),
        *("collective_permute", "collective_broadcast"),
    )
)
_NUMBERS = ("stablehlo.partition_id", "stablehlo.replica_id")
#: Bytes of a module that mentions devices: names of operations are kept
#: there, those of attributes are not always.
_SIGNS = tuple(
    name.removeprefix("stablehlo.").encode()
    for name in ("sdy", "harding", *_CALLS[1:], *_COLLECTIVES, *_NUMBERS)
)


def says_shardings(serialized: bytes) -> bool:
    """Whether a serialized module may speak of devices."""
    return any(sign in serialized for sign in _SIGNS)


def drop_shardings(module: ir.Module, operations: Sequence[Any]) -> None:
    """Drops the device annotations of a module's operations.

    Raises:
        UnsupportedOperationError: its results depend on the device.
    """
    sizes = _mesh_axis_sizes(operations)
    last = []
    for each in operations:
        operation = each.operation
        if operation.name in _HINTS or _is_hint(operation):
            operation.results[0].replace_all_uses_with(operation.operands[0])
            operation.erase()
        elif operation.name == _BY_HAND and _is_alone(operation, sizes):
            _inline_body(operation)
            last.append(operation)
        elif operation.name in _GROUPS:
            last.append(operation)  # when nothing refers to them any more
        elif operation.name in _COLLECTIVES:
            _let_alone(operation)
            last.append(operation)
        elif operation.name in _NUMBERS:
            operation.results[0].replace_all_uses_with(_zero(operation))
            last.append(operation)
        elif operation.name.startswith("sdy.") and operation.name != _END_BY_HAND:
            _refuse("jax.shard_map" if operation.name == _BY_HAND else operation.name)
        else:
            _drop_attributes(operation)
    for operation in last:
        operation.erase()
    count = "mhlo.num_partitions"
    if count in module.operation.attributes:
        kind = ir.IntegerType.get_signless(32)
        module.operation.attributes[count] = ir.IntegerAttr.get(kind, 1)


def _refuse(what: str) -> None:
    raise UnsupportedOperationError(
        "The model has per-device computations, which a single-device export cannot express.",
        got=what,
        write="a model without shard_map, or with a mesh of one device (with_sharding_constraint "
        "is fine); or to_stablehlo, which keeps the devices",
    )


def _is_hint(operation: Operation) -> bool:
    """Whether this is how older programs ask for a place, or take a part that is the whole."""
    if operation.name != "stablehlo.custom_call":
        return False
    name = ir.StringAttr(operation.attributes["call_target_name"]).value
    return name in _CALLS and operation.operands[0].type == operation.results[0].type


# --- one device among none ----------------------------------------------------


def _mesh_axis_sizes(operations: Sequence[Any]) -> dict[str, int]:
    """Returns the sizes of all mesh axes; the largest, if meshes share a name."""
    sizes: dict[str, int] = {}
    for each in operations:
        if each.operation.name == "sdy.mesh":
            for name, size in re.findall(r'"([^"]*)"=(\d+)', str(each.operation)):
                sizes[name] = max(int(size), sizes.get(name, 1))
    return sizes


def _is_alone(operation: Operation, sizes: dict[str, int]) -> bool:
    """Whether a part that is written for each device is there for one only."""
    named = re.findall(r'"([^"]*)"', str(operation.attributes["manual_axes"]))
    return math.prod(sizes.get(name, 0) for name in named) == 1


def _inline_body(operation: Operation) -> None:
    block = operation.regions[0].blocks[0]
    for argument, operand in zip(block.arguments, operation.operands):
        argument.replace_all_uses_with(operand)
    *inside, end = list(block.operations)
    for each in inside:
        each.operation.move_before(operation)
    for result, value in zip(operation.results, end.operation.operands):
        result.replace_all_uses_with(value)


def _let_alone(operation: Operation) -> None:
    """Replaces an exchange of a device with itself by its operands."""
    values = list(zip(operation.operands, operation.results))
    if any(operand.type != result.type for operand, result in values) or not _by_itself(operation):
        _refuse(operation.name.removeprefix("stablehlo."))
    for operand, result in values:
        result.replace_all_uses_with(operand)


def _by_itself(operation: Operation) -> bool:
    """Whether no device has another one to exchange with; as text, for empty lists of pairs."""
    names = ("source_target_pairs", "replica_groups")
    text = next(str(operation.attributes[name]) for name in names if name in operation.attributes)
    values, _, kind = text.rpartition(":")
    rows, columns = re.findall(r"\d+(?=x)", kind)
    if names[0] not in operation.attributes:
        return columns == "1"
    numbers = re.findall(r"\d+", values)
    return rows != "0" and numbers[::2] == (numbers[1::2] or numbers)


def _zero(operation: Operation) -> ir.Value:
    """The number of the only device."""
    kind = operation.results[0].type
    with operation.context, ir.Location.unknown(), ir.InsertionPoint(operation):
        element = ir.IntegerAttr.get(ir.RankedTensorType(kind).element_type, 0)
        return stablehlo.ConstantOp(ir.DenseElementsAttr.get([element], kind)).result


def _drop_attributes(operation: Operation) -> None:
    for name in _ATTRIBUTES:
        if name in operation.attributes:
            del operation.attributes[name]
    for name in ("arg_attrs", "res_attrs"):  # of a function's arguments and results
        if name in operation.attributes:
            attributes = [
                ir.DictAttr.get(
                    {each.name: each.attr for each in argument if each.name not in _ATTRIBUTES}
                )
                for argument in map(ir.DictAttr, ir.ArrayAttr(operation.attributes[name]))
            ]
            operation.attributes[name] = ir.ArrayAttr.get(attributes)
