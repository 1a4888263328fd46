"""Shapes that operations of runtimes give, and whole numbers that they compute shapes with.

A size is a number, a symbol of jax, or None for one that nobody knows.  What cannot be told
raises `Unknown`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pax_export.inspection._file_graph import LONGEST, Fact, Operation

Shape = tuple[Any, ...]
#: From here on an end means the last one.
_FAR = 2**31 - 1


class Unknown(Exception):
    """The file alone does not tell."""


class Call:
    """An operation with what is known of its operands, as rules ask for it."""

    def __init__(self, operation: Operation, operands: Sequence[Fact | None]):
        self.operation, self.operands = operation, operands

    def __len__(self) -> int:
        return len(self.operands)

    def has(self, place: int) -> bool:
        """Whether an operand is given."""
        return place < len(self.operands) and self.operands[place] is not None

    def fact(self, place: int) -> Fact:
        found = self.operands[place] if place < len(self.operands) else None
        if found is None:
            raise Unknown
        return found

    def shape(self, place: int) -> Shape:
        found = self.fact(place).shape
        if found is None:
            raise Unknown
        return found

    def value(self, place: int) -> np.ndarray:
        found = self.fact(place).value
        if found is None:
            raise Unknown
        return found

    def list(self, place: int) -> list[Any]:
        """The whole numbers of an operand, one after the other."""
        return self.value(place).ravel().tolist()

    def one(self, place: int) -> int:
        (found,) = self.list(place)
        if not isinstance(found, int):
            raise Unknown
        return found

    def attribute(self, name: str, default: Any = None) -> Any:
        found = self.operation.attributes.get(name)
        return default if found is None else found

    @property
    def shapes(self) -> list[Shape]:
        """The shapes of all operands that are given."""
        return [self.shape(place) for place in range(len(self)) if self.has(place)]


ShapeRule = Callable[[Call], Sequence[Shape | None]]
ValueRule = Callable[[Call], np.ndarray]


def product(sizes: Sequence[Any]) -> Any:
    if any(size is None for size in sizes):
        raise Unknown
    return math.prod(sizes)


def broadcast(*shapes: Shape) -> Shape:
    """The shape to which some shapes broadcast together."""
    rank = max(map(len, shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(functools.reduce(_wider, column) for column in zip(*padded))


def _wider(a: Any, b: Any) -> Any:
    for one, other in ((a, b), (b, a)):
        if isinstance(one, int) and one == 1:
            return other
    for each in (a, b):
        if isinstance(each, int):
            return each
    return b if a is None else a


def elementwise(call: Call) -> list[Shape]:
    return [broadcast(*call.shapes)]


def as_first(call: Call) -> list[Shape]:
    return [call.shape(0)]


def axis_of(axis: int, rank: int) -> int:
    return axis + rank if axis < 0 else axis


def reduced(shape: Shape, axes: Sequence[int] | None, keep: bool) -> Shape:
    gone = {axis_of(axis, len(shape)) for axis in (range(len(shape)) if axes is None else axes)}
    if keep:
        return tuple(1 if axis in gone else size for axis, size in enumerate(shape))
    return tuple(size for axis, size in enumerate(shape) if axis not in gone)


def reshaped(shape: Shape, wanted: Sequence[Any], zero_keeps: bool) -> Shape:
    sizes = [
        shape[axis] if zero_keeps and isinstance(size, int) and size == 0 else size
        for axis, size in enumerate(wanted)
    ]
    open_places = [n for n, size in enumerate(sizes) if isinstance(size, int) and size == -1]
    if open_places:
        rest = product([size for n, size in enumerate(sizes) if n not in open_places])
        sizes[open_places[0]] = product(shape) // rest
    return tuple(sizes)


def squeezed(shape: Shape, axes: Sequence[int] | None) -> Shape:
    if not axes:
        return tuple(size for size in shape if not (isinstance(size, int) and size == 1))
    return reduced(shape, axes, False)


def unsqueezed(shape: Shape, axes: Sequence[int]) -> Shape:
    rank = len(shape) + len(axes)
    places = {axis_of(axis, rank) for axis in axes}
    left = iter(shape)
    return tuple(1 if axis in places else next(left) for axis in range(rank))


def joined(shapes: Sequence[Shape], axis: int) -> Shape:
    axis = axis_of(axis, len(shapes[0]))
    sizes = [each[axis] for each in shapes]
    total = None if any(size is None for size in sizes) else sum(sizes)
    return (*shapes[0][:axis], total, *shapes[0][axis + 1 :])


def cut(size: Any, start: Any, end: Any, step: int) -> Any:
    """How many of `size` a slice takes; None as a start or an end means all."""
    if size is None:
        return None
    plain = all(each is None or isinstance(each, int) for each in (size, start, end))
    if plain:
        return len(range(*slice(start, end, step).indices(size)))
    if step < 0:
        if (start is None or start == -1) and (end is None or _is_far(end)):
            return (size + -step - 1) // -step
        raise Unknown
    first = 0 if start is None else start + size if _is_negative(start) else start
    last = size if end is None or _is_far(end) else end + size if _is_negative(end) else end
    return last - first if step == 1 else (last - first + step - 1) // step


def _is_negative(number: Any) -> bool:
    return isinstance(number, int) and number < 0


def _is_far(number: Any) -> bool:
    return isinstance(number, int) and abs(number) >= _FAR


def matrix_product(left: Shape, right: Shape) -> Shape:
    """As numpy's `matmul` has it."""
    if len(left) == 1:
        return (*right[:-2], *right[-1:]) if len(right) > 1 else ()
    if len(right) == 1:
        return left[:-1]
    return (*broadcast(left[:-2], right[:-2]), left[-2], right[-1])


