"""Arithmetic on symbolic sizes: nodes of a graph that are integers; without torch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from pax_export.export.artifact import dimensions
from pax_export.export.portable.sizes import GraphSizes, is_number

_OPERATORS = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "mod": operator.mod,
    "floordiv": operator.floordiv, "div": operator.floordiv,
}  # fmt: skip


class TorchSizes(GraphSizes):
    """The sizes of one graph; ``node(function, *arguments)`` adds a call to it."""

    def __init__(self, node: Callable[..., Any], functions: Callable[[str], Any]):
        super().__init__()
        self._node, self._functions = node, functions

    def read_variables(self, inputs: Iterable[tuple[Any, Sequence[Any]]]) -> None:
        """Reads the variables from the shapes of inputs, given by node."""
        size_of = self._functions("ops.aten.sym_size.int")
        sizes = [
            (str(size), partial(self._node, size_of, node, axis))
            for node, shape in inputs
            for axis, size in enumerate(shape)
            if not is_number(size)
        ]
        self._variables = dimensions.solve_each(sizes, self._calculated)

    def shape(self, sizes: Sequence[Any]) -> list[Any]:
        return [self.of(size) for size in sizes]

    def _calculate(self, operation: str, left: Any, right: Any) -> Any:
        if operation == "neg":
            return self._node(operator.neg, right)
        if operation in ("max", "min"):
            return self._node(self._functions(f"sym_{operation}"), left, right)
        return self._node(_OPERATORS[operation], left, right)
