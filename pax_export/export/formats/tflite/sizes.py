"""Symbolic sizes as scalars of a graph, from the shapes of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
    "mod": lambda x, y: lite.floormod(x, y),
    "max": lambda x, y: lite.maximum(x, y),
    "min": lambda x, y: lite.minimum(x, y),
}


def sizes_of(shapes: Sequence[Sequence[Any]], inputs: Sequence[Any]) -> TfliteSizes:
    """The sizes of arrays in a graph whose inputs have these symbolic shapes."""
    graph = current()
    known: dict[str, Any] = {}
    pending = [
        (str(size), tensor, axis)
        for shape, tensor in zip(shapes, inputs)
        for axis, size in enumerate(shape)
        if not is_static(size)
    ]
    while pending:
        rest = [each for each in pending if not _solved(*each, known)]
        if len(rest) == len(pending):
            break
        pending = rest
    found: dict[str, Any] = {}

    def evaluate(size: int) -> Any:
        text = str(size)
        if text not in found:
            # In the outermost graph: the bodies of loops take it from there.
            with graph.active():
                found[text] = _value(text, known)
        return found[text]

    return TfliteSizes(evaluate)


def _solved(text: str, tensor: object, axis: int, known: dict[str, Any]) -> bool:
    """Learns a variable from the size of an axis, where the others of it are known."""
    unknown = [name for name in dimensions.names(text) if name not in known]
    if len(unknown) > 1:
        return False
    if unknown:
        size, (name,) = moves.shape(tensor)[axis], unknown
        if text == name:
            known[name] = size
            return True
        start = _value(text, {**known, name: 0})
        step = _value(text, {**known, name: 1}) - start
        rest = size if is_static(start) and start == 0 else size - start
        known[name] = rest if is_static(step) and step == 1 else rest // step
    return True


def _value(text: str, known: Mapping[str, Any]) -> Any:
    return dimensions.evaluate_over(text, known, _calculated)


def _calculated(operation: str, left: Any, right: Any) -> Any:
    if is_static(left) and is_static(right):
        return dimensions.NUMBERS[operation](left, right)
    return _OPERATIONS[operation](left, right)