def gathered(data: Shape, indices: Shape, axis: int, batch: int = 0) -> Shape:
    axis = axis_of(axis, len(data))
    return (*data[:axis], *indices[batch:], *data[axis + 1 :])


def gathered_points(data: Shape, indices: Shape, batch: int = 0) -> Shape:
    if not isinstance(indices[-1], int):
        raise Unknown
    return (*indices[:-1], *data[batch + indices[-1] :])


def ranged(start: Any, limit: Any, step: Any) -> Shape:
    if not isinstance(step, int) or not step:
        raise Unknown
    return ((limit - start + step - (1 if step > 0 else -1)) // step,)


def padded(shape: Shape, pairs: Sequence[Sequence[Any]]) -> Shape:
    return tuple(
        None if size is None else size + low + high for size, (low, high) in zip(shape, pairs)
    )


def window(size: Any, width: int, stride: int, dilation: int, around: Any) -> Any:
    """Over how many places a window goes along an axis."""
    extent = (width - 1) * dilation + 1
    return None if size is None or around is None else (size + around - extent) // stride + 1


# --- whole numbers -----------------------------------------------------------------------


def objects(items: Sequence[Any], shape: Sequence[int] | None = None) -> np.ndarray:
    """Numbers and symbols as an array."""
    if len(items) > LONGEST or any(each is None for each in items):
        raise Unknown
    found = np.empty(len(items), object)
    found[:] = list(items)
    return found if shape is None else found.reshape(tuple(shape))


def each(function: Callable[..., Any]) -> ValueRule:
    """Computes with each of the whole numbers."""

    def rule(call: Call) -> np.ndarray:
        arrays = np.broadcast_arrays(*(call.value(place) for place in range(len(call))))
        rows = zip(*(array.ravel().tolist() for array in arrays))
        return objects([function(*row) for row in rows], arrays[0].shape)

    return rule


def divided(a: Any, b: Any) -> Any:
    if not (isinstance(b, int) and b):
        raise Unknown
    return a // b


def rest(a: Any, b: Any) -> Any:
    if not (isinstance(b, int) and b):
        raise Unknown
    return a % b


def same(call: Call) -> np.ndarray:
    return call.value(0)


ARITHMETIC: dict[str, ValueRule] = {
    "add": each(lambda a, b: a + b),
    "sub": each(lambda a, b: a - b),
    "mul": each(lambda a, b: a * b),
    "div": each(divided),
    "mod": each(rest),
    "neg": each(lambda a: -a),
    "max": each(lambda a, b: a if a >= b else b),
    "min": each(lambda a, b: a if a <= b else b),
    "less": each(lambda a, b: bool(a < b)),
    "greater": each(lambda a, b: bool(a > b)),
    "less_equal": each(lambda a, b: bool(a <= b)),
    "greater_equal": each(lambda a, b: bool(a >= b)),
    "select": each(lambda which, a, b: a if which else b),
    "not": each(lambda a: not a),
}
