"""Values of a traced program in a graph of torch, and the table of rules; without torch.

torch computes in all dtypes of jax but some. Numbers of these are carried by a larger dtype, and
are wrapped or rounded after each operation that may leave their range.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# torch is not among the packages of the tests.
from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np

from pax_export.export.artifact import dimensions
from pax_export.export.portable import RuleTable
from pax_export.export.portable.sizes import GraphSizes
from pax_export.export.portable.sizes import is_number as is_number
from pax_export.export.portable.sizes import same_shape as same_shape
from pax_export.export.portable.sizes import same_size as same_size

if TYPE_CHECKING:
    import torch

    from pax_export._foundations.types import DTypeLike

    Node: TypeAlias = torch.fx.Node


#: The rules that write primitives as calls of torch: functions ``rule(builder, *operands,
#: **parameters)`` of `TorchValue`s and of the parameters of the primitive; `builder.results` has
#: the shapes and dtypes of the results. A rule returns the node of its only result, or one per
#: result, not yet wrapped to its dtype, and raises `NotInTargetError` for unsupported cases.
RULES = RuleTable()
rule = RULES.rule

#: uint64 is carried by the int64 of the same bits.
_CARRIERS = {
    "uint16": "int32", "uint32": "int64", "uint64": "int64", "int4": "int32", "uint4": "int32",
    "int2": "int32", "uint2": "int32",
}  # fmt: skip
#: Dtypes in which torch has no arithmetic, but to which it rounds.
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


@dataclass(frozen=True, eq=False)
class TorchValue:
    """One array: its node in the graph, and its dtype and shape in jax.

    Attributes:
        node: the node; None for a literal, whose node is made where torch takes no number.
        known: its value, if it is a literal, in the carrier type.
        thin: the node of a smaller array that broadcasts to it, if there is one.
        bare: whether that is a scalar.
    """

    node: Node | None
    dtype: np.dtype[Any]
    shape: tuple[Any, ...]
    known: np.ndarray | None = None
    thin: Any = None
    bare: bool = False

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def carrier(self) -> str:
        return carrier(self.dtype)

    @property
    def is_float(self) -> bool:
        return "float" in self.carrier

    @property
    def number(self) -> Any:
        """The Python number of a scalar literal."""
        assert self.known is not None
        return self.known.item()


def carrier(dtype: DTypeLike) -> str:
    """The name of the dtype that carries numbers of a dtype in torch."""
    name = np.dtype(dtype).name
    if name.startswith("float8"):
        return "float32"
    return _CARRIERS.get(name, name)


def is_wrapped(dtype: DTypeLike) -> bool:
    return np.dtype(dtype).name != carrier(dtype)


def is_rounded_by_torch(dtype: DTypeLike) -> bool:
    return np.dtype(dtype).name in _FLOAT8


def in_carrier(array: np.ndarray) -> np.ndarray:
    """A literal in the numbers that carry it."""
    name = carrier(array.dtype)
    kind = getattr(jax.numpy, name) if name == "bfloat16" else name
    with np.errstate(over="ignore"):
        return np.asarray(array).astype(kind)


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
