"""Joins calls of a graph that torch has whole: scales and shifts of features, sums of products.

Only arithmetic is matched, on nodes whose shapes are known: `node.meta["shape"]`.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# torch is not among the packages of the tests.
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pax_export.export.formats.torch.values import same_shape, same_size

if TYPE_CHECKING:
    from torch.fx import Node
    from torch.fx.node import Argument


@dataclass(frozen=True)
class _FeatureScale:
    """``(x - mean) * scale + shift``, for vectors along one axis; None for those that are not."""

    x: Any
    axis: int
    mean: Any = None
    scale: Any = None
    shift: Any = None
    count: int = 0


class Joiner:
    """The graph, and what is known of its nodes.

    Args:
        graph: the graph.
        arrays: the arrays of the nodes that are weights.
        trained: those that are parameters.
    """

    def __init__(self, graph: torch.fx.Graph, arrays: Mapping[Any, Any], trained: set[Any]):
        self._graph = graph
        self._vectors = _evaluated(graph, arrays)
        self._fixed = {node: node not in trained for node in arrays}
        for node in graph.nodes:
            if node in self._vectors and node not in self._fixed:
                self._fixed[node] = all(self._fixed.get(n, True) for n in node.all_input_nodes)
        self._made: dict[Any, Any] = {}  # what a node was replaced by

    def join(self) -> None:
        lines: dict[Any, _FeatureScale] = {}
        for node in list(self._graph.nodes):
            line = self._extended(node, lines)
            if line is not None:
                lines[node] = line
        inner = {each.x for each in lines.values()}
        for node, line in lines.items():
            is_last = not any(lines.get(user, _NONE).x is line.x for user in node.users)
            if is_last or node in inner or len(node.users) > 1:
                self._replace(node, line)

    def _extended(self, node: Node, lines: Mapping[Any, _FeatureScale]) -> _FeatureScale | None:
        """The line of a node: that of an operand and one more vector."""
        step = _STEPS.get(node.target) if node.op == "call_function" else None
        shape = node.meta.get("shape")
        if step is None or shape is None or node.kwargs or len(node.args) != 2:
            return None
        arguments: Any = node.args
        for x, vector in (arguments, arguments[::-1]):
            axis = self._axis(vector, shape)
            if axis is None or not isinstance(x, torch.fx.Node) or x in self._vectors:
                continue
            if not same_shape(x.meta.get("shape", ()), shape):
                continue
            line = lines.get(x)
            if line is None or line.axis != axis or len(x.users) > 1:
                line = _FeatureScale(x, axis)
            if x is arguments[1] and node.target in (torch.sub, torch.div):
                return None
            return replace(step(self, node, line, vector), count=line.count + 1)
        return None

    def _axis(self, vector: Argument, shape: Sequence[Any]) -> int | None:
        """The axis along which an array of weights lies."""
        known: Any = self._vectors.get(vector) if isinstance(vector, torch.fx.Node) else None
        if not isinstance(known, torch.Tensor) or known.ndim > len(shape):
            return None
        if known.dtype not in (torch.float32, torch.float64):
            return None
        wide = [axis for axis in range(-known.ndim, 0) if known.shape[axis] != 1]
        if len(wide) != 1 or not same_size(shape[wide[0]], known.shape[wide[0]]):
            return None
        return wide[0] + len(shape)

    # Vectors.

    def _call(self, before: Node, function: Any, *arguments: Argument) -> Any:
        with self._graph.inserting_before(before):
            node = self._graph.call_function(function, arguments)
        nodes = [each for each in arguments if isinstance(each, torch.fx.Node)]
        self._fixed[node] = all(self._fixed.get(each, False) for each in nodes)
        return node

    def _sum(self, before: Node, one: Node | None, other: Node, function: Any) -> Any:
        if one is None:
            return other if function is torch.add else self._call(before, torch.neg, other)
        return self._call(before, function, one, other)

    def shifted(self, node: Node, line: _FeatureScale, vector: Node) -> _FeatureScale:
        vector = self._flat(node, vector)
        if line.scale is None:
            inverse = torch.sub if node.target is torch.add else torch.add
            return replace(line, mean=self._sum(node, line.mean, vector, inverse))
        return replace(line, shift=self._sum(node, line.shift, vector, node.target))

    def scaled(self, node: Node, line: _FeatureScale, vector: Node) -> _FeatureScale:
        vector = self._flat(node, vector)
        shift = line.shift
        if shift is not None:
            shift = self._call(node, node.target, shift, vector)
        if line.scale is None and node.target is torch.div:
            return replace(line, scale=self._call(node, torch.reciprocal, vector), shift=shift)
        scale = vector if line.scale is None else self._call(node, node.target, line.scale, vector)
        return replace(line, scale=scale, shift=shift)

    def _flat(self, before: Node, vector: Node) -> Any:
        size = self._vectors[vector].numel()
        if self._vectors[vector].ndim == 1:
            return vector
        while vector.target in _VIEWS and vector.args[0] in self._vectors:
            vector = vector.all_input_nodes[0]
        if self._vectors[vector].ndim == 1:
            return vector
        with self._graph.inserting_before(before):
            node = self._graph.call_method("reshape", (vector, [size]))
        self._fixed[node] = self._fixed[vector]
        return node

    # Calls.

    def _replace(self, node: Node, line: _FeatureScale) -> None:
        line = replace(line, x=self._made.get(line.x, line.x))
        if line.scale is None:
            joined = self._with_bias(node, line)
        else:
            joined = self._normalized(node, line) if line.axis == 1 and line.count > 1 else None
        if joined is not None:
            joined.meta.update(node.meta)
            self._made[node] = joined
            node.replace_all_uses_with(joined)

    def _normalized(self, node: Node, line: _FeatureScale) -> Any:
        """A call of `torch.batch_norm`, whose mean has no derivative."""
        mean, shift = line.mean, line.shift
        if mean is not None and not self._fixed[mean]:
            moved = self._call(node, torch.mul, mean, line.scale)
            shift, mean = self._sum(node, shift, moved, torch.sub), None
        mean = self._call(node, torch.zeros_like, line.scale) if mean is None else mean
        ones = self._call(node, torch.ones_like, line.scale)
        arguments = (line.x, line.scale, shift, mean, ones, False, 0.0, 0.0, False)
        return self._call(node, torch.batch_norm, *arguments)

    def _with_bias(self, node: Node, line: _FeatureScale) -> Any:
        """A product or convolution that adds the vector itself."""
        x: Any = line.x
        reshape: Any = None
        if x.op == "call_method" and x.target == "reshape" and x.args[0].target is torch.mm:
            x, reshape = x.args[0], x
        is_product = x.target is torch.mm and line.axis == len(node.meta["shape"]) - 1
        if is_product:  # the reshape may split columns
            matrix = self._vectors.get(x.args[1])
            columns = None if matrix is None else matrix.shape[1]
            is_product = columns is not None and same_size(node.meta["shape"][-1], columns)
        is_convolution = x.target in _CONVOLUTIONS and line.axis == 1 and x.args[2] is None
        users = [*x.users, *(reshape.users if reshape is not None else ())]
        if not (is_product or is_convolution) or len(users) > (1 if reshape is None else 2):
            return None
        bias = line.mean
        bias = bias.args[0] if bias.target is torch.neg else self._call(node, torch.neg, bias)
        if is_convolution:
            return self._call(node, x.target, *x.args[:2], bias, *x.args[3:])
        product = self._call(node, torch.addmm, bias, *x.args)
        if reshape is None:
            return product
        with self._graph.inserting_before(node):
            return self._graph.call_method("reshape", (product, reshape.args[1]))


_NONE = _FeatureScale(None, 0)
_STEPS = {
    torch.add: Joiner.shifted, torch.sub: Joiner.shifted,
    torch.mul: Joiner.scaled, torch.div: Joiner.scaled,
}  # fmt: skip
_VIEWS = (torch.unsqueeze, "permute", "reshape")
_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)


def _evaluated(graph: torch.fx.Graph, arrays: Mapping[Any, Any]) -> dict[Any, Any]:
    """What depends on weights alone, as arrays without numbers."""
    found: dict[Any, Any] = {n: torch.empty_like(a, device="meta") for n, a in arrays.items()}
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method") or not node.all_input_nodes:
            continue
        if node.target is getattr:
            found[node] = torch.device("meta")
        elif all(each in found for each in node.all_input_nodes):
            arguments, options = (
                torch.fx.node.map_arg(each, found.__getitem__) for each in (node.args, node.kwargs)
            )
            if node.op == "call_method":
                first, *arguments = arguments
                found[node] = getattr(first, node.target)(*arguments, **options)
            else:
                found[node] = node.target(*arguments, **options)
    return found


# --- memory -----------------------------------------------------------------


def memory_orders(graph: torch.fx.Graph, weights: Sequence[Any]) -> dict[Any, list[int]]:
    """The orders of axes in which kernels lie best in memory, so that a convolution copies none."""
    orders = {}
    for weight in weights:
        users = list(weight.users)
        if len(users) != 1 or users[0].target != "permute" or len(users[0].users) != 1:
            continue
        (convolution,) = users[0].users
        if convolution.target not in _CONVOLUTIONS or convolution.args[1] is not users[0]:
            continue
        order = list(users[0].args[1])
        orders[weight] = [order[0], *order[2:], order[1]] if _is_last(convolution) else order
    return orders


def _is_last(node: Node) -> bool:
    """Whether features are last in the memory of the operand of a convolution."""
    while node.op != "placeholder" and node.all_input_nodes:
        node = node.args[0] if isinstance(node.args[0], torch.fx.Node) else node.all_input_nodes[0]
        if node.target == "permute":
            order: Any = node.args[1]
            rank = len(order)
            return list(order) == [0, rank - 1, *range(1, rank - 1)]
    return False
