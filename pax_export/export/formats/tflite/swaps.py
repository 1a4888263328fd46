"""Differences and quotients whose first side is a constant.

TensorFlow's converter moves a transposition behind the arithmetic that follows it, and
exchanges the two sides of a difference and of a quotient where the first is a constant:
``1 - x.T`` came out as ``x.T - 1``.  It leaves alone what is no constant to it, so the
constant is multiplied by a one that it cannot know: of a number of the input, whether its
size is less than nothing.
"""

from __future__ import annotations

from typing import Any

from pax_export.export.formats.tflite.tensors import tf

_ONES = "pax_export_ones"
_NUMBERS = frozenset("float32 int32 int64 bool int8 uint8 int16".split())


def minus(x: Any, y: Any) -> Any:
    """``x - y``."""
    return tf.subtract(_unknown(x, y), y)


def over(x: Any, y: Any) -> Any:
    """``x / y``.

    Of a quotient by a square root the converter makes a product with `rsqrt`, whose kernel
    makes NaN of 0; it leaves alone what stands between.
    """
    if tf.is_tensor(y) and y.op.type == "Sqrt":
        y = tf.abs(y)
    return tf.divide(_unknown(x, y), y)


def _unknown(x: Any, y: Any) -> Any:
    """A first side that is no constant to the converter, where that makes a difference."""
    if not tf.is_tensor(y) or y.shape.rank == 0:
        return x
    x = tf.convert_to_tensor(x, y.dtype)
    if _depends_on_input(x):
        return x
    one = _one(x.dtype)
    return x if one is None else x * one


def _depends_on_input(tensor: Any) -> bool:
    """Whether a value is made from what a function is called with; all else is a constant."""
    left, seen = [tensor.op], set()
    while left:
        operation = left.pop()
        if operation.type == "Placeholder":
            return True
        if operation.name not in seen:
            seen.add(operation.name)
            left += [each.op for each in operation.inputs if each.dtype != tf.resource]
    return False


def _one(dtype: Any) -> Any:
    """A one that stands in no constant; None in a function without inputs."""
    graph = tf.compat.v1.get_default_graph()
    given = next((each for each in graph.inputs if each.dtype.name in _NUMBERS), None)
    if given is None:
        return None
    ones = graph.get_collection_ref(_ONES)
    for one in ones:
        if one.dtype == dtype and one.graph is graph:  # a loop's has those of what is around it
            return one
    with tf.control_dependencies(None):
        first = tf.cast(tf.reshape(given, [-1])[:1], tf.float32)
        never = tf.reduce_any(tf.less(tf.abs(first), 0.0))
        ones.append(tf.cast(tf.cast(never, tf.int32) + 1, dtype))
    return ones[-1]
