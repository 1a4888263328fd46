"""Fuses additions after convolutions into their biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pax_export.export.formats.onnx.graph import read_in


def with_biases(onnx: Any, nodes: Sequence[Any], initializers: Mapping[str, Any]) -> list[Any]:
    """The operators of a graph, with stored vectors added by the convolutions before them."""
    counts: dict[str, int] = {}
    for node in nodes:
        for name in read_in(node):
            counts[name] = counts.get(name, 0) + 1
    made = {name: node for node in nodes for name in node.output}
    kept: list[Any] = []
    gone: set[str] = set()
    for node in nodes:
        found = _with_bias(node, made, counts, initializers) if node.op_type == "Add" else None
        if found is None:
            kept.append(node)
            continue
        conv, bias = found
        fused = onnx.helper.make_node(
            "Conv", [*conv.input, bias], list(node.output), name=node.output[0]
        )
        fused.attribute.extend(conv.attribute)
        made[node.output[0]] = fused
        kept.append(fused)
        gone.add(conv.output[0])
    return [node for node in kept if not (len(node.output) == 1 and node.output[0] in gone)]


def _with_bias(
    node: Any, made: Mapping[str, Any], counts: Mapping[str, int], initializers: Mapping[str, Any]
) -> tuple[Any, str] | None:
    """Returns the convolution and the vector that a node adds, or None."""
    for one, other in (node.input, node.input[::-1]):
        conv, spread = made.get(one), made.get(other)
        if conv is None or conv.op_type != "Conv" or len(conv.input) != 2 or counts[one] != 1:
            continue
        if spread is None or spread.op_type != "Unsqueeze":
            continue
        vector, kernel = initializers.get(spread.input[0]), initializers.get(conv.input[1])
        axes = initializers.get(spread.input[1])
        if vector is None or kernel is None or axes is None or vector.ndim != 1:
            continue
        around = [0, *range(2, kernel.ndim)]
        if axes.tolist() == around and len(vector) == len(kernel):
            return conv, spread.input[0]
    return None
