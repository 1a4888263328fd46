"""Symbolic sizes in an ONNX graph: read from the shapes of inputs, and calculated with.

jax writes ``2*n + floordiv(m, 2)``.  A size is a number, or the name of an int64 array with
one element in the outermost graph, which the bodies of loops and branches see as well.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from pax_export.export.artifact import dimensions
from pax_export.export.formats.onnx.registry import Refused
from pax_export.export.formats.onnx.values import is_number

Node = Callable[..., str]
Size = int | str

_OPERATORS: dict[type, str] = {ast.Add: "Add", ast.Sub: "Sub", ast.Mult: "Mul"}
_TRIED = (1, 2, 7)


class Sizes:
    """The sizes of one graph; `node` adds an operator to the outermost graph."""

    def __init__(self, node: Node):
        self._node = node
        self._variables: dict[str, str] = {}
        self._written: dict[str, Size] = {}
        self._shapes: dict[str, str] = {}

    def learn(self, inputs: Iterable[tuple[str, Sequence[Any]]]) -> None:
        """Reads the variables from the shapes of inputs, given by name."""
        todo = [
            (name, axis, str(size))
            for name, shape in inputs
            for axis, size in enumerate(shape)
            if not is_number(size)
        ]
        todo.sort(key=lambda each: len(each[2]))
        while todo:
            left = [each for each in todo if not self._solved(*each)]
            if len(left) == len(todo):
                raise Refused(f"the sizes {', '.join(each[2] for each in left)} of the inputs")
            todo = left

    def _solved(self, name: str, axis: int, text: str) -> bool:
        """Solves the text of a size for its only unknown; False if it cannot yet."""
        unknown = [each for each in dimensions.names(text) if each not in self._variables]
        if not unknown:
            return True
        if len(unknown) > 1:
            return False
        (variable,) = unknown
        slope = _slope(text, variable)
        if not slope:
            return False
        given = self._node("Shape", name, start=axis, end=axis + 1)
        rest = self._read(ast.parse(_python(text), mode="eval").body, {variable: 0})
        if rest != 0:
            given = self._node("Sub", given, self._array(rest))
        if slope != 1:
            given = self._node("Div", given, np.array([slope], np.int64))
        self._variables[variable] = given
        return True

    def of(self, size: Any) -> Size:
        """A size as a number, or as the name of an array with one element."""
        if is_number(size):
            return int(size)
        text = str(size)
        if text not in self._written:
            self._written[text] = self._read(ast.parse(_python(text), mode="eval").body, {})
        return self._written[text]

    def one(self, size: Any) -> Any:
        """A size as an array with one element: a constant, or a name."""
        return self._array(self.of(size))

    def shape(self, sizes: Sequence[Any]) -> Any:
        """Sizes as one array of int64: a constant, or a name."""
        if all(map(is_number, sizes)):
            return np.array(sizes, np.int64).reshape(-1)
        text = ", ".join(map(str, sizes))
        if text not in self._shapes:
            pieces = [self.one(size) for size in sizes]
            self._shapes[text] = self._node("Concat", *pieces, axis=0)
        return self._shapes[text]

    def _array(self, size: Size) -> Any:
        return np.array([size], np.int64) if isinstance(size, int) else size

    def _read(self, node: Any, numbers: dict[str, int]) -> Size:
        match node:
            case ast.Constant(value=int() as number):
                return number
            case ast.Name(id=name):
                return numbers[name] if name in numbers else self._variables[name]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self._calculated("Sub", 0, self._read(operand, numbers))
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self._read(operand, numbers)
            case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int() as power)):
                factor, product = self._read(left, numbers), 1
                for _ in range(power):
                    product = self._calculated("Mul", product, factor)
                return product
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                both = self._read(left, numbers), self._read(right, numbers)
                return self._calculated(_OPERATORS[type(op)], *both)
            case ast.Call(func=ast.Name(id=name), args=[left, right]):
                both = self._read(left, numbers), self._read(right, numbers)
                operators = {"floordiv": "floordiv", "mod": "Mod", "max": "Max", "min": "Min"}
                if name in operators:
                    return self._calculated(operators[name], *both)
        raise Refused(f"the size {ast.unparse(node)}")

    def _calculated(self, operator: str, left: Size, right: Size) -> Size:
        if isinstance(left, int) and isinstance(right, int):
            return _PYTHON[operator](left, right)
        if operator == "floordiv":  # ONNX divides towards zero
            rest = self._calculated("Mod", left, right)
            return self._calculated("Div", self._calculated("Sub", left, rest), right)
        both = self._array(left), self._array(right)
        if operator in ("Max", "Min"):  # of int64, onnxruntime compares some bits only
            less = self._node("Less", *both)
            return self._node("Where", less, *(both if operator == "Min" else both[::-1]))
        return self._node(operator, *both)


_PYTHON: dict[str, Callable[[int, int], int]] = {
    "Add": lambda x, y: x + y,
    "Sub": lambda x, y: x - y,
    "Mul": lambda x, y: x * y,
    "Mod": lambda x, y: x % y,
    "Div": lambda x, y: x // y,
    "floordiv": lambda x, y: x // y,
    "Max": max,
    "Min": min,
}


def _python(text: str) -> str:
    """The same for Python, which writes a power with another sign than jax."""
    return text.strip().replace("^", "**")


def _slope(text: str, variable: str) -> int:
    """By how much a size grows with a variable; 0 if not always by as much."""
    others = [name for name in dimensions.names(text) if name != variable]
    slopes = set()
    for other in _TRIED:
        sizes = dict.fromkeys(others, other)
        found = [dimensions.value(text, {**sizes, variable: n}) for n in (0, 1, 2, 7)]
        slopes |= {found[1] - found[0], found[2] - found[1], (found[3] - found[2]) // 5}
    return slopes.pop() if len(slopes) == 1 else 0
