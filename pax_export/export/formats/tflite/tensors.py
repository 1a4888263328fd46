"""TFLite tensors of jax arrays, in supported dtypes.

A tensor is *thin* if a dimension with equal slices has size 1 instead; elementwise operators
broadcast it, and `full` broadcasts it for others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from pax_export._foundations.types import DTypeLike, Size
from pax_export.export.artifact import dimensions
from pax_export.export.formats.tflite.builder import moves
from pax_export.export.formats.tflite.builder import operators as lite
from pax_export.export.formats.tflite.builder.graph import Tensor, TensorLike, current
from pax_export.export.portable import RuleTable
from pax_export.export.portable.sizes import GraphSizes
from pax_export.export.portable.sizes import is_number as is_static

#: Carrier types of jax's dtypes: half precision is computed as float32, unsigned
#: numbers of 32 bits as the signed ones with these bits.
CARRIERS = {
    **dict.fromkeys(("float16", "bfloat16", "float32"), "float32"),
    **dict.fromkeys(("int8", "int16", "int32", "uint8", "uint16", "uint32"), "int32"),
    "int64": "int64",
    "bool": "bool",
}
NARROW = ("int8", "int16", "uint8", "uint16")
#: The largest rank that all kernels of TFLite broadcast, slice and pad.
_DIMENSIONS = 4


def constant(value: TensorLike, dtype: DTypeLike | None = None) -> Any:
    """Returns a jax or numpy array as a constant in its carrier type."""
    array = np.asarray(value) if dtype is None else np.asarray(value, dtype)
    carrier = CARRIERS[array.dtype.name]
    if array.dtype.name == "uint32":
        return lite.constant(array.view(np.int32))
    return lite.constant(array.astype(carrier))


def to_carrier(tensor: Tensor, dtype: str) -> list[Any]:
    """Converts an input or a weight to its carriers: complex numbers to two parts."""
    if dtype == "complex64":
        return [lite.real(tensor), lite.imag(tensor)]
    carrier = CARRIERS.get(dtype, dtype)  # weights may have others, which files store
    return [tensor if dtype == carrier else lite.cast(tensor, carrier)]


def from_carrier(tensor: Tensor, dtype: str) -> Any:
    return tensor if dtype == CARRIERS[dtype] else lite.cast(tensor, dtype)


def wrapped(tensor: Tensor, dtype: DTypeLike) -> Any:
    """Wraps or rounds numbers to a dtype with fewer bits than its carrier."""
    name = np.dtype(dtype).name
    return lite.cast(lite.cast(tensor, name), lite.int32) if name in NARROW else tensor


def single(tensor: Tensor) -> Any:
    """Returns the value of a known tensor with one element, or None."""
    if any(size != 1 for size in tensor.shape) or tensor.value is None:
        return None
    return np.ravel(tensor.value)[0]


def reshape(tensor: Tensor, shape: Sequence[Any], sizes: TfliteSizes) -> Any:
    unknown = [index for index, size in enumerate(shape) if not is_static(size)]
    static = [int(size) if is_static(size) else None for size in shape]
    if list(tensor.shape) == static and len(unknown) < 2:
        return tensor
    if len(unknown) == 1 and 0 not in static:
        return moves.reshape(tensor, moves.with_rest(static))
    result = moves.reshape(tensor, sizes.vector(shape))
    result.set_shape(static)
    return result


def full(tensor: Any, shape: Sequence[Any], sizes: TfliteSizes) -> Any:
    """A tensor with all its dimensions written out."""
    if tensor.shape.rank != len(shape):  # of a number
        tensor = moves.reshape(tensor, [1] * len(shape))
    if all(n != 1 or (is_static(size) and size == 1) for n, size in zip(tensor.shape, shape)):
        return tensor
    result = moves.broadcast_to(tensor, sizes.vector(shape))
    result.set_shape(shape)
    return result


def in_order(tensor: Tensor, axes: Sequence[int], shape: Sequence[Any]) -> Any:
    """A result with these axes of the program, in the program's order and shape."""
    tensor.set_shape(shape[axis] for axis in axes)
    return moves.transpose(tensor, [axes.index(axis) for axis in range(len(axes))])


def broadcast(function: Callable[..., Any], *tensors: Any) -> Any:
    """A function of the elements of tensors that differ in thin dimensions.

    Kernels broadcast few dimensions, so neighbors that are thin in the same tensors are one.
    """
    rank = max(tensor.shape.rank for tensor in tensors)
    several = [tensor for tensor in tensors if tensor.shape.rank]
    if rank <= _DIMENSIONS or len({_thin(tensor) for tensor in several}) <= 1:
        return function(*tensors)
    patterns = list(zip(*(_thin(tensor) for tensor in several)))
    groups = [list(each) for _, each in groupby(range(rank), patterns.__getitem__)]
    joined = [_join(tensor, groups) if tensor.shape.rank else tensor for tensor in tensors]
    result = function(*joined)
    widest = [next((t for t in several if t.shape[i] != 1), several[0]) for i in range(rank)]
    return _shaped(result, [_size(t, axis) for axis, t in enumerate(widest)])


