"""Batched gathers and scatters as plain ones, which every reader knows.

`jax.vmap` of an indexing operation gives a gather (or scatter) that names some
dimensions of its operand and of its indices as batches: entry ``i`` of one is
looked up in entry ``i`` of the other.  StableHLO has that since 1.1.  The same
is said without: the number of the batch becomes one more component of each
index, and its dimension one that the index chooses from.

StableHLO has a pass for this, which skips symbolic shapes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

_GATHERS = ("stablehlo.gather", "stablehlo.dynamic_gather")


def rewrite(operations: Iterable[Any]) -> int:
    """Rewrites the batched gathers and scatters among these operations, in place.

    Returns:
        How many there were.
    """
    count = 0
    for each in operations:
        operation = each.operation
        if operation.name in _GATHERS:
            count += _rewrite_gather(operation)
        elif operation.name == "stablehlo.scatter":
            count += _rewrite_scatter(operation)
    return count


def _rewrite_gather(operation: Any) -> bool:
    old = stablehlo.GatherDimensionNumbers(operation.attributes["dimension_numbers"])
    batches, places = old.operand_batching_dims, old.start_indices_batching_dims
    if not batches or not _counted(operation.operands[1], old.index_vector_dim):
        return False
    operation.operands[1] = _numbered(operation, 1, places, old.index_vector_dim)
    operation.attributes["dimension_numbers"] = stablehlo.GatherDimensionNumbers.get(
        offset_dims=old.offset_dims,
        collapsed_slice_dims=sorted([*old.collapsed_slice_dims, *batches]),
        operand_batching_dims=[],
        start_indices_batching_dims=[],
        start_index_map=[*batches, *old.start_index_map],
        index_vector_dim=old.index_vector_dim,
        context=operation.context,
    )
    _forget_order(operation)
    return True


def _rewrite_scatter(operation: Any) -> bool:
    old = stablehlo.ScatterDimensionNumbers(operation.attributes["scatter_dimension_numbers"])
    batches, places = old.input_batching_dims, old.scatter_indices_batching_dims
    indices = len(operation.operands) // 2  # inputs, indices, updates
    if not batches or not _counted(operation.operands[indices], old.index_vector_dim):
        return False
    operation.operands[indices] = _numbered(operation, indices, places, old.index_vector_dim)
    operation.attributes["scatter_dimension_numbers"] = stablehlo.ScatterDimensionNumbers.get(
        update_window_dims=old.update_window_dims,
        inserted_window_dims=sorted([*old.inserted_window_dims, *batches]),
        input_batching_dims=[],
        scatter_indices_batching_dims=[],
        scattered_dims_to_operand_dims=[*batches, *old.scattered_dims_to_operand_dims],
        index_vector_dim=old.index_vector_dim,
        context=operation.context,
    )
    _forget_order(operation)
    return True


def _counted(indices: Any, axis: int) -> bool:
    """Whether the components of an index have a dimension of their own; jax gives them one."""
    return axis < ir.RankedTensorType(indices.type).rank


def _forget_order(operation: Any) -> None:
    # Sorted within each batch is not sorted as a whole, unless batches come first.
    operation.attributes["indices_are_sorted"] = ir.BoolAttr.get(False, operation.context)


def _numbered(operation: Any, operand: int, places: Iterable[int], axis: int) -> Any:
    """The indices with the numbers of their batches in front of each."""
    indices = operation.operands[operand]
    with operation.context, ir.Location.unknown(), ir.InsertionPoint(operation):
        indices = _wide(indices)
        numbers = [_iota(indices, place, axis) for place in places]
        kind = ir.RankedTensorType(indices.type)
        shape = _shape(kind)
        shape[axis] += len(numbers)
        joined = ir.RankedTensorType.get(shape, kind.element_type)
        # Named by its keyword only where that has one name in all versions.
        return stablehlo.ConcatenateOp([*numbers, indices], axis, results=[joined]).result


def _wide(indices: Any) -> Any:
    """Indices of at least 32 bits: an int8 cannot count the batches."""
    kind = ir.RankedTensorType(indices.type)
    if ir.IntegerType(kind.element_type).width >= 32:
        return indices
    wide = ir.RankedTensorType.get(_shape(kind), ir.IntegerType.get_signless(32))
    return stablehlo.ConvertOp(wide, indices).result


def _iota(indices: Any, place: int, axis: int) -> Any:
    """The index along one dimension, shaped like the indices with one component."""
    kind = ir.RankedTensorType(indices.type)
    shape = _shape(kind)
    shape[axis] = 1
    result = ir.RankedTensorType.get(shape, kind.element_type)
    if result.has_static_shape:
        return stablehlo.IotaOp(result, place).result
    sizes = [
        _size(indices, dimension) if size == ir.ShapedType.get_dynamic_size() else _constant([size])
        for dimension, size in enumerate(shape)
    ]
    whole = stablehlo.ConcatenateOp(sizes, 0, results=[_vector(len(sizes))]).result
    return stablehlo.DynamicIotaOp(result, whole, place).result


def _size(value: Any, dimension: int) -> Any:
    """The size of a dynamic dimension, as a vector of one number."""
    size = stablehlo.GetDimensionSizeOp(value, dimension).result
    return stablehlo.ReshapeOp(_vector(1), size).result


def _constant(values: list[int]) -> Any:
    kind = ir.IntegerType.get_signless(32)
    elements = [ir.IntegerAttr.get(kind, value) for value in values]
    return stablehlo.ConstantOp(ir.DenseElementsAttr.get(elements, _vector(len(values)))).result


def _vector(length: int) -> Any:
    return ir.RankedTensorType.get([length], ir.IntegerType.get_signless(32))


def _shape(kind: Any) -> list[int]:
    """The sizes, with MLIR's own number for a dynamic one."""
    return [
        ir.ShapedType.get_dynamic_size() if kind.is_dynamic_dim(i) else kind.get_dim_size(i)
        for i in range(kind.rank)
    ]
