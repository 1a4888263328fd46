"""Fuses additions after convolutions into their biases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pax_export.export.formats.onnx.graph import GraphBuilder, read_in
from pax_export.export.formats.onnx.rules.quantized import QuantizedWeight


def with_biases(builder: GraphBuilder, nodes: Sequence[Any]) -> list[Any]:
    """The operators of a graph, with stored vectors added by the convolutions before them."""
    counts = Counter(name for node in nodes for name in read_in(node))
    made = {name: node for node in nodes for name in node.output}
    kept: list[Any] = []
    gone: set[str] = set()
    for node in nodes:
        found = _with_bias(builder, node, made, counts) if node.op_type == "Add" else None
        if found is None:
            kept.append(node)
            continue
        conv, bias = found
        inputs, outputs = [*conv.input, bias], list(node.output)
        fused = builder.onnx.helper.make_node("Conv", inputs, outputs, name=node.output[0])
        fused.attribute.extend(conv.attribute)
        made[node.output[0]] = fused
        kept.append(fused)
        gone.add(conv.output[0])
    return [node for node in kept if not (len(node.output) == 1 and node.output[0] in gone)]


def _with_bias(
    builder: GraphBuilder, node: Any, made: Mapping[str, Any], counts: Mapping[str, int]
) -> tuple[Any, str] | None:
    """Returns the convolution and the vector that a node adds, or None."""
    for one, other in (node.input, node.input[::-1]):
        conv, spread = made.get(one), made.get(other)
        if conv is None or conv.op_type != "Conv" or len(conv.input) != 2 or counts[one] != 1:
            continue
        if spread is None or spread.op_type != "Unsqueeze":
            continue
        vector, axes = map(builder.initializers.get, spread.input)
        kernel = _kernel_shape(builder, conv.input[1])
        if vector is None or axes is None or vector.ndim != 1:
            continue
        around = [0, *range(2, len(kernel))]
        if kernel and axes.tolist() == around and len(vector) == kernel[0]:
            return conv, spread.input[0]
    return None


def _kernel_shape(builder: GraphBuilder, name: str) -> Sequence[int]:
    """The shape of a stored kernel, also of one with integers; empty for others."""
    if name in builder.initializers:
        return builder.initializers[name].shape
    found = builder.integers.get(name)
    weight, order = found if isinstance(found, tuple) else (None, ())
    return [weight.shape[axis] for axis in order] if isinstance(weight, QuantizedWeight) else ()