def _thin(tensor: Tensor) -> tuple[bool, ...]:
    return tuple(size == 1 for size in tensor.shape)


def _join(tensor: Tensor, groups: Sequence[Sequence[int]]) -> Any:
    whole, sizes = None, []
    for group in groups:
        found = [tensor.shape[axis] for axis in group]
        if None not in found:
            sizes.append(int(np.prod(found)))
            continue
        whole = moves.shape(tensor) if whole is None else whole
        sizes.append(lite.reduce_prod(whole[group[0] : group[-1] + 1], 0))
    return _shaped(tensor, sizes)


def _size(tensor: Tensor, axis: int) -> Any:
    known = tensor.shape[axis]
    return moves.shape(tensor)[axis] if known is None else known


def _shaped(tensor: Tensor, sizes: Sequence[Any]) -> Any:
    static = [int(size) if is_static(size) else None for size in sizes]
    unknown = static.count(None)
    if not unknown or (unknown == 1 and 0 not in static):
        return moves.reshape(tensor, moves.with_rest(static))
    result = moves.reshape(tensor, moves.stack(list(sizes)))
    result.set_shape(static)
    return result


def joined(
    tensor: Tensor, touched: Sequence[int], most: int, function: Callable[[Any, list[int]], Any]
) -> Any:
    """A function of a tensor and some of its axes, for kernels with a largest rank.

    Neighbours that are not `touched` are one dimension meanwhile.
    """
    rank = tensor.shape.rank
    if rank <= most:
        return function(tensor, list(touched))
    runs = groupby(range(rank), lambda axis: axis if axis in touched else None)
    groups = [list(each) for _, each in runs]
    result = function(_join(tensor, groups), [groups.index([axis]) for axis in touched])
    sizes: list[Any] = []
    for index, group in enumerate(groups):
        if group[0] in touched:
            sizes.append(_size(result, index))
        else:
            sizes.extend(_size(tensor, axis) for axis in group)
    return _shaped(result, sizes)


# --- sizes ------------------------------------------------------------------


_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "neg": lambda _, x: -x,
    "mul": lambda x, y: x * y,
    "floordiv": lambda x, y: lite.floordiv(x, y),
    "div": lambda x, y: lite.floordiv(x, y),
    "mod": lambda x, y: lite.floormod(x, y),
    "max": lambda x, y: lite.maximum(x, y),
    "min": lambda x, y: lite.minimum(x, y),
}


class TfliteSizes(GraphSizes):
    """The sizes of a signature's arrays, as numbers or as scalars of the outermost graph.

    The symbolic ones follow from these shapes of inputs.
    """

    def __init__(self, shapes: Sequence[Sequence[Size]], inputs: Sequence[Tensor]):
        super().__init__()
        self._graph = current()
        sizes = [
            (str(size), partial(lambda tensor, axis: moves.shape(tensor)[axis], tensor, axis))
            for shape, tensor in zip(shapes, inputs)
            for axis, size in enumerate(shape)
            if not is_static(size)
        ]
        self._variables = dimensions.solve_each(sizes, self._calculated)

    def of(self, size: Size | str) -> Any:
        with self._graph.active():  # the bodies of loops take it from there
            return super().of(size)

    def vector(self, shape: Sequence[Size]) -> Any:
        sizes = [self.of(size) for size in shape]
        if all(map(is_static, sizes)):
            return np.array(sizes, np.int32)
        return moves.stack(sizes)

    def _calculate(self, operation: str, left: int | Tensor, right: int | Tensor) -> Any:
        return _OPERATIONS[operation](left, right)


# --- The interface of a rule: one primitive in TFLite operators ----------------------------------

#: Called with an `Operation` and its operands; each returns the result, or a list of results. The
#: options: `thin` rules take thin operands, others are broadcast first; `stored` ones take weights
#: as stored, others are cast to their carriers.
RULES = RuleTable()
rule = RULES.rule


@dataclass(frozen=True)
class Operation:
    name: str
    params: Any
    operands: Sequence[Any]  # their shapes and dtypes
    results: Sequence[Any]
    sizes: TfliteSizes
    #: Runs a traced program with these operands here: `run(program, operands)`.
    run: Callable[[Any, Sequence[Any]], list[Any]]
    #: Traces a function of jax and converts it here: `call(function, structs, operands)`.
    call: Callable[[Callable, Sequence[Any], Sequence[Any]], list[Any]]

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape of the first result."""
        return self.results[0].shape

    @property
    def dtype(self) -> str:
        """The dtype of the first operand."""
        return kind(self.operands[0])

    def reshape(self, tensor: Tensor, shape: Sequence[Any]) -> Any:
        return reshape(tensor, shape, self.sizes)

    def full(self, tensor: TensorLike, shape: Sequence[Any]) -> Any:
        return full(tensor, shape, self.sizes)


def kind(struct: Any) -> str:
    return getattr(struct.dtype, "name", str(struct.dtype))
