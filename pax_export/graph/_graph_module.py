"""GraphModule and build_graph_module: a graph of nodes as a module."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pax_export._foundations.errors import (
    ForeignInputError,
    InvalidArgumentError,
    InvalidArgumentTypeError,
)
from pax_export._foundations.types import PyTree
from pax_export.core import Module
from pax_export.graph._adapters import Spread, as_module, identity
from pax_export.graph._node import InputNode, Node, describe_value
from pax_export.nn import Lambda


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
        └── modules.3: add(input 0, modules.1)
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

    def summary(self, return_list: bool = False) -> str | list[str]:
        """Returns the modules as text, with the values that each takes from elsewhere.

        Values are inputs and modules by name; a module without any takes that of the line above.
        """
        lines = name_sources(list(super().summary(return_list=True)), self._program, self.modules)
        return lines if return_list else "\n".join(lines)

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
        InvalidArgumentTypeError: (an AssertionError too, when the builder is called) ``func``
            does not return a node.

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


# --- the program of a graph, as plain data, and its drawing in DOT --------------------


def draw_program(title: str, program: Program, modules: Sequence[Any]) -> str:
    """DOT text for a program and its modules."""
    first = len(program.inputs)
    joins = _joining_steps(program, modules)
    shapes = [entry.shape for entry in (*program.inputs, *program.steps)]
    lines = [f"digraph {_quote_text(title)} {{", "  node [shape=box, style=rounded];"]
    for number, entry in enumerate(program.inputs):
        lines.append(f"  {number} [label={_quote_text(entry.name)}, shape=ellipse];")
    for number, module in enumerate(modules, first):
        if number not in joins:
            # In the list of modules a user may have put a function.
            label = as_module(module).summary(return_list=True)[0]
            lines.append(f"  {number} [label={_quote_text(label)}];")
    lines.append('  output [label="output", shape=ellipse];')
    for number, step in enumerate(program.steps, first):
        if number not in joins:
            lines += _edge_lines(step.inputs, str(number), joins, shapes)
    lines += _edge_lines((program.output,), "output", joins, shapes)
    return "\n".join([*lines, "}"])


def name_sources(lines: list[str], program: Program, modules: Sequence[Any]) -> list[str]:
    """Adds the sources to the lines of a summary, and drops those that only group values."""
    joins = _joining_steps(program, modules)
    first = len(program.inputs)
    names = [entry.name for entry in program.inputs]
    names += [f"modules.{number}" for number in range(len(modules))]
    above = program.inputs[0].name if first == 1 else ""
    shown = []
    for line in lines:
        row = _ROW.fullmatch(line)
        if row is None:
            shown.append(line)
            continue
        start, number, text = row[1], first + int(row[2]), row[3]
        if number in joins and number != program.output:
            continue
        sources = _sources(program.steps[number - first], joins, names)
        if sources != above:
            function = _FUNCTION.fullmatch(text)
            text = f"{function[1]}({sources})" if function else f"{text} <- {sources}"
        shown.append(f"{start}{names[number]}: {text}")
        above = names[number]
    return shown


#: The first line of a module in a summary, and that of a function.
_ROW = re.compile(r"([├└]── )modules\.(\d+): (.*)")
_FUNCTION = re.compile(r"x => (.*)\(x\)")


def _sources(step: Step, joins: dict[int, tuple[int, ...]], names: Sequence[str]) -> str:
    """The arguments of a step as text: names, and tuples of them."""

    def name(number: int) -> str:
        return f"({listed(joins[number])})" if number in joins else names[number]

    def listed(numbers: Sequence[int]) -> str:
        return ", ".join(map(name, numbers))

    inputs = step.inputs
    if step.spread and len(inputs) == 1 and inputs[0] in joins:
        inputs = joins[inputs[0]]
    return listed(inputs) if step.spread or len(inputs) == 1 else f"({listed(inputs)})"


def _joining_steps(program: Program, modules: Sequence[Any]) -> dict[int, tuple[int, ...]]:
    """Steps that only group values, which become edges."""
    return {
        number: step.inputs
        for number, (step, module) in enumerate(zip(program.steps, modules), len(program.inputs))
        if len(step.inputs) > 1 and isinstance(module, Lambda) and module.func is identity
    }


def _edge_lines(
    sources: tuple[int, ...], target: str, joins: dict[int, tuple[int, ...]], shapes: list[str]
) -> list[str]:
    sources = _through_joins(sources, joins)
    lines = []
    for position, source in enumerate(sources):
        which = f"{position}: " if len(sources) > 1 else ""
        lines.append(f"  {source} -> {target} [label={_quote_text(which + shapes[source])}];")
    return lines


def _through_joins(sources: tuple[int, ...], joins: dict[int, tuple[int, ...]]) -> tuple[int, ...]:
    found: list[int] = []
    for source in sources:
        found += _through_joins(joins[source], joins) if source in joins else (source,)
    return tuple(found)


def _quote_text(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


class Input(NamedTuple):
    """One argument of a program: its name, and a description of its example."""

    name: str
    shape: str


class Step(NamedTuple):
    """One call of a module."""

    inputs: tuple[int, ...]  # numbers of values: inputs first, then steps
    spread: bool  # whether elements are separate arguments
    shape: str  # of the result for the example inputs


class Program(NamedTuple):
    """The calls of a graph's modules; step number k calls module number k."""

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    output: int

    def run(self, modules: Sequence[Any], args: Sequence[Any]) -> Any:
        """Calls every module once, one per step, with one argument per input."""
        values = list(args)
        for module, step in zip(modules, self.steps):
            inputs = [values[number] for number in step.inputs]
            value = inputs[0] if len(inputs) == 1 else tuple(inputs)
            values.append(module(*value) if step.spread else module(value))
        return values[self.output]


