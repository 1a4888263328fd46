"""ONNX values of the arrays of a traced program, and arithmetic on symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from pax_export._foundations.types import DTypeLike
from pax_export.export.artifact import dimensions
from pax_export.export.portable.sizes import GraphSizes
from pax_export.export.portable.sizes import is_number as is_number
from pax_export.export.portable.sizes import same_shape as same_shape
from pax_export.export.portable.sizes import same_size as same_size

_INTEGERS = {"int32": np.int32, "int64": np.int64, "uint32": np.int32, "uint64": np.int64}


@dataclass(frozen=True, eq=False)
class Value:
    """One array: its name in the graph, and its dtype and shape in jax.

    Attributes:
        known: its value, if it is a literal; in the carrier type.
        thin: the name of a smaller array that broadcasts to it, if there is one.
        bare: whether that is a scalar.
    """

    name: str
    dtype: np.dtype
    shape: tuple[Any, ...]
    known: np.ndarray | None = None
    thin: str | None = None
    bare: bool = False

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def carrier(self) -> np.dtype:
        return carrier(self.dtype)

    @property
    def is_float(self) -> bool:
        return self.carrier.kind == "f"


class RoundedInputs(NamedTuple):
    """Inputs as unsigned integers, for which onnxruntime has the fast kernels on x86.

    Attributes:
        integers: the name of the integers.
        scale: the name of the scale.
        zero: the name of the zero point.
        x: the inputs before they were rounded.
        by_row: whether each row has a scale; otherwise it is a stored number.
    """

    integers: str
    scale: str
    zero: str
    x: Value
    by_row: bool


def is_complex(dtype: DTypeLike) -> bool:
    return jax.numpy.issubdtype(dtype, jax.numpy.complexfloating)


def carrier(dtype: DTypeLike) -> np.dtype:
    dtype = np.dtype(dtype)
    if dtype == np.bool_ or dtype == np.float64:
        return dtype
    if jax.numpy.issubdtype(dtype, jax.numpy.floating):
        return np.dtype(np.float32)
    return np.dtype(_INTEGERS.get(dtype.name, np.int32))


def is_rounded(dtype: DTypeLike) -> bool:
    return np.dtype(dtype) != carrier(dtype)


# --- Arithmetic on symbolic sizes in an ONNX graph -----------------------------------------------
# A size is a number, or the name of an int64 array with one element in the outermost graph, which
# subgraphs can also read.

Node = Callable[..., str]
Size = int | str

_OPERATORS = {
    "add": "Add", "sub": "Sub", "mul": "Mul", "mod": "Mod", "div": "Div",
}  # fmt: skip


class OnnxSizes(GraphSizes):
    """The sizes of one graph; `node` adds an operator to the outermost graph."""

    def __init__(self, node: Node):
        super().__init__()
        self._node = node
        self._shapes: dict[str, str] = {}
        self._negated: dict[Size, Size] = {}  # names of negative sizes -> the sizes

    def learn(self, inputs: Iterable[tuple[str, Sequence[Any]]]) -> None:
        """Reads the variables from the shapes of inputs, given by name."""
        sizes = [
            (str(size), partial(self._node, "Shape", name, start=axis, end=axis + 1))
            for name, shape in inputs
            for axis, size in enumerate(shape)
            if not is_number(size)
        ]
        self._variables = dimensions.solve_each(sizes, self._calculated)

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

    def scalar(self, size: Any, kind: dict[str, int]) -> str:
        """Returns a size as a scalar, with these attributes of `Cast`."""
        return self.cast(self._number(size), kind)

    def arange(self, size: Any) -> str:
        """0, 1, 2... as int64."""
        first, step = np.array(0, np.int64), np.array(1, np.int64)
        number = self._number(size)
        return self._once(f"range {size}", partial(self._node, "Range", first, number, step))

    def cast(self, name: str, kind: dict[str, int]) -> str:
        return self._once(f"{name} {kind}", partial(self._node, "Cast", name, **kind))

    def _once(self, key: str, make: Callable[[], str]) -> str:
        """Returns the name of a value in the outermost graph, computed once."""
        if key not in self._shapes:
            self._shapes[key] = make()
        return self._shapes[key]

    def _number(self, size: Any) -> str:
        first = np.array([0], np.int64)
        make = partial(self._node, "Squeeze", self.one(size), first)
        return self._once(f"number {size}", make)

    def _array(self, size: Size) -> Any:
        return np.array([size], np.int64) if is_number(size) else size

    def _calculate(self, operation: str, left: Size, right: Size) -> Size:
        if operation == "neg":
            return self._negate_size(right)
        if operation in ("floordiv", "mod") and isinstance(right, int) and right < 0:
            found = self._calculated(operation, self._negate_size(left), -right)
            return found if operation == "floordiv" else self._negate_size(found)
        if left in self._negated and operation == "sub":
            return self._negate_size(self._calculated("add", self._negated[left], right))
        if left in self._negated and operation == "floordiv" and isinstance(right, int):
            # Rounded up: in IREE, remainders of negative sizes are negative.
            more = self._calculated("add", self._negated[left], right - 1)
            return self._negate_size(self._calculated("floordiv", more, right))
        if operation == "floordiv":  # ONNX divides towards zero
            rest = self._calculated("mod", left, right)
            whole = self._calculated("sub", left, rest)
            return self._node("Div", self._array(whole), self._array(right))
        both = self._array(left), self._array(right)
        if operation in ("max", "min"):  # of int64, onnxruntime compares some bits only
            less = self._node("Less", *both)
            return self._node("Where", less, *(both if operation == "min" else both[::-1]))
        return self._node(_OPERATORS[operation], *both)

    def _negate_size(self, size: Size) -> Size:
        if isinstance(size, int):
            return -size
        if size in self._negated:
            return self._negated[size]
        negated = self._node("Sub", self._array(0), self._array(size))
        self._negated[negated] = size
        return negated
