"""A builder of graphs of torch: calls, constants, bodies of loops."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# torch is not among the packages of the tests.
from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np
import torch

from pax_export.export.formats.torch import loops
from pax_export.export.formats.torch.run import from_numpy
from pax_export.export.formats.torch.values import (
    RULES,
    TorchSizes,
    TorchValue,
    carrier,
    in_carrier,
    is_rounded_by_torch,
    is_wrapped,
)
from pax_export.export.portable import NotInTargetError, ProgramConverter
from pax_export.export.portable.sizes import stay_thin

if TYPE_CHECKING:
    from torch.fx import Node
    from torch.fx.node import Argument

    from pax_export._foundations.types import (
        ArrayLike,
        Aval,
        DTypeLike,
        Equation,
        Size,
        TracedProgram,
    )
    from pax_export.export.formats.torch.own_rules import OwnRule
    from pax_export.export.portable import Rule

    Operand: TypeAlias = TorchValue | Argument

#: Constants of at most this many elements are written out in bodies of loops.
_SMALL = 64


class TorchFrame:
    """One graph with the module that holds its constants and the bodies of its loops."""

    def __init__(self, holder: torch.nn.Module):
        self.graph, self.holder = torch.fx.Graph(), holder
        self.sizes = TorchSizes(self._call, torch_function)
        self.constants: dict[tuple, Any] = {}
        self.device: Any = None  # the node of the device of the operands
        self.table: Any = None  # the node of an array without elements that has all sizes

    def _call(self, function: Callable[..., Any], *arguments: Argument) -> Any:
        return self.graph.call_function(function, arguments)


@functools.cache
def torch_function(name: str) -> Any:
    """The function of torch with a dotted name, such as ``"nn.functional.conv2d"``."""
    return functools.reduce(getattr, name.split("."), torch)


def prune_graph(graph: torch.fx.Graph) -> None:
    """Removes calls whose results nothing reads; none of ours has another effect."""
    for node in reversed(graph.nodes):
        if not node.users and node.op not in ("placeholder", "output"):
            graph.erase_node(node)


class TorchGraph(ProgramConverter[TorchValue]):
    """Writes the calls of one model; it is passed to the rules, which call it.

    ``builder("add", x, y)`` adds a call of ``torch.add`` and returns its node. Operands are nodes,
    `TorchValue`s or Python values; literals of one number are Python numbers.
    """

    loops = loops

    def __init__(
        self, variables: Sequence[str], own_rules: Sequence[OwnRule], live: bool, trains: bool
    ):
        super().__init__(RULES)
        self.variables = tuple(variables)  # the symbolic sizes of the program
        self.own_rules, self.live, self.trains = own_rules, live, trains
        self._frames: list[TorchFrame] = []
        self._count = 0

    @property
    def frame(self) -> TorchFrame:
        return self._frames[-1]

    @property
    def sizes(self) -> TorchSizes:
        return self.frame.sizes

    def __call__(self, function: str | Callable, *operands: Operand, **options: Operand) -> Any:
        target = torch_function(function) if isinstance(function, str) else function
        return self.frame.graph.call_function(target, *self._given(operands, options))

    def add_method_call(self, name: str, *operands: Operand, **options: Operand) -> Any:
        """Adds a call of a method of the first operand."""
        first = self.node_of(operands[0]) if isinstance(operands[0], TorchValue) else operands[0]
        return self.frame.graph.call_method(name, *self._given((first, *operands[1:]), options))

    def add_sizes(self, operation: str, left: Size | Node, right: Size | Node) -> Any:
        """Adds an operation of Python on sizes."""
        return self.frame.graph.call_function(getattr(operator, operation), (left, right))

    def take_item(self, results: Node, index: int) -> Any:
        return self.frame.graph.call_function(operator.getitem, (results, index))

    def take_items(self, results: Node, count: int) -> list[Any]:
        return [self.take_item(results, index) for index in range(count)]

    def add_part(self, module: torch.nn.Module, kind: str, *operands: Operand) -> list[Any]:
        """Adds a call of a module, a loop or branch, which becomes one of the holder."""
        name = self._free(kind)
        self.frame.holder.add_module(name, module)
        called = self.frame.graph.call_module(name, *self._given(operands, {}))
        return self.take_items(called, len(self.results))

    def _free(self, kind: str) -> str:
        while True:
            name, self._count = f"{kind}_{self._count}", self._count + 1
            if not hasattr(self.frame.holder, name):
                return name

    def _given(
        self, operands: Sequence[Any], options: Mapping[str, Operand]
    ) -> tuple[tuple, dict[str, Any]]:
        return tuple(map(self._operand, operands)), {
            k: self._operand(v) for k, v in options.items()
        }

    def _operand(self, operand: Operand) -> Any:
        if isinstance(operand, TorchValue):
            is_scalar = operand.known is not None and not operand.rank
            return operand.number if is_scalar else self.node_of(operand)
        if isinstance(operand, (list, tuple)):
            return type(operand)(map(self._operand, operand))
        return int(operand) if isinstance(operand, np.integer) else operand

    # Nodes.

    def node_of(self, value: Operand) -> Any:
        """The node of an operand; that of a literal is made."""
        if not isinstance(value, TorchValue):
            return value
        if value.node is not None:
            return value.node
        assert value.known is not None
        return self.constant_of(value.known)

    def constant_of(self, array: np.ndarray) -> Any:
        """The node of an array; equal ones are stored once."""
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self.frame.constants:
            self.frame.constants[key] = self._constant(array)
        return self.frame.constants[key]

    def _constant(self, array: np.ndarray) -> Any:
        if not array.ndim:
            return self("full", [], array.item(), **self.kind_of(array.dtype))
        if len(self._frames) > 1 and not self.live and array.size <= _SMALL:
            return self._stepped(array)
        name = self._free("constant")
        self.frame.holder.register_buffer(name, from_numpy(array), persistent=False)
        return self.frame.graph.get_attr(name)

    def _stepped(self, array: np.ndarray) -> Any:
        """A small array without a buffer, which torch does not store in bodies of loops."""
        runs = [list(run) for _, run in itertools.groupby(array.ravel().tolist(), repr)]
        kind = self.kind_of(array.dtype)
        parts = [self("full", [len(run)], run[0], **kind) for run in runs]
        row = self("cat", parts, 0) if parts else self("full", [0], 0, **kind)
        return self.reshape_to(row, array.shape)

    def kind_of(self, dtype: DTypeLike) -> dict[str, Any]:
        """The options of a function that makes a tensor: in the carrier of a dtype."""
        placed = {} if self.frame.device is None else {"device": self.frame.device}
        return {"dtype": self.dtype_of(carrier(dtype)), **placed}

    def dtype_of(self, name: DTypeLike) -> torch.dtype:
        """The dtype of torch with the name of a dtype."""
        name = name if isinstance(name, str) else np.dtype(name).name
        if not hasattr(torch, name):
            raise NotInTargetError(f"of {name}, which torch lacks")
        return getattr(torch, name)

    def apply_rule(
        self, rule: Rule, equation: Equation, operands: Sequence[TorchValue]
    ) -> list[TorchValue] | None:
        outside = self.results  # rules write bodies before they read it
        outputs = super().apply_rule(rule, equation, operands)
        self.results = outside
        return outputs

    def rule_value(self, output: Node | TorchValue, struct: Aval, rounds: bool) -> TorchValue:
        dtype, shape = np.dtype(struct.dtype), tuple(struct.shape)
        if isinstance(output, TorchValue):
            return dataclasses.replace(output, dtype=dtype, shape=shape)
        node = self.fit_to(output, dtype) if rounds else output
        if hasattr(node, "meta"):
            node.meta["shape"] = shape
        return TorchValue(node, dtype, shape)

    def constant_value(self, value: ArrayLike) -> TorchValue:
        dtype = jax.numpy.result_type(value)
        array = in_carrier(np.asarray(value).astype(dtype))
        return TorchValue(None, np.dtype(dtype), array.shape, array)

    def cast_to(self, operand: Operand, dtype: DTypeLike) -> Any:
        """An operand in a dtype of torch."""
        if isinstance(operand, TorchValue):
            if operand.carrier == np.dtype(dtype).name:
                return self.node_of(operand)
            operand = self.node_of(operand)
        return self.add_method_call("to", operand, self.dtype_of(dtype))

    def fit_to(self, node: Node, dtype: DTypeLike) -> Any:
        """Rounds or wraps computed numbers to a dtype."""
        dtype = np.dtype(dtype)
        if not is_wrapped(dtype) or dtype == np.uint64:
            return node
        if is_rounded_by_torch(dtype):
            return self.cast_to(self.cast_to(node, dtype), "float32")
        bits = jax.numpy.iinfo(dtype).bits
        low = int(jax.numpy.iinfo(dtype).min)
        if not low:
            return self("bitwise_and", node, (1 << bits) - 1)
        wrapped = self("bitwise_and", self("sub", node, low), (1 << bits) - 1)
        return self("add", wrapped, low)

    # Shapes.

    def reshape_to(self, x: Operand, shape: Sequence[Any]) -> Any:
        return self.add_method_call("reshape", self.node_of(x), self.sizes.shape(shape))

    def transpose_axes(self, x: Operand, order: Sequence[int]) -> Any:
        order = [int(axis) for axis in order]
        if order == list(range(len(order))):
            return self.node_of(x)
        return self.add_method_call("permute", self.node_of(x), order)

    def add_axes(self, x: Operand, axes: Sequence[int]) -> Any:
        """Adds axes of size 1 at these places of the result, which are in order."""
        x = self.node_of(x)
        for axis in axes:
            x = self("unsqueeze", x, int(axis))
        return x

    def expand_to(self, x: Operand, shape: Sequence[Any]) -> Any:
        return self.add_method_call("expand", self.node_of(x), self.sizes.shape(shape))

    def arange_of(self, size: Size, dtype: DTypeLike) -> Any:
        return self("arange", self.sizes.of(size), **self.kind_of(dtype))

    def spread_thin(self, *operands: TorchValue) -> list[Any]:
        """Operands that broadcast together, unbroadcast where possible; at most one a number."""
        return [
            each.thin if thin else self._operand(each)
            for each, thin in zip(operands, stay_thin(operands))
        ]

    def spread_tensors(self, *operands: TorchValue) -> list[Any]:
        """The same, without numbers."""
        return [
            self.node_of(each) if isinstance(node, (bool, int, float)) else node
            for each, node in zip(operands, self.spread_thin(*operands))
        ]

    # Bodies.

    @contextmanager
    def new_graph(self, holder: torch.nn.Module) -> Any:
        """Calls that are written in the block belong to a graph of their own."""
        self._frames.append(frame := TorchFrame(holder))
        try:
            yield frame
        finally:
            self._frames.pop()

    def begin_graph(self, operands: Sequence[tuple[Node, Sequence[Size]]]) -> None:
        """Reads the device and the sizes of operands of a graph, which are given with shapes."""
        if operands:
            self.frame.device = self.frame.graph.call_function(getattr, (operands[0][0], "device"))
        self.sizes.read_variables(operands)

    def _size_table(self) -> Any:
        """An array without elements that has all symbolic sizes, for bodies to read them."""
        if self.frame.table is None:
            sizes = [self.sizes.of(name) for name in self.variables]
            kind = self.kind_of(np.float32)
            self.frame.table = self("empty", [*sizes, 0], **kind)
        return self.frame.table

    def write_body(self, program: TracedProgram, structs: Sequence[Any]) -> torch.fx.GraphModule:
        """A program as a module; its operands are those of the program, then the `table`."""
        return self.body_of(lambda operands: self.inline(program, operands), structs)

    def body_of(
        self, write: Callable[[list[TorchValue]], Sequence[TorchValue]], structs: Sequence[Any]
    ) -> torch.fx.GraphModule:
        holder = torch.nn.Module()
        with self.new_graph(holder) as frame:
            nodes = [frame.graph.placeholder(f"x{number}") for number in range(len(structs))]
            anchors = [(node, struct.shape) for node, struct in zip(nodes, structs)]
            if self.variables:
                frame.table = frame.graph.placeholder("sizes")
                anchors.append((frame.table, (*self.variables, 0)))
            self.begin_graph(anchors)
            operands = [
                TorchValue(node, np.dtype(s.dtype), tuple(s.shape))
                for node, s in zip(nodes, structs)
            ]
            frame.graph.output(tuple(map(self.node_of, write(operands))))
            prune_graph(frame.graph)
            return torch.fx.GraphModule(holder, frame.graph)

    def operands_of(self, values: Sequence[TorchValue]) -> list[Any]:
        """The nodes for the operands of a body."""
        return [*map(self.node_of, values), *([self._size_table()] if self.variables else [])]
