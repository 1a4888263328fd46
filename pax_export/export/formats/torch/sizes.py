"""Arithmetic on symbolic sizes: nodes of a graph that are integers; without torch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from pax_export.export.artifact import dimensions
from pax_export.export.formats.torch.values import is_number

_OPERATORS = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "mod": operator.mod,
    "floordiv": operator.floordiv, "div": operator.floordiv,
}  # fmt: skip


class TorchSizes:
    """The sizes of one graph; ``node(function, *arguments)`` adds a call to it."""

    def __init__(self, node: Callable[..., Any], functions: Callable[[str], Any]):
        self._node, self._functions = node, functions
        self.variables: dict[str, Any] = {}
        self._written: dict[str, Any] = {}

    def read_variables(self, inputs: Iterable[tuple[Any, Sequence[Any]]]) -> None:
        """Reads the variables from the shapes of inputs, given by node."""
        size_of = self._functions("ops.aten.sym_size.int")
        sizes = [
            (str(size), partial(self._node, size_of, node, axis))
            for node, shape in inputs
            for axis, size in enumerate(shape)
            if not is_number(size)
        ]
        self.variables = dimensions.solve_each(sizes, self._calculated)

    def of(self, size: Any) -> Any:
        """A size as a number or a node."""
        if is_number(size):
            return int(size)
        text = str(size)
        if text not in self._written:
            self._written[text] = dimensions.evaluate_over(text, self.variables, self._calculated)
        return self._written[text]

    def shape(self, sizes: Sequence[Any]) -> list[Any]:
        return [self.of(size) for size in sizes]

    def _calculated(self, operation: str, left: Any, right: Any) -> Any:
        if is_number(left) and is_number(right):
            return dimensions.NUMBERS[operation](left, right)
        if operation == "neg":
            return self._node(operator.neg, right)
        if operation in ("max", "min"):
            return self._node(self._functions(f"sym_{operation}"), left, right)
        return self._node(_OPERATORS[operation], left, right)
