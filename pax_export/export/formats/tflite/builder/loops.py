"""Loops and branches as subgraphs with captured inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pax_export.export.formats.tflite.builder.graph import Graph, Tensor, constant, current, tensor
from pax_export.export.formats.tflite.builder.moves import identity, reshape


def while_loop(
    going: Callable[..., Tensor],
    body: Callable[..., Sequence[Any]],
    start: Sequence[Any],
    shape_invariants: Sequence[Sequence[Any]],
) -> list[Tensor]:
    """The last state of a loop; the shapes are those that every state has."""
    outer = current()
    start = [tensor(each) for each in start]
    test, step = Graph("while_cond", outer), Graph("while_body", outer)
    for graph in (test, step):
        for each, shape in zip(start, shape_invariants):
            graph.placeholder(shape, each.dtype)
    with test.active():
        test.outputs = [test.own(tensor(going(*test.inputs)))]
    with step.active():
        results = [step.own(tensor(each)) for each in body(*step.inputs)]
        # The next state is written over this one, so what moves to another place is copied.
        step.outputs = [
            each if each is here or each.operator else identity(each)
            for each, here in zip(results, step.inputs)
        ]
    inputs = [*start, *_captured(outer, (test, step))]
    step.outputs += step.inputs[len(start) :]
    shapes = [(shape, each.dtype) for each, shape in zip(start, shape_invariants)]
    shapes += [(each.shape, each.dtype) for each in inputs[len(start) :]]
    graphs = {"cond_subgraph_index": test, "body_subgraph_index": step}
    return _append(outer, "WHILE", inputs, shapes, graphs)[: len(start)]


def cond(which: Tensor, here: Callable, there: Callable) -> list[Tensor]:
    """Returns the results of one of two functions with equal dtypes and ranks."""
    if which.value is not None:
        return list(here() if bool(which.value) else there())
    outer = current()
    graphs = {
        "then_subgraph_index": Graph("then", outer),
        "else_subgraph_index": Graph("else", outer),
    }
    for graph, function in zip(graphs.values(), (here, there)):
        with graph.active():
            results = [graph.own(tensor(each)) for each in function()]
            graph.outputs = [each if each.operator else _copied(each) for each in results]
    inputs = [which, *_captured(outer, tuple(graphs.values()))]
    first, second = (graph.outputs for graph in graphs.values())
    shapes = [
        ([n if n == m else None for n, m in zip(one.shape, other.shape)], one.dtype)
        for one, other in zip(first, second)
    ]
    return _append(outer, "IF", inputs, shapes, graphs)


def _copied(result: Tensor) -> Tensor:
    """A result of a branch, in memory of its own.

    LiteRT's RESHAPE may return the memory of a constant, which its IF frees; SLICE copies.
    """
    if result.value is None or not result.shape.size:
        return identity(result)
    flat = reshape(result, [-1])
    ends = [constant(np.array([each], np.int32)) for each in (0, -1)]
    (copy,) = current().append("SLICE", [flat, *ends], [(flat.shape, flat.dtype)], {})
    return reshape(copy, list(result.shape))


def _captured(outer: Graph, graphs: Sequence[Graph]) -> list[Tensor]:
    """Makes outer tensors that the graphs read into inputs of all of them."""
    found = list(dict.fromkeys(each for graph in graphs for each, _ in graph.captured))
    for graph in graphs:
        graph.inputs += [graph.own(each) for each in found]
    return [outer.own(each) for each in found]


def _append(
    outer: Graph, name: str, inputs: list[Tensor], shapes: Any, graphs: dict[str, Graph]
) -> list[Tensor]:
    results = outer.append(name, inputs, shapes, {"number": len(outer.operators)})
    operator = results[0].operator
    operator.graphs, operator.options = graphs, {}
    return results
