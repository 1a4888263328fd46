"""What runs along an axis: cumulative sums and the like, and windows that slide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pax_export.export.formats.tflite.rule import NotInTfliteError, Operation, rule
from pax_export.export.formats.tflite.rules.layout import padded
from pax_export.export.formats.tflite.rules.reductions import combination, neutral
from pax_export.export.formats.tflite.tensors import is_static, joined, single, tf, wrapped


@rule("cumsum")
def cumsum(op: Operation, x: Any) -> Any:
    axis, reverse = op.params["axis"], op.params["reverse"]
    return wrapped(tf.cumsum(x, axis, reverse=reverse), op.dtype)


for _kind in ("prod", "max", "min", "logsumexp"):
    rule(f"cum{_kind}")(lambda op, x, kind=_kind: _cumulated(op, x, kind))


def _cumulated(op: Operation, x: Any, name: str) -> Any:
    """Twice as many elements in each step: log2 of the length many."""
    axis, reverse = op.params["axis"], op.params["reverse"]
    size, combine, value = op.shape[axis], combination(name), neutral(name, op.dtype)

    def step(x: Any, distance: Any) -> Any:
        length = op.sizes.of(size)
        start = 0 if not reverse else distance
        stop = length - distance if not reverse else length
        kept = _cut(x, axis, start, stop)
        widths = [(0, 0)] * x.shape.rank
        widths[axis] = (0, distance) if reverse else (distance, 0)
        moved = _filled(kept, value, axis, widths[axis])
        moved.set_shape(x.shape)
        return combine(op, x, moved)

    if is_static(size):
        distance = 1
        while distance < size:
            x, distance = step(x, distance), 2 * distance
        return x
    length = op.sizes.of(size)
    shapes = [tf.TensorShape([]), tf.TensorShape(x.shape)]
    return tf.while_loop(
        lambda distance, x: tf.less(distance, length),
        lambda distance, x: (2 * distance, step(x, distance)),
        [tf.constant(1), x],
        shape_invariants=shapes,
    )[1]


def _cut(x: Any, axis: int, start: Any, stop: Any, step: int = 1) -> Any:
    def cut(tensor: Any, places: list[int]) -> Any:
        index: list[Any] = [slice(None)] * tensor.shape.rank
        index[places[0]] = slice(start, stop, step)
        return tensor[tuple(index)]

    return joined(x, [axis], 4, cut)


def _filled(x: Any, value: Any, axis: int, width: tuple[Any, Any]) -> Any:
    def fill(tensor: Any, places: list[int]) -> Any:
        widths: list[Any] = [[0, 0] for _ in range(tensor.shape.rank)]
        widths[places[0]] = list(width)
        rows = [tf.stack([tf.convert_to_tensor(n, tf.int32) for n in pair]) for pair in widths]
        return tf.pad(tensor, tf.stack(rows), constant_values=value)

    return joined(x, [axis], 4, fill)


for _kind in ("sum", "max", "min"):
    rule(f"reduce_window_{_kind}", parts=_kind == "sum")(
        lambda op, x, kind=_kind: _windowed(op, x, kind)
    )


@rule("reduce_window")
def reduce_window(op: Operation, x: Any, start: Any, *rest: Any) -> Any:
    program = op.params["jaxpr"]
    equations = program.eqns
    if rest or len(equations) != 1:
        raise NotInTfliteError("windows are combined by sum, product, maximum or minimum only.")
    names = {"add": "sum", "mul": "prod", "max": "max", "min": "min"}
    name = names.get(equations[0].primitive.name)
    if name is None:
        raise NotInTfliteError("windows are combined by sum, product, maximum or minimum only.")
    found = _windowed(op, x, name)
    if single(start) is not None and single(start) == single(neutral(name, op.dtype)):
        return found
    # It takes part once in each window; what is padded takes none.
    return combination(name)(op, found, start)


def _windowed(op: Operation, x: Any, name: str) -> Any:
    params, combine = op.params, combination(name)
    shape = list(op.operands[0].shape)
    rank = len(shape)
    base = params["base_dilation"] or (1,) * rank
    widths = [(low, high, step - 1) for (low, high), step in zip(params["padding"], base)]
    x = padded(op, x, neutral(name, op.dtype), shape, widths)
    apart = params["window_dilation"] or (1,) * rank
    strides = params["window_strides"] or (1,) * rank
    for axis, width in enumerate(params["window_dimensions"]):
        if width == 1 and strides[axis] == 1:
            continue
        if not is_static(width):
            raise NotInTfliteError("a window must have sizes that are numbers.")
        low, high, inner = widths[axis]
        size = shape[axis] if inner == 0 else (shape[axis] - 1) * (inner + 1) + 1
        size = op.sizes.of(size + low + high)
        x = _slid(op, x, axis, int(width), int(apart[axis]), int(strides[axis]), size, combine)
        static = x.shape.as_list()
        static[axis] = int(op.shape[axis]) if is_static(op.shape[axis]) else None
        x.set_shape(static)
    return x


def _slid(
    op: Operation,
    x: Any,
    axis: int,
    width: int,
    apart: int,
    stride: int,
    size: Any,
    combine: Callable,
) -> Any:
    """One axis: windows of twice the width in each step, as long as they fit."""
    count = size - (width - 1) * apart  # of windows, with a stride of 1

    def taken(x: Any, start: int, step: int) -> Any:
        return _cut(x, axis, start, start + count, step)

    if width <= 4 or stride >= width:
        result = None
        for place in range(width):
            piece = taken(x, place * apart, stride)
            result = piece if result is None else combine(op, result, piece)
        return result
    result, start, reach, length = None, 0, 1, size
    while True:
        if width & reach:
            piece = taken(x, start, stride)
            result = piece if result is None else combine(op, result, piece)
            start += reach * apart
        if 2 * reach > width:
            return result
        length = length - reach * apart
        left = _cut(x, axis, 0, length)
        right = _cut(x, axis, reach * apart, reach * apart + length)
        x, reach = combine(op, left, right), 2 * reach
