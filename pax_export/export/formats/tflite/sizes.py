"""Symbolic sizes as scalars of a graph, from the shapes of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from pax_export._errors import UnsupportedOperationError
from pax_export.export.artifact import dimensions
from pax_export.export.formats.tflite.builder import moves
from pax_export.export.formats.tflite.builder import operators as lite
from pax_export.export.formats.tflite.builder.graph import current
from pax_export.export.portable.sizes import is_number as is_static

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


class TfliteSizes:
    """The sizes of a signature's arrays, as numbers or as scalars of the active graph.

    The symbolic ones follow from these shapes of inputs.
    """

    def __init__(self, shapes: Sequence[Sequence[Any]], inputs: Sequence[Any]):
        self._graph = current()
        self._found: dict[str, Any] = {}
        sizes = [
            (str(size), partial(lambda tensor, axis: moves.shape(tensor)[axis], tensor, axis))
            for shape, tensor in zip(shapes, inputs)
            for axis, size in enumerate(shape)
            if not is_static(size)
        ]
        try:
            self._variables = dimensions.solve_each(sizes, _calculated)
        except ValueError as error:
            raise UnsupportedOperationError(f"TFLite cannot express {error}.") from error

    def of(self, size: Any) -> Any:
        if is_static(size):
            return int(size)
        text = str(size)
        if text not in self._found:
            # In the outermost graph: the bodies of loops take it from there.
            with self._graph.active():
                found = dimensions.evaluate_over(text, self._variables, _calculated)
                self._found[text] = found
        return self._found[text]

    def vector(self, shape: Sequence[Any]) -> Any:
        sizes = [self.of(size) for size in shape]
        if all(map(is_static, sizes)):
            return np.array(sizes, np.int32)
        return moves.stack(sizes)


def _calculated(operation: str, left: Any, right: Any) -> Any:
    if is_static(left) and is_static(right):
        return dimensions.NUMBERS[operation](left, right)
    return _OPERATIONS[operation](left, right)
