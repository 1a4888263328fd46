"""Symbolic sizes as scalars of a graph, from the shapes of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pax_export._errors import UnsupportedOperationError
from pax_export.export.artifact import dimensions
from pax_export.export.formats.tflite.builder import moves
from pax_export.export.formats.tflite.builder import operators as lite
from pax_export.export.formats.tflite.builder.graph import current
from pax_export.export.formats.tflite.tensors import TfliteSizes, is_static

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


def sizes_of(shapes: Sequence[Sequence[Any]], inputs: Sequence[Any]) -> TfliteSizes:
    """Returns the symbolic sizes of a graph whose inputs have these shapes."""
    graph = current()
    sizes = [
        (str(size), partial(lambda tensor, axis: moves.shape(tensor)[axis], tensor, axis))
        for shape, tensor in zip(shapes, inputs)
        for axis, size in enumerate(shape)
        if not is_static(size)
    ]
    try:
        known = dimensions.solve_each(sizes, _calculated)
    except ValueError as error:
        raise UnsupportedOperationError(f"TFLite cannot express {error}.") from error
    found: dict[str, Any] = {}

    def evaluate(size: int) -> Any:
        text = str(size)
        if text not in found:
            # In the outermost graph: the bodies of loops take it from there.
            with graph.active():
                found[text] = dimensions.evaluate_over(text, known, _calculated)
        return found[text]

    return TfliteSizes(evaluate)


def _calculated(operation: str, left: Any, right: Any) -> Any:
    if is_static(left) and is_static(right):
        return dimensions.NUMBERS[operation](left, right)
    return _OPERATIONS[operation](left, right)
