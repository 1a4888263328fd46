"""Symbolic sizes as scalars of a TensorFlow graph, found in the shapes of its inputs."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from pax_export.export.artifact import dimensions
from pax_export.export.formats.tflite.tensors import Sizes, is_static, tf

_BINARY = {
    ast.Add: lambda x, y: x + y,
    ast.Sub: lambda x, y: x - y,
    ast.Mult: lambda x, y: x * y,
}


def sizes_of(shapes: Sequence[Sequence[Any]], inputs: Sequence[Any]) -> Sizes:
    """The sizes of arrays in a graph whose inputs have these symbolic shapes."""
    graph = tf.compat.v1.get_default_graph()
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

    def evaluate(size: Any) -> Any:
        text = str(size)
        if text not in found:
            # In the outermost graph: the bodies of loops take it from there.
            with graph.as_default():
                found[text] = _value(_parsed(text), known)
        return found[text]

    return Sizes(evaluate)


def _solved(text: str, tensor: Any, axis: int, known: dict[str, Any]) -> bool:
    """Learns a variable from the size of an axis, where the others of it are known."""
    unknown = [name for name in dimensions.names(text) if name not in known]
    if len(unknown) > 1:
        return False
    if unknown:
        size, (name,) = tf.shape(tensor)[axis], unknown
        if text == name:
            known[name] = size
            return True
        tree = _parsed(text)
        start = _value(tree, {**known, name: 0})
        step = _value(tree, {**known, name: 1}) - start
        rest = size if is_static(start) and start == 0 else size - start
        known[name] = rest if is_static(step) and step == 1 else rest // step
    return True


def _parsed(text: str) -> ast.expr:
    return ast.parse(text.replace("^", "**"), mode="eval").body


def _value(node: Any, known: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=number):
            return number
        case ast.Name(id=name):
            return known[name]
        case ast.UnaryOp(operand=operand):
            return -_value(operand, known)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(power))):
            value, result = _value(left, known), 1
            for _ in range(power):
                result = result * value
            return result
        case ast.BinOp(left=left, op=operator, right=right):
            return _BINARY[type(operator)](_value(left, known), _value(right, known))
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return _call(name, [_value(each, known) for each in arguments])
    raise ValueError(f"no size: {ast.unparse(node)}")


def _call(name: str, values: Sequence[Any]) -> Any:
    left, right = values
    if all(map(is_static, values)):
        functions = {"floordiv": int.__floordiv__, "mod": int.__mod__, "max": max, "min": min}
        return functions[name](left, right)
    if name == "floordiv":
        return tf.math.floordiv(left, right)
    if name == "mod":
        return tf.math.floormod(left, right)
    return (tf.maximum if name == "max" else tf.minimum)(left, right)
