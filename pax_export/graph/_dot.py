"""A program as DOT text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pax_export.graph._adapters import as_module, identity
from pax_export.graph._program import Program
from pax_export.nn import Lambda


def draw(title: str, program: Program, modules: Sequence[Any]) -> str:
    """DOT text for a program and its modules."""
    first = len(program.inputs)
    joins = _joins(program, modules)
    shapes = [entry.shape for entry in (*program.inputs, *program.steps)]
    lines = [f"digraph {_quoted(title)} {{", "  node [shape=box, style=rounded];"]
    for number, entry in enumerate(program.inputs):
        lines.append(f"  {number} [label={_quoted(entry.name)}, shape=ellipse];")
    for number, module in enumerate(modules, first):
        if number not in joins:
            # In the list of modules a user may have put a function.
            label = as_module(module).summary(return_list=True)[0]
            lines.append(f"  {number} [label={_quoted(label)}];")
    lines.append('  output [label="output", shape=ellipse];')
    for number, step in enumerate(program.steps, first):
        if number not in joins:
            lines += _edges(step.inputs, str(number), joins, shapes)
    lines += _edges((program.output,), "output", joins, shapes)
    return "\n".join([*lines, "}"])


def _joins(program: Program, modules: Sequence[Any]) -> dict[int, tuple[int, ...]]:
    """Steps that only group values, which become edges."""
    return {
        number: step.inputs
        for number, (step, module) in enumerate(zip(program.steps, modules), len(program.inputs))
        if len(step.inputs) > 1 and isinstance(module, Lambda) and module.func is identity
    }


def _edges(
    sources: tuple[int, ...], target: str, joins: dict[int, tuple[int, ...]], shapes: list[str]
) -> list[str]:
    sources = _through_joins(sources, joins)
    lines = []
    for position, source in enumerate(sources):
        which = f"{position}: " if len(sources) > 1 else ""
        lines.append(f"  {source} -> {target} [label={_quoted(which + shapes[source])}];")
    return lines


def _through_joins(sources: tuple[int, ...], joins: dict[int, tuple[int, ...]]) -> tuple[int, ...]:
    found: list[int] = []
    for source in sources:
        found += _through_joins(joins[source], joins) if source in joins else (source,)
    return tuple(found)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
