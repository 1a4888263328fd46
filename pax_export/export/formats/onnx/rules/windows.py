"""Reductions over windows: pools, and any other function of neighbours."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pax_export.export.formats.onnx.graph import Writer, flat
from pax_export.export.formats.onnx.registry import Refused, rule
from pax_export.export.formats.onnx.rules.arithmetic import choose, extreme
from pax_export.export.formats.onnx.rules.slices import padded, spaced
from pax_export.export.formats.onnx.values import Value, is_number

Results = Sequence[Any]
#: Several arrays at once, as names.
Names = tuple[Any, ...]


def _over_windows(
    writer: Writer,
    shape: Sequence[Any],
    names: Names,
    neutral: Names,
    combine: Callable[[Names, Names], Names],
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[Any, Any]],
    base_dilation: Sequence[int],
    window_dilation: Sequence[int],
) -> Names:
    """One axis after the other: as many slices as a window is wide, combined."""
    gaps = [each - 1 for each in base_dilation]
    names = tuple(spaced(writer, n, shape, gaps, zero) for n, zero in zip(names, neutral))
    sizes: list[Any] = [(size - 1) * gap + 1 for size, gap in zip(shape, base_dilation)]
    for axis, width in enumerate(window_dimensions):
        if not is_number(width):
            raise Refused("with windows of symbolic size")
        step, apart = window_strides[axis], window_dilation[axis]
        pairs: list[tuple[Any, Any]] = [(0, 0)] * len(sizes)
        pairs[axis] = padding[axis]
        names = tuple(padded(writer, n, pairs, zero) for n, zero in zip(names, neutral))
        size = sizes[axis] + padding[axis][0] + padding[axis][1]
        count = (size - (width - 1) * apart - 1) // step + 1
        sizes[axis] = count
        if (width, step) == (1, 1):
            continue

        def taken(start: int, at: int = axis, many: Any = count, by: int = step) -> Names:
            end = start + (many - 1) * by + 1
            return tuple(writer.slice(name, at, start, end, by) for name in names)  # noqa: B023

        names = functools.reduce(combine, [taken(start * apart) for start in range(width)])
    return names


def _pool(combine: Callable, neutral: Callable[[Value], Any]) -> Callable:
    def apply(writer: Writer, results: Results, x: Value, **window: Any) -> Any:
        def both(one: Names, other: Names) -> Names:
            return (combine(writer, one[0], other[0], x),)

        zero = writer.like(neutral(x), x)
        (made,) = _over_windows(writer, x.shape, (x.name,), (zero,), both, **window)
        return writer.fit(made, x.dtype)

    return apply


def _least(x: Value) -> Any:
    return -np.inf if x.is_float else np.iinfo(x.carrier).min


def _largest(x: Value) -> Any:
    return np.inf if x.is_float else np.iinfo(x.carrier).max


rule("reduce_window_sum")(_pool(lambda w, x, y, _: w("Add", x, y), lambda _: 0))
rule("reduce_window_max")(_pool(lambda w, x, y, v: extreme(w, "Max", x, y, v.is_float), _least))
rule("reduce_window_min")(_pool(lambda w, x, y, v: extreme(w, "Min", x, y, v.is_float), _largest))


@rule("reduce_window")
def reduce_window(
    writer: Writer, results: Results, *operands: Value, jaxpr: Any, consts: Any, **window: Any
) -> Any:
    """By any function of two: it is written once for each place of a window.

    A window begins with the start, which need not be neutral; so padding has no part in it.
    """
    values, starts = operands[: len(operands) // 2], operands[len(operands) // 2 :]
    if len(consts):
        raise Refused("by a function that closes over arrays")

    def function(one: Names, other: Names) -> Names:
        given = [
            Value(name, value.dtype, result.shape)
            for names in (one, other)
            for name, value, result in zip(names, values, results)
        ]
        return tuple(each.name for each in flat(writer.inline(jaxpr, given)))

    def both(one: Names, other: Names) -> Names:
        *first, is_first = one
        *second, is_second = other
        made = []
        for joined, left, right, value in zip(
            function(tuple(first), tuple(second)), first, second, values
        ):
            chosen = choose(writer, is_second, joined, left, value.dtype)
            made.append(choose(writer, is_first, chosen, right, value.dtype))
        return (*made, writer("Or", is_first, is_second))

    shape = values[0].shape
    names = (*(value.name for value in values), writer.expand(np.array(True), shape))
    neutral = (*(start.name for start in starts), np.array(False))
    begun = [writer.expand(start, each.shape) for start, each in zip(starts, results)]
    begun.append(writer.expand(np.array(True), results[0].shape))
    made = _over_windows(writer, shape, names, neutral, both, **window)
    return list(both(tuple(begun), made)[:-1])
