"""GraphModule and build_graph_module: a graph of nodes as a module."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from pax_export._errors import InvalidArgumentTypeError
from pax_export._types import PyTree
from pax_export.core import Module
from pax_export.graph._node import InputNode, Node
from pax_export.graph._program import compile_graph, draw_program


class GraphModule(Module):
    """A module that computes one node of a graph from others.

    It has the modules of the graph and a program of their calls, but not the nodes. So it is an
    ordinary module: it can be copied, pickled and exported, and two that were built alike, with
    example inputs of equal shapes and dtypes, have equal treedefs.

    Args:
        inputs: a tuple or list of nodes, one for each argument.
        output: the node to compute.  ``a & b`` or ``a | b`` results in a tuple.
        name: shown by ``repr`` and ``summary``.

    Attributes:
        modules: a list of the modules to call, in the order of the calls.

    Raises:
        ForeignInputError: (a ValueError) the output needs an input that is not among the inputs.
        InvalidArgumentError: (a ValueError) a node occurs twice.
        InvalidArgumentTypeError: not nodes.
        SharedNodeError: (a ValueError) one module is used by two nodes.

    Example:
        >>> import jax, jax.numpy as jnp, pax_export as pax
        >>> from pax_export.experimental.graph import GraphModule, InputNode
        >>> x = InputNode(jnp.zeros((3, 8)))
        >>> y = x >> pax.Linear(8, 8) >> jax.nn.relu
        >>> net = GraphModule((x,), (x | y) >> jax.lax.add)
        >>> print(net.summary())
        GraphModule
        ├── modules.0: Linear(in_dim=8, out_dim=8, with_bias=True)
        ├── modules.1: x => relu(x)
        ├── modules.2: x => identity(x)
        └── modules.3: x => add(x)
        >>> net(jnp.ones((5, 8))).shape
        (5, 8)
    """

    def __init__(self, inputs: Sequence[Node], output: Node, name: str | None = None):
        super().__init__(name=name)
        self.modules, self._program = compile_graph(inputs, output)

    def __call__(self, *xs: PyTree) -> Any:
        """Computes the output.

        Args:
            *xs: one value for each input.

        Raises:
            InvalidArgumentTypeError: (a TypeError) too many values, or too few.
        """
        names = [entry.name for entry in self._program.inputs]
        if len(xs) != len(names):
            raise InvalidArgumentTypeError(
                "A graph module takes one argument for each of its inputs.",
                where=repr(self),
                got=f"{len(xs)} arguments for {len(names)} inputs: {', '.join(names)}",
                write="one value for each, in this order",
            )
        return self._program.run(self.modules, xs)

    def to_dot(self) -> str:
        """Returns the graph as DOT text, which Graphviz and many editors draw.

        Inputs and modules are nodes.  Edges show shape and dtype of the values
        that go along them, as they were for the example inputs; with several
        arguments, in front of that, which argument it is.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from pax_export.experimental.graph import build_graph_module
            >>> net = build_graph_module(lambda x: x >> jax.nn.relu)(jnp.zeros((3, 8)))
            >>> print(net.to_dot())
            digraph "GraphModule" {
              node [shape=box, style=rounded];
              0 [label="x", shape=ellipse];
              1 [label="x => relu(x)"];
              output [label="output", shape=ellipse];
              0 -> 1 [label="float32[3,8]"];
              1 -> output [label="float32[3,8]"];
            }
        """
        return draw_program(type(self).__name__, self._program, self.modules)


def build_graph_module(func: Callable[..., Node]) -> Callable[..., GraphModule]:
    """Makes a builder of graph modules from a function that computes with nodes.

    Args:
        func: takes an `InputNode` for each example input and returns a node.

    Returns:
        A function of example inputs that returns a `GraphModule`; it calls
        ``func``, so it makes new modules at each call.

    Raises:
        InvalidArgumentTypeError: (an AssertionError too) ``func`` cannot be
            called, or (when the builder is called) does not return a node.

    Example:
        >>> import jax, jax.numpy as jnp, pax_export as pax
        >>> from pax_export.experimental.graph import build_graph_module
        >>> def residual(x):
        ...     y = x >> pax.Linear(x.shape[-1], x.shape[-1])
        ...     y >>= jax.nn.relu
        ...     return (x | y) >> jax.lax.add
        >>> net = build_graph_module(residual)(jnp.zeros((3, 8)))
        >>> net(jnp.ones((5, 8))).shape
        (5, 8)
    """
    if not callable(func):
        raise InvalidArgumentTypeError(
            "build_graph_module needs a function of nodes.",
            got=repr(func)[:120],
            write="def forward(x): return x >> pax.Linear(8, 8)",
        )

    @functools.wraps(func)
    def build(*example_inputs: PyTree) -> GraphModule:
        names = _argument_names(func, example_inputs)
        inputs = [InputNode(x, name=n) for x, n in zip(example_inputs, names)]
        output = func(*inputs)
        if not isinstance(output, Node):
            raise InvalidArgumentTypeError(
                "The function given to build_graph_module must return a node.",
                where=getattr(func, "__qualname__", repr(func)),
                got=f"{type(output).__name__}: {output!r}"[:120],
                write="return x >> pax.Linear(8, 8); for several outputs, return y & z",
            )
        return GraphModule(inputs, output)

    return build


def _argument_names(func: Callable, example_inputs: tuple) -> list[str | None]:
    """Returns the function's argument names, if it has any."""
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names: list[str | None] = [p.name for p in parameters if p.kind in kinds]
    missing = len(example_inputs) - len(names)
    return names + [None] * missing
