"""The program of a graph of nodes, as plain data for treedefs, and its drawing in DOT."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pax_export._errors import ForeignInputError, InvalidArgumentError, InvalidArgumentTypeError
from pax_export.core import Module
from pax_export.graph._adapters import Spread, as_module, identity
from pax_export.graph._node import Node, describe_value
from pax_export.nn import Lambda


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
