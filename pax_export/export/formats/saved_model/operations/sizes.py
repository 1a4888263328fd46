"""Arithmetic on symbolic sizes in a graph: a size is a number, or an int32 scalar of the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from pax_export._foundations.types import Size
from pax_export.export.artifact import dimensions
from pax_export.export.portable.sizes import GraphSizes, is_number

_OPERATORS = {
    "add": "AddV2", "sub": "Sub", "mul": "Mul", "div": "FloorDiv", "floordiv": "FloorDiv",
    "mod": "FloorMod", "max": "Maximum", "min": "Minimum",
}  # fmt: skip


class TensorSizes(GraphSizes):
    """The sizes of one graph; `node` adds an operator to the outermost function."""

    def __init__(self, node: Callable[..., Any]):
        super().__init__()
        self._node = node

    def learn(self, inputs: Iterable[tuple[str, Any, Sequence[Any]]]) -> list[tuple[Any, Any, str]]:
        """Reads the variables from shapes of named inputs.

        Returns sizes, with what they have to be, and an error if they are not.
        """
        sizes = [
            (f"{name}.shape[{axis}]", str(size), partial(self._size_of, tensor, axis))
            for name, tensor, shape in inputs
            for axis, size in enumerate(shape)
            if not is_number(size)
        ]
        self._variables = dimensions.solve_each([each[1:] for each in sizes], self._calculated)
        checks = ((read(), self.of(text), f"{at} is not {text}") for at, text, read in sizes)
        return [each for each in checks if each[0] is not each[1]]

    def replace(self, variable: str, value: Any) -> None:
        """Gives a variable another value, for all sizes that are computed from now on."""
        self._variables[variable] = value
        self._written = {key: x for key, x in self._written.items() if key.startswith("shape ")}

    def shape(self, sizes: Sequence[Any]) -> Any:
        """Sizes as one int32 array: a constant, or a tensor."""
        found = list(map(self.of, sizes))
        if all(map(is_number, found)):
            return np.array(found, np.int32).reshape(-1)
        text = f"({', '.join(map(str, sizes))})"
        return self._once(text, lambda: self._node("Pack", found))

    def arange(self, size: Size) -> Any:
        """0, 1, 2... as int32."""
        if is_number(size):
            return np.arange(size, dtype=np.int32)
        return self._once(f"range {size}", lambda: self._node("Range", 0, self.of(size), 1))

    def _size_of(self, tensor: Any, axis: int) -> Any:
        whole = self._once(f"shape {tensor.name}", lambda: self._node("Shape", tensor))
        ends = [axis], [axis + 1], [1]
        read = partial(self._node, "StridedSlice", whole, *ends, shrink_axis_mask=1)
        return self._once(f"shape {tensor.name} {axis}", read)

    def _once(self, key: str, make: Callable[[], Any]) -> Any:
        if key not in self._written:
            self._written[key] = make()
        return self._written[key]

    def _calculate(self, operation: str, left: Any, right: Any) -> Any:
        if operation == "neg":
            operation, left = "sub", 0
        return self._node(_OPERATORS[operation], left, right)