def compile_graph(inputs: Sequence[Node], output: Node) -> tuple[list[Module], Program]:
    """The modules that lead from the inputs to the output, and the program."""
    _check_nodes(inputs, output)
    order = _parents_first(inputs, output)
    numbers = {node: number for number, node in enumerate((*inputs, *order))}
    modules, steps = [], []
    for node in order:
        spread = isinstance(node.fx, Spread)
        numbers_of_inputs = tuple([numbers[parent] for parent in node.parents])
        modules.append(node.fx.module if isinstance(node.fx, Spread) else node.fx)
        steps.append(Step(numbers_of_inputs, spread, describe_value(node.value)))
    arguments = [
        Input(node.name or f"input {number}", describe_value(node.value))
        for number, node in enumerate(inputs)
    ]
    return modules, Program(tuple(arguments), tuple(steps), numbers[output])


def _check_nodes(inputs: Sequence[Node], output: Node) -> None:
    if len(set(inputs)) != len(inputs):
        raise InvalidArgumentError(
            "A node occurs twice among the inputs of a graph module.",
            got=repr(inputs)[:120],
            write="an InputNode for each argument",
        )


def _parents_first(inputs: Sequence[Node], output: Node) -> list[Node]:
    """Returns the nodes to compute, each once, parents first, left before right."""
    ready = set(inputs)
    order: list[Node] = []
    waiting = [(output, False)]
    while waiting:
        node, parents_done = waiting.pop()
        if node in ready:
            continue
        if parents_done:
            ready.add(node)
            order.append(node)
            continue
        if not node.parents:
            raise _foreign_input_error(node, inputs)
        waiting.append((node, True))
        waiting.extend([(parent, False) for parent in reversed(node.parents)])
    return order


def _foreign_input_error(node: Node, inputs: Sequence[Node]) -> ForeignInputError:
    names = [x.name for x in inputs if x.name]
    return ForeignInputError(
        "The output needs an InputNode that is not an input of the graph module.",
        where=f"{node!r}" + (f" named {node.name!r}" if node.name else ""),
        got=f"{len(inputs)} inputs" + (f": {', '.join(names)}" if names else ""),
        write="GraphModule(inputs=...) with this node as well; in build_graph_module, "
        "a parameter of the function for it",
    )
