"""Shapes of what loops and branches compute, for importers that know only what a file says.

ONNX's inference of shapes finds none for results of loops and branches, and none in a body for
operators whose axes are stored outside. IREE's importer takes values without shape for scalars.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pax_export.export.formats.onnx.graph import GraphBuilder, bodies

#: Axes and shapes have no more elements; ONNX has them as int64.
_MOST_AXES = 8


def declare_shapes(builder: GraphBuilder, nodes: Sequence[Any]) -> list[Any]:
    """Returns entries for results of operators, above all loops; completes their bodies."""
    entries = []
    for node in nodes:
        for body in bodies(node):
            body.value_info.extend(declare_shapes(builder, body.node))
            _store_axes(builder, body)
        entries.extend(_describe_results(node))
        entries.extend(builder.declared[name] for name in node.output if name in builder.declared)
    return entries


def _describe_results(node: Any) -> Iterator[Any]:
    """The entries of the results of a loop or branch; stacked ones have one more dimension."""
    body = next(bodies(node), None)
    if body is None:
        return
    made, told = list(body.output), {each.name: each.i for each in node.attribute}
    states = len(made)
    if node.op_type == "Loop":  # whose body computes a condition first
        made, states = made[1:], len(node.input) - 2
    elif node.op_type == "Scan":
        states = len(node.input) - told["num_scan_inputs"]
    for place, (name, result) in enumerate(zip(node.output, made, strict=True)):
        if not result.type.tensor_type.HasField("shape"):
            continue
        entry = type(result)(name=name, type=result.type)
        if place >= states:
            sizes = entry.type.tensor_type.shape
            sizes.ClearField("dim")
            sizes.dim.add()
            sizes.dim.extend(result.type.tensor_type.shape.dim)
        yield entry


def _store_axes(builder: GraphBuilder, body: Any) -> None:
    """Stores the axes and shapes that operators of a body read in the body itself."""
    stored: Mapping[str, np.ndarray] = builder.initializers
    inside: dict[str, Any] = {}
    for node in body.node:
        for place, name in enumerate(node.input):
            array = stored.get(name)
            if array is None or array.dtype != np.int64 or array.size > _MOST_AXES:
                continue
            if name not in inside:
                made = builder.new_name("constant")
                value = builder.onnx.numpy_helper.from_array(array)
                inside[name] = builder.onnx.helper.make_node("Constant", [], [made], made)
                inside[name].attribute.append(builder.onnx.helper.make_attribute("value", value))
            node.input[place] = inside[name].output[0]
    every = [*inside.values(), *body.node]
    body.ClearField("node")
    body.node.extend(every)
