"""The pieces of arithmetic of one operation of a runtime, as `_work` counts those of jax."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from pax_export.inspection._file_graph import Fact
from pax_export.inspection._file_shapes import Call, Shape, Unknown, axis_of, product


@dataclass
class Piece:
    """An operation as the rules of `_work` take one of jax; or a count that is known."""

    name: str
    operands: Sequence[Shape]
    results: Sequence[Shape]
    params: Mapping[str, Any] = field(default_factory=dict)
    flops: Any = None


Pieces = list[Piece]
#: `(call, what is known of its results)` to its pieces.
CountRule = Callable[[Call, Sequence[Fact]], Pieces]


def shape_of(results: Sequence[Fact], place: int = 0) -> Shape:
    found = results[place].shape
    if found is None:
        raise Unknown
    return found


def flops(count: Any) -> Pieces:
    return [Piece("", (), (), flops=count)]


def free(call: Call, results: Sequence[Fact]) -> Pieces:
    return []


def as_jax(name: str) -> CountRule:
    """It does for each element of its result what an operation of jax does."""

    def rule(call: Call, results: Sequence[Fact]) -> Pieces:
        shape = shape_of(results)
        return [Piece(name, (shape,), (shape,))]

    return rule


def several(*names: str) -> CountRule:
    """For each element of its result, several operations of jax."""
    rules = [as_jax(name) for name in names]
    return lambda call, results: [piece for rule in rules for piece in rule(call, results)]


def joining(call: Call, results: Sequence[Fact]) -> Pieces:
    """It joins any number of operands, element by element."""
    return flops(product(shape_of(results)) * max(1, len(call) - 1))


def reduction(*also: str) -> CountRule:
    """It joins elements; what else it does for each result comes after."""

    def rule(call: Call, results: Sequence[Fact]) -> Pieces:
        shape = shape_of(results)
        pieces = [Piece("reduce_sum", (call.shape(0),), (shape,))]
        return pieces + [Piece(name, (shape,), (shape,)) for name in also]

    return rule


def argument(call: Call, results: Sequence[Fact]) -> Pieces:
    return [Piece("argmax", (call.shape(0),), (shape_of(results),))]


def whole(name: str) -> CountRule:
    """It is counted by the shape of its first operand."""
    return lambda call, results: [Piece(name, (call.shape(0),), (shape_of(results),))]


def updates(place: int) -> CountRule:
    """It adds each of some updates to what is there."""
    return lambda call, results: flops(product(call.shape(place)))


def cumulative(call: Call, results: Sequence[Fact]) -> Pieces:
    shape = call.shape(0)
    axis = axis_of(call.one(1), len(shape))
    return [Piece("cumsum", (shape,), (shape,), {"axis": axis})]


def softmax(call: Call, results: Sequence[Fact]) -> Pieces:
    """The largest is looked for and taken away, exponentials are added, and divide."""
    shape = shape_of(results)
    return [Piece("exp", (shape,), (shape,)), *flops(4 * product(shape))]


def products(result: Shape, contracted: Any) -> Pieces:
    """Of matrices: a multiplication and an addition for each that is joined."""
    return flops(2 * product(result) * product([contracted]))


def convolution(
    image: Shape,
    kernel: Shape,
    result: Shape,
    strides: Sequence[int],
    padding: Sequence[tuple[Any, Any]],
    spread: Sequence[int],
    dilation: Sequence[int],
) -> Pieces:
    """Of shapes with the batch and the features first; the kernel's with its results first."""
    if any(size is None for size in (*image, *kernel, *result)):
        raise Unknown
    places = tuple(range(len(image)))
    params = {
        "dimension_numbers": SimpleNamespace(lhs_spec=places, rhs_spec=places, out_spec=places),
        "window_strides": list(strides),
        "padding": [tuple(each) for each in padding],
        "lhs_dilation": list(spread),
        "rhs_dilation": list(dilation),
        "batch_group_count": 1,
    }
    return [Piece("conv_general_dilated", (image, kernel), (result,), params)]


def pooling(result: Shape, widths: Sequence[int]) -> Pieces:
    return [Piece("reduce_window", (result,), (result,), {"window_dimensions": tuple(widths)})]
