"""The time budget of a validation, and probes: calls with extreme inputs, ``sigmoid(1e20)``.

Differences in probes do not refuse an export; the report lists them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pax_export._foundations.jaxpr import (
    called_program,
    inner_programs,
    interpret,
    jaxpr_of,
    jaxpr_primitives,
)
from pax_export._foundations.types import Aval, Equation, PyTree, TracedProgram
from pax_export.export.artifact.dimensions import is_inexact, is_integer
from pax_export.export.validation.serve import Arrays

#: Seconds that a test may take beyond the time of the steps before it.
SPARE = 2.0
#: Margin for steps that take longer than estimated.
_MARGIN = 1.3


class Budget:
    """The seconds of a test; without end, if none are given.

    Example:
        >>> Budget().leaves_out(1e6, "everything"), Budget(0.0).leaves_out(1.0, "gradients")
        (False, True)
    """

    def __init__(self, seconds: float | None = None, probes: Literal["no", "few", "all"] = "no"):
        self._end = None if seconds is None else time.perf_counter() + seconds
        #: Descriptions of omitted checks.
        self.left_out: list[str] = []
        #: The extreme inputs that are tried, the differences there, and their sentences.
        self.probes = probes
        self.differences: list[Any] = []
        self.differs: list[str] = []

    def leaves_out(self, seconds: float, what: str) -> bool:
        """Returns whether there is too little time for a check of this duration."""
        if self._end is None or time.perf_counter() + seconds * _MARGIN <= self._end:
            return False
        self.left_out.append(what)
        return True


#: Values of all elements of a floating input, one call each.
_NUMBERS = (0.0, -1.0, 1e-30, 1e2, -1e2, 1e4, -1e4, 1e10, -1e10, 1e20, -1e20, 1e38, -1e38)
_NO_NUMBERS = (np.nan, np.inf, -np.inf)
#: Values within one input in the default validation.
_USUAL = (0.0, -1.0, 100.0, 1e-30, -1e4, 4.0, -100.0, 1e4, -6.0, 20.0, 0.5)
#: Primitives that loop until a number is small, which may never happen.
_MAY_NOT_END = {"while", "eigh", "eig", "svd", "schur", "hessenberg"}
#: Those that find no one answer for a matrix of a few numbers that repeat.
_SINGULAR = frozenset(
    "cholesky lu geqrf householder_product triangular_solve custom_linear_solve "
    "tridiagonal_solve".split()
)
#: Those that take places from integers.
_READS_INDICES = ("gather", "scatter", "dynamic", "ragged")
#: The cost of such a call relative to the first, which compiled the program.
_COST = 0.2


@dataclass(frozen=True)
class Probe:
    """An extreme call."""

    input: str  # name; "" for all inputs
    value: str  # of all elements
    differences: list[ProbeDifference]  # where to record differences


@dataclass(frozen=True)
class ProbeDifference:
    """An output of a probing call that differs from jax."""

    case: Any  # the call
    output: str  # name of the output
    only: str = ""  # "NaN" or "signs" if only these differ


def may_not_end(program: TracedProgram) -> bool:
    """Returns whether a traced program has loops that end depending on inputs."""
    return not _MAY_NOT_END.isdisjoint(jaxpr_primitives(program))


def probes(
    case: PyTree,
    program: TracedProgram,
    expected: Callable[[Arrays], Arrays],
    budget: Budget,
    seconds: float | None,
    examples: bool,
) -> Iterator[Any]:
    """Yields calls with extreme numbers, similar to a case of this duration, within the budget.

    With `examples`, the default validation makes none, because other values may be meaningless.
    """
    if budget.probes == "no" or may_not_end(program):
        return
    if budget.probes == "few":
        singular = not _SINGULAR.isdisjoint(jaxpr_primitives(program))
        text = f"{case.signature} with numbers up to 1e4"
        if examples or singular:
            return
        if seconds is not None and budget.leaves_out(_COST * seconds, text):
            return
        inputs = _side_by_side(case.inputs, program)
        changed = any(inputs[name] is not case.inputs[name] for name in inputs)
        chosen = [("", "", inputs)] * changed
    else:
        chosen = _one_by_one(case.inputs)
    for name, kind, inputs in chosen:
        with suppress(Exception):  # jax itself does not compute it
            probe = Probe(name, kind, budget.differences)
            fields = {"inputs": inputs, "expected": expected(inputs), "probe": probe}
            yield dataclasses.replace(case, **fields, label="", alternatives=None)


def _one_by_one(inputs: Arrays) -> Iterator[tuple[str, str, Arrays]]:
    for name, value in inputs.items():
        numbers: Collection[Any] = ()
        if is_inexact(value.dtype) and value.dtype.kind != "c":
            numbers = (*_NUMBERS, *_NO_NUMBERS)
        elif is_integer(value.dtype) and value.dtype.kind in "iu":
            ends = np.iinfo(value.dtype)
            numbers = (0, ends.min, ends.max)
        for number in numbers:
            with np.errstate(over="ignore"):
                filled = np.full(value.shape, number).astype(value.dtype)
            yield name, f"{number:g}", {**inputs, name: filled}


def _side_by_side(inputs: Arrays, program: TracedProgram) -> Arrays:
    """Returns the inputs with unusual values among the elements; indices do not change."""
    count = len(jaxpr_of(program).invars)
    indices = _read_as_indices(program)
    changed = {}
    for at, (name, value) in enumerate(inputs.items()):
        dtype = value.dtype
        if is_inexact(dtype) and dtype.kind != "c":
            numbers: Collection[Any] = _USUAL
        elif is_integer(dtype) and dtype.kind in "iu" and count - len(inputs) + at not in indices:
            ends = np.iinfo(dtype)
            numbers = (0, ends.max, 1, ends.min, 100, ends.max - 1, 7)
        else:
            changed[name] = value
            continue
        # Equal inputs would pair equal values.
        cycle = np.roll(np.array(numbers, object), 3 * at)
        changed[name] = np.resize(cycle, value.shape).astype(dtype)
    return changed


def _read_as_indices(program: TracedProgram) -> set[int]:
    """The numbers of the operands of a program that are indices, also inside loops."""
    found: set[int] = set()

    def operate(equation: Equation, operands: list[set[int]]) -> list[set[int]] | None:
        if called_program(equation) is not None:
            return None
        read = set[int]().union(*operands)
        reads_indices = any(word in equation.primitive.name for word in _READS_INDICES)
        if reads_indices or any(inner_programs(equation)):
            found.update(read)
        return [read if _is_integer(each.aval) else set() for each in equation.outvars]

    count = len(jaxpr_of(program).invars)
    interpret(program, [{at} for at in range(count)], operate, constant=lambda value: set())
    return found


def _is_integer(aval: Aval) -> bool:
    dtype = getattr(aval, "dtype", None)
    return isinstance(dtype, np.dtype) and is_integer(dtype)  # no random keys
