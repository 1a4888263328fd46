"""A graph of nodes as a list of modules and a program that calls them.

The program is plain data, tuples of numbers and text: it is what a graph module
keeps in its treedef, where no node belongs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pax_export._errors import ForeignInputError, InvalidArgumentError, InvalidArgumentTypeError
from pax_export.core import Module
from pax_export.graph._adapters import Spread
from pax_export.graph._node import Node, describe_value


class Input(NamedTuple):
    """One argument of a program: its name, and what its example was."""

    name: str
    shape: str


class Step(NamedTuple):
    """One call of a module.

    Attributes:
        inputs: where the values come from: the program's inputs are numbered first, then its steps.
        spread: whether the module takes the elements of the value as separate arguments.
        shape: what the result was for the example inputs.
    """

    inputs: tuple[int, ...]
    spread: bool
    shape: str


class Program(NamedTuple):
    """How to run the modules of a graph; the step number k calls module number k."""

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    output: int

    def run(self, modules: Sequence[Any], args: Sequence[Any]) -> Any:
        """Calls every module once; there is one for each step, and an argument for each input."""
        values = list(args)
        for module, step in zip(modules, self.steps):
            taken = [values[number] for number in step.inputs]
            value = taken[0] if len(taken) == 1 else tuple(taken)
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
        taken = tuple([numbers[parent] for parent in node.parents])
        modules.append(node.fx.module if isinstance(node.fx, Spread) else node.fx)
        steps.append(Step(taken, spread, describe_value(node.value)))
    arguments = [
        Input(node.name or f"input {number}", describe_value(node.value))
        for number, node in enumerate(inputs)
    ]
    return modules, Program(tuple(arguments), tuple(steps), numbers[output])


def _check_nodes(inputs: Sequence[Node], output: Node) -> None:
    if not isinstance(inputs, (tuple, list)) or not all(isinstance(x, Node) for x in inputs):
        raise InvalidArgumentTypeError(
            "The inputs of a graph module are a tuple or a list of nodes.",
            got=repr(inputs)[:120],
            write="GraphModule(inputs=(x, y), output=z)",
        )
    if not isinstance(output, Node):
        raise InvalidArgumentTypeError(
            "The output of a graph module is a node.",
            got=repr(output)[:120],
            write="GraphModule(inputs=(x, y), output=z); for several outputs, output=z & w",
        )
    if len(set(inputs)) != len(inputs):
        raise InvalidArgumentError(
            "A node stands twice among the inputs of a graph module.",
            got=repr(inputs)[:120],
            write="an InputNode for each argument",
        )


def _parents_first(inputs: Sequence[Node], output: Node) -> list[Node]:
    """All nodes to compute, each once, after those that it needs, left before right."""
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
            raise _foreign(node, inputs)
        waiting.append((node, True))
        waiting.extend([(parent, False) for parent in reversed(node.parents)])
    return order


def _foreign(node: Node, inputs: Sequence[Node]) -> ForeignInputError:
    names = [x.name for x in inputs if x.name]
    return ForeignInputError(
        "The output needs a node that nothing computes and that is no input of the graph module.",
        where=f"{node!r}" + (f" named {node.name!r}" if node.name else ""),
        got=f"{len(inputs)} inputs" + (f": {', '.join(names)}" if names else ""),
        write="GraphModule(inputs=...) with this node as well; in build_graph_module, "
        "a parameter of the function for it",
    )
