"""The shapes that the operations of a StableHLO module give, where types leave sizes open.

A size is a number or a symbol of jax.  Small whole numbers are followed too: a module with
symbolic sizes computes from them the shapes of what it broadcasts, reshapes and cuts out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

#: Shapes have few numbers; what has more is no shape.
_LONGEST = 32


@dataclass(frozen=True)
class Known:
    """What is known of an array: its sizes, and of few whole numbers themselves."""

    shape: tuple[Any, ...]
    value: list[Any] | None = None

    @property
    def size(self) -> Any:
        return math.prod(self.shape)


def shapes_of(kind: Any) -> tuple[int | None, ...]:
    """The sizes of a type, None for each that it leaves open; none of a type without."""
    if not isinstance(kind, ir.RankedTensorType):
        return ()
    return tuple(None if kind.is_dynamic_dim(n) else kind.get_dim_size(n) for n in range(kind.rank))


def followed(name: str, operation: Any, operands: Sequence[Known], unknown: Any) -> list[Known]:
    """What is known of the results of an operation; ``unknown`` stands for any other size."""
    rule = _VALUES.get(name)
    value = None
    if rule is not None and _is_small(operation):
        value = rule(operation, operands)
    found = []
    for place, result in enumerate(operation.results):
        fixed = shapes_of(result.type)
        if any(size is None for size in fixed):
            sizes = _sizes(name, operation, operands, place, len(fixed))
            sizes = [unknown] * len(fixed) if sizes is None else sizes
            fixed = [new if size is None else size for size, new in zip(fixed, sizes)]
        found.append(Known(tuple(fixed), value))
    return found


def _is_small(operation: Any) -> bool:
    fixed = shapes_of(operation.results[0].type)
    element = str(getattr(operation.results[0].type, "element_type", ""))
    whole = element.startswith(("i", "ui")) and element != "i1"
    return whole and None not in fixed and math.prod(fixed) <= _LONGEST  # type: ignore[arg-type]


def _sizes(
    name: str, operation: Any, operands: Sequence[Known], place: int, rank: int
) -> Sequence[Any] | None:
    rule = _SHAPES.get(name)
    sizes = rule(operation, operands) if rule is not None else None
    if sizes is None:
        alike = [each.shape for each in operands if len(each.shape) == rank]
        same = place < len(operands) and len(operands[place].shape) == rank
        if rule is None and alike:
            sizes = operands[place].shape if same else alike[0]
    return sizes if sizes is not None and len(sizes) == rank else None


# --- small whole numbers ----------------------------------------------------------------


def _constant(operation: Any, operands: Sequence[Known]) -> list[Any] | None:
    content = operation.attributes["value"]
    return [int(each) for each in np.array(content).ravel()]


def _each(function: Callable[[Any, Any], Any]) -> Callable[..., list[Any] | None]:
    def rule(operation: Any, operands: Sequence[Known]) -> list[Any] | None:
        left, right = (each.value for each in operands)
        if left is None or right is None or len(left) != len(right):
            return None
        found = [function(*pair) for pair in zip(left, right)]
        return None if None in found else found

    return rule


def _ordered(a: Any, b: Any) -> tuple[Any, Any]:
    """The smaller and the larger; None for both where symbols leave it open."""
    try:
        return (a, b) if a <= b else (b, a)
    except Exception:  # of jax, which has no public name for it
        return None, None


def _same(operation: Any, operands: Sequence[Known]) -> list[Any] | None:
    return operands[0].value


def _joined(operation: Any, operands: Sequence[Known]) -> list[Any] | None:
    if any(each.value is None or len(each.shape) != 1 for each in operands):
        return None
    return [number for each in operands for number in each.value or ()]


def _cut(operation: Any, operands: Sequence[Known]) -> list[Any] | None:
    value = operands[0].value
    if value is None or len(operands[0].shape) != 1:
        return None
    first, last, step = (next(iter(operation.attributes[each])) for each in _SLICE)
    return value[first:last:step]


def _spread(operation: Any, operands: Sequence[Known]) -> list[Any] | None:
    value = operands[0].value
    if value is None or len(value) != 1:
        return None
    return value * math.prod(shapes_of(operation.results[0].type))  # type: ignore[arg-type]


def _dimension(operation: Any, operands: Sequence[Known]) -> list[Any]:
    return [operands[0].shape[ir.IntegerAttr(operation.attributes["dimension"]).value]]


_SLICE = ("start_indices", "limit_indices", "strides")
_VALUES: dict[str, Callable[..., list[Any] | None]] = {
    "constant": _constant,
    "add": _each(lambda a, b: a + b),
    "subtract": _each(lambda a, b: a - b),
    "multiply": _each(lambda a, b: a * b),
    "divide": _each(lambda a, b: a // b if isinstance(b, int) and b else None),
    "remainder": _each(lambda a, b: a % b if isinstance(b, int) and b else None),
    "maximum": _each(lambda a, b: _ordered(a, b)[1]),
    "minimum": _each(lambda a, b: _ordered(a, b)[0]),
    "convert": _same,
    "reshape": _same,
    "concatenate": _joined,
    "slice": _cut,
    "broadcast_in_dim": _spread,
    "get_dimension_size": _dimension,
}


# --- sizes that types leave open --------------------------------------------------------


def _by_last(operation: Any, operands: Sequence[Known]) -> list[Any] | None:
    return operands[-1].value


def _transposed(operation: Any, operands: Sequence[Known]) -> list[Any]:
    return [operands[0].shape[axis] for axis in operation.attributes["permutation"]]


def _dot(operation: Any, operands: Sequence[Known]) -> list[Any]:
    numbers = stablehlo.DotDimensionNumbers(operation.attributes["dot_dimension_numbers"])
    left, right = (each.shape for each in operands)
    batch = [left[axis] for axis in numbers.lhs_batching_dimensions]
    gone = {*numbers.lhs_contracting_dimensions, *numbers.lhs_batching_dimensions}
    rows = [size for axis, size in enumerate(left) if axis not in gone]
    gone = {*numbers.rhs_contracting_dimensions, *numbers.rhs_batching_dimensions}
    return [*batch, *rows, *(size for axis, size in enumerate(right) if axis not in gone)]


def _reduced(operation: Any, operands: Sequence[Known]) -> list[Any]:
    gone = set(operation.attributes["dimensions"])
    return [size for axis, size in enumerate(operands[0].shape) if axis not in gone]


def _concatenated(operation: Any, operands: Sequence[Known]) -> list[Any]:
    axis = ir.IntegerAttr(operation.attributes["dimension"]).value
    sizes = list(operands[0].shape)
    sizes[axis] = sum(each.shape[axis] for each in operands)
    return sizes


def _padded(operation: Any, operands: Sequence[Known]) -> list[Any] | None:
    if "edge_padding_low" in operation.attributes:
        names = ("edge_padding_low", "edge_padding_high", "interior_padding")
        low, high, inner = (list(operation.attributes[each]) for each in names)
    else:
        low, high, inner = (each.value for each in operands[2:5])
        if low is None or high is None or inner is None:
            return None
    rows = zip(operands[0].shape, low, high, inner)
    return [size + a + b + (c * (size - 1) if c else 0) for size, a, b, c in rows]


def _sliced(operation: Any, operands: Sequence[Known]) -> list[Any] | None:
    starts, limits, steps = (each.value for each in operands[1:4])
    if starts is None or limits is None or steps is None:
        return None
    rows = zip(starts, limits, steps)
    return [(limit - start + step - 1) // step for start, limit, step in rows]


def _gathered(operation: Any, operands: Sequence[Known]) -> list[Any] | None:
    numbers = stablehlo.GatherDimensionNumbers(operation.attributes["dimension_numbers"])
    if "slice_sizes" in operation.attributes:
        cut: Any = list(operation.attributes["slice_sizes"])
    else:
        cut = operands[2].value
    if cut is None:
        return None
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [size for axis, size in enumerate(cut) if axis not in gone]
    places = list(operands[1].shape)
    if numbers.index_vector_dim < len(places):
        del places[numbers.index_vector_dim]
    offsets = set(numbers.offset_dims)
    rank = len(kept) + len(places)
    rows, columns = iter(places), iter(kept)
    return [next(columns) if axis in offsets else next(rows) for axis in range(rank)]


def _convolved(operation: Any, operands: Sequence[Known]) -> list[Any]:
    found = operation.attributes
    numbers = stablehlo.ConvDimensionNumbers(found["dimension_numbers"])
    image, kernel = operands[0].shape, operands[1].shape
    count = len(image) - 2
    ones = [1] * count
    padding = np.array(found["padding"]).reshape(-1, 2) if "padding" in found else None
    if padding is None and len(operands) > 2 and operands[2].value is not None:
        padding = np.array(operands[2].value, object).reshape(-1, 2)
    strides = list(found["window_strides"]) if "window_strides" in found else ones
    spread = list(found["lhs_dilation"]) if "lhs_dilation" in found else ones
    dilation = list(found["rhs_dilation"]) if "rhs_dilation" in found else ones
    sizes: dict[int, Any] = {
        numbers.output_batch_dimension: image[numbers.input_batch_dimension],
        numbers.output_feature_dimension: kernel[numbers.kernel_output_feature_dimension],
    }
    for n, axis in enumerate(numbers.output_spatial_dimensions):
        size = image[numbers.input_spatial_dimensions[n]]
        window = (kernel[numbers.kernel_spatial_dimensions[n]] - 1) * dilation[n] + 1
        extent = (size - 1) * spread[n] + 1 if spread[n] != 1 else size
        around = sum(_plain(each) for each in padding[n]) if padding is not None else 0
        sizes[axis] = (extent + around - window) // strides[n] + 1
    return [sizes[axis] for axis in range(count + 2)]


def _plain(number: Any) -> Any:
    return int(number) if isinstance(number, np.integer) else number


def _windowed(operation: Any, operands: Sequence[Known]) -> list[Any]:
    found = operation.attributes
    rank = len(operands[0].shape)
    ones = [1] * rank
    windows = list(found["window_dimensions"])
    strides = list(found["window_strides"]) if "window_strides" in found else ones
    spread = list(found["base_dilations"]) if "base_dilations" in found else ones
    dilation = list(found["window_dilations"]) if "window_dilations" in found else ones
    padding = np.array(found["padding"]).reshape(-1, 2) if "padding" in found else [[0, 0]] * rank
    sizes = []
    for n, size in enumerate(operands[0].shape):
        window = (windows[n] - 1) * dilation[n] + 1
        extent = (size - 1) * spread[n] + 1 if spread[n] != 1 else size
        sizes.append((extent + sum(map(int, padding[n])) - window) // strides[n] + 1)
    return sizes


def _given_shape(operation: Any, operands: Sequence[Known]) -> list[Any] | None:
    """A custom call says which operand holds the shape of its results."""
    if "indices_of_shape_operands" not in operation.attributes:
        return None
    (place, *_) = np.array(operation.attributes["indices_of_shape_operands"]).ravel()
    return operands[int(place)].value


_SHAPES: dict[str, Callable[..., Sequence[Any] | None]] = {
    **dict.fromkeys(("dynamic_broadcast_in_dim", "dynamic_reshape", "dynamic_iota"), _by_last),
    "transpose": _transposed,
    "dot_general": _dot,
    "reduce": _reduced,
    "concatenate": _concatenated,
    "pad": _padded,
    "dynamic_pad": _padded,
    "real_dynamic_slice": _sliced,
    "gather": _gathered,
    "dynamic_gather": _gathered,
    "convolution": _convolved,
    "dynamic_conv": _convolved,
    "reduce_window": _windowed,
    "custom_call": _given_shape,
}
