"""Replaces the integers of quantized weights by dequantized operands.

For runtimes without fast integer products: weights are dequantized once, when the export is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from pax_export._foundations.jax import run_inside, scan_operands
from pax_export._foundations.jaxpr import (
    bind_equation,
    called_program,
    has_own_derivative,
    is_literal,
    jaxpr_of,
)
from pax_export._foundations.types import Array, Equation, TracedProgram
from pax_export.export.portable.program import evaluated
from pax_export.precision.quantized import Form, plain_dot, plain_pointwise

#: Operations on quantized weights -> their form on dequantized ones; the weight is last
#: operand: its integers are at this place, and after them scales and zero points.
_WITH_NUMBERS: Mapping[str, tuple[int, Callable[..., Any]]] = {
    "dequantize": (0, lambda weight, **form: weight),
    "quantized_dot": (1, lambda x, weight, contracted, **form: plain_dot(x, weight, contracted)),
    "pointwise_convolution": (
        1,
        lambda x, weight, channels, **form: plain_pointwise(x, weight, channels),
    ),
    "quantized_rows": (1, lambda index, weight, **form: weight[index]),
}
_Places = Sequence[int | None]


class StoredIntegers(NamedTuple):
    """A quantized weight among the operands of a program: the indices of its arrays.

    Attributes:
        integers: the index of the integers.
        scales: the indices of the scales and the optional zero points.
        form: the format.
    """

    integers: int
    scales: tuple[int, ...]
    form: Form


def dequantized_ahead(
    program: TracedProgram, indices: Collection[int]
) -> tuple[Any, tuple[StoredIntegers, ...]]:
    """Returns the program with dequantized weights, if nothing else reads the integers.

    Args:
        program: a closed jaxpr.
        indices: the operands that may be integers or scales: those that calls do not change.

    Returns:
        The program, and the weights that it now takes dequantized.  Tables with row lookups only
        stay integers.
    """
    variables = jaxpr_of(program).invars
    if all(variables[at].aval.dtype.itemsize > 1 for at in indices):
        return program, ()  # no integers: most exports need no walk
    found = _Readers(indices)
    found.visit(program, [at if at in indices else None for at in range(len(variables))])
    weights = tuple(found.weights())
    if not weights:
        return program, ()
    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]
    for each in weights:
        structs[each.integers] = numbers_of(structs[each.integers], each.form)

    def run(*operands: Array) -> list[Any]:
        values: list[Any] = list(operands)
        for each in weights:
            values[each.integers] = _Numbers(values[each.integers], each.form)
        return _Replaced().run(program, values)

    return jax.make_jaxpr(run)(*structs), weights


class _Readers:
    """The readers of each operand, also in loops, branches and calls."""

    def __init__(self, indices: Collection[int]):
        self._read: dict[int, set[tuple[tuple[int | None, ...], Form]]] = {}
        self._multiplied: set[int] = set()
        self._otherwise: set[int | None] = set()

    def weights(self) -> Iterator[StoredIntegers]:
        for index in sorted(self._multiplied - self._otherwise):
            ((scales, form), *others) = self._read[index]
            known = tuple(each for each in scales if each is not None)
            if len(known) == len(scales) and not others:
                yield StoredIntegers(index, known, form)

    def visit(self, program: TracedProgram, operands: _Places) -> None:
        jaxpr = jaxpr_of(program)  # before jax 0.12 some are open
        known = dict(zip(jaxpr.invars, operands))
        for equation in jaxpr.eqns:
            indices = [None if is_literal(atom) else known.get(atom) for atom in equation.invars]
            if equation.primitive.name in _WITH_NUMBERS:
                at, _ = _WITH_NUMBERS[equation.primitive.name]
                self._otherwise.update(indices[:at])
                integers, *scales = indices[at:]
                if integers is not None:
                    form = Form(**{name: equation.params[name] for name in Form._fields})
                    self._read.setdefault(integers, set()).add((tuple(scales), form))
                    if equation.primitive.name != "quantized_rows":
                        self._multiplied.add(integers)
                continue
            inner = list(_inner_operands(equation))
            passed = {at for _, places in inner for at in places}
            self._otherwise.update(each for at, each in enumerate(indices) if at not in passed)
            for each, places in inner:
                self.visit(each, [None if at is None else indices[at] for at in places])
        self._otherwise.update(known.get(atom) for atom in jaxpr.outvars if not is_literal(atom))


def _inner_operands(equation: Equation) -> Iterator[tuple[Any, _Places]]:
    """Yields inner programs with the indices of their operands; None for changing ones."""
    name, params, count = equation.primitive.name, equation.params, len(equation.invars)
    if name == "scan":
        constants, carried, rows = scan_operands(params, range(count))
        yield params["jaxpr"], [*constants, *[None] * len(carried), *rows]
    elif name == "while":
        tested, both = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        carried = [None] * (count - both)
        yield params["cond_jaxpr"], [*range(tested), *carried]
        yield params["body_jaxpr"], [*range(tested, both), *carried]
    elif name == "cond":
        yield from ((branch, range(1, count)) for branch in params["branches"])
    elif called_program(equation) is not None and not has_own_derivative(equation):
        yield called_program(equation), range(count)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Numbers:
    """The numbers of a weight, where a program has its integers."""

    array: Any
    form: Form = field(metadata={"static": True})


class _Replaced:
    """Evaluates programs with `_Numbers` for some operands; a function that they call is one."""

    def __init__(self) -> None:
        self._functions: dict[int, tuple[Any, Any]] = {}  # by id; kept alive, so that ids stay

    def run(self, program: TracedProgram, operands: Sequence[Any]) -> list[Any]:
        return evaluated(program, operands, self._operate)

    def _operate(self, equation: Equation, operands: list[Any]) -> Sequence[Any]:
        at, rule = _WITH_NUMBERS.get(equation.primitive.name, (0, None))
        if rule is not None and isinstance(operands[at], _Numbers):
            return [rule(*operands[:at], operands[at].array, **equation.params)]
        if not any(isinstance(each, _Numbers) for each in operands):
            return bind_equation(equation, operands)
        results = run_inside(equation, operands, self.run)
        return self._called(called_program(equation))(*operands) if results is None else results

    def _called(self, program: TracedProgram) -> Any:
        if id(program) not in self._functions:
            function = jax.jit(lambda *operands: self.run(program, operands))
            self._functions[id(program)] = program, function
        return self._functions[id(program)][1]


def numbers_of(integers: Any, form: Form) -> jax.ShapeDtypeStruct:
    """Returns the struct of a dequantized weight with integers of this shape."""
    return jax.ShapeDtypeStruct(form.shape(integers.shape), np.dtype(form.dtype))
