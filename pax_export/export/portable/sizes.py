"""Sizes that may be symbolic, and traces with them under the program's assumptions."""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax import export as jax_export

from pax_export._foundations.jax import scope_constraints
from pax_export._foundations.types import Array, Aval, PyTree, Size
from pax_export.export.artifact import dimensions

_COMPARISON = re.compile(r"comparison '(.+)' (>=|<|>) '(.+)' is inconclusive")
#: The largest number of comparisons that are assumed.
_MOST = 20


def is_number(size: Size | str) -> bool:
    return isinstance(size, (int, np.integer))


def same_size(one: Size, other: Size) -> bool:
    """Returns whether two sizes are equal; jax prints equal symbolic ones alike."""
    return one == other if is_number(one) and is_number(other) else str(one) == str(other)


def same_shape(one: Sequence[Size], other: Sequence[Size]) -> bool:
    return len(one) == len(other) and all(map(same_size, one, other))


class Broadcast(Protocol):
    """A value that may have been broadcast: `thin` is what it was before, if it was."""

    @property
    def shape(self) -> Sequence[Any] | None: ...
    @property
    def thin(self) -> Any: ...


def stay_thin(operands: Sequence[Broadcast]) -> list[bool]:
    """Which operands of an operator that broadcasts may be as they were before they were broadcast.

    The others must have the axes in which these are wide.
    """
    axes = [_wide_axes(each.shape or ()) for each in operands]
    covered = set[int]().union(*(at for each, at in zip(operands, axes) if each.thin is None))
    found: list[bool] = []
    for each, at in zip(operands, axes):
        found.append(each.thin is not None and at <= covered)
        covered |= set() if found[-1] else at
    return found


def _wide_axes(shape: Sequence[Any]) -> set[int]:
    """The axes that are not 1, counted from the last one."""
    return {axis for axis, size in enumerate(reversed(shape)) if not same_size(size, 1)}


class GraphSizes(abc.ABC):
    """Sizes in a graph that is written: each is a number, or a value of the graph.

    jax writes ``2*n + floordiv(m, 2)`` for a size; it is computed once.
    """

    def __init__(self) -> None:
        self._variables: dict[str, Any] = {}
        self._written: dict[str, Any] = {}

    def of(self, size: Size | str) -> Any:
        """A size as a number, or as a value of the graph."""
        if is_number(size):
            return int(size)
        text = str(size)
        if text not in self._written:
            self._written[text] = dimensions.evaluate_over(text, self._variables, self._calculated)
        return self._written[text]

    def _calculated(self, operation: str, left: Any, right: Any) -> Any:
        if is_number(left) and is_number(right):
            return dimensions.NUMBERS[operation](left, right)
        return self._calculate(operation, left, right)

    @abc.abstractmethod
    def _calculate(self, operation: str, left: Any, right: Any) -> Any:
        """Adds the calculation of a size to the graph; one of the two is not a number."""


def has_no_elements(array: Array | Aval) -> bool:
    """Returns whether a static size of an array or its type is 0; random keys always have some."""
    sizes: Sequence[Any] = getattr(array, "shape", ())
    if not any(is_number(size) and size == 0 for size in sizes):
        return False
    return not jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key)


def trace(
    function: Callable[..., Any],
    operands: Sequence[Any],
    parameters: Mapping[str, Any],
    several: bool = False,
) -> Any:
    """Traces ``function(*operands, **parameters)`` as `jax.make_jaxpr` does.

    A rewritten program may make jax check ``h - 2 >= 0``, which the original program implies. It is
    assumed; the sizes of the result keep their text.

    Args:
        function: the function to trace.
        operands: shapes and dtypes of the operands.
        parameters: by name; sizes in them may be symbolic too.
        several: whether what is right for sizes greater than another is right for equal ones, too.
    """
    assumed: list[str] = []
    for _ in range(_MOST):
        again = _Again(assumed) if assumed else None
        shapes = [again.value(each.shape) if again else each.shape for each in operands]
        structs = [jax.ShapeDtypeStruct(s, each.dtype) for s, each in zip(shapes, operands)]
        keywords = {k: again.value(v) for k, v in parameters.items()} if again else parameters
        try:
            return jax.make_jaxpr(lambda *values: function(*values, **keywords))(*structs)  # noqa: B023
        except jax.errors.InconclusiveDimensionOperation as error:
            found = _COMPARISON.search(str(error))
            if found is None or (found[2] == ">" and not several):
                raise
            condition = f"{found[1]} >= {found[3]}" + " + 1" * (found[2] == ">")
            if condition in assumed:
                raise
            assumed.append(condition)
    raise RecursionError("too many comparisons of symbolic sizes")


class _Again:
    """Symbolic sizes in a new scope with more constraints."""

    def __init__(self, assumed: Sequence[str]):
        self._assumed = assumed
        self._scope: Any = None

    def value(self, parameter: PyTree) -> Any:
        """A parameter, with symbolic sizes inside of tuples and lists in the new scope."""
        if isinstance(parameter, (tuple, list)):
            make: Any = getattr(parameter, "_make", type(parameter))
            return make(map(self.value, parameter))
        if not jax_export.is_symbolic_dim(parameter):
            return parameter
        if self._scope is None:
            known = (*scope_constraints(parameter.scope), *self._assumed)
            self._scope = jax_export.SymbolicScope(known)
        (size,) = jax_export.symbolic_shape(str(parameter), scope=self._scope)
        return size
