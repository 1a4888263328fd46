"""PortableProgram: the record that passes transform."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import jax
import jax.export
from jax.extend import source_info_util

from pax_export._foundations.jaxpr import (
    bind_equation,
    inner_programs,
    interpret,
    is_literal,
    is_program,
)
from pax_export._foundations.jaxpr import needed_equations as needed
from pax_export.export.portable.sizes import is_number

#: Primitives with inner programs that they do not only call.
CONTROL = frozenset({"scan", "while", "cond"})
#: Returns the results of an equation from its operands.
Operate = Callable[[Any, list[Any]], Sequence[Any]]


@dataclass(frozen=True)
class Weight:
    """An array of a program that is known at export.

    Attributes:
        name: the name of the stored array; empty for a small constant.
        array: its values.
        sources: names of the weights that it was computed from; empty for an original one.
    """

    name: str
    array: Any
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class PortableProgram:
    """A traced program whose first operands are known arrays.

    Attributes:
        program: a closed jaxpr; its operands are the weights, then the inputs.
        weights: the known arrays, in the order of the operands.
        notes: parts that passes did not optimize, with reasons, for the report.
    """

    program: Any
    weights: tuple[Weight, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def jaxpr(self) -> Any:
        return self.program.jaxpr

    @property
    def inputs(self) -> Sequence[Any]:
        """The variables that are not weights."""
        return self.jaxpr.invars[len(self.weights) :]

    def run(self, *inputs: Any) -> list[Any]:
        """Runs the program in jax, for arrays of any sizes that fit: how passes are tested."""
        arrays = [each.array for each in self.weights]

        def function(*operands: Any) -> list[Any]:
            return evaluated(self.program, operands, _without_composites)

        structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self.jaxpr.invars]
        return list(jax.export.export(jax.jit(function))(*structs).call(*arrays, *inputs))

    def noted(self, *notes: str) -> PortableProgram:
        return replace(self, notes=tuple(dict.fromkeys((*self.notes, *notes))))

    def rebuilt(
        self,
        operate: Operate,
        given: Callable[[Any], Any] = lambda value: value,
        taken: Callable[[Any], Any] = lambda value: value,
    ) -> PortableProgram:
        """Returns the program rebuilt by ``operate(equation, operands)``.

        Args:
            operate: returns the new results of an equation.
            given: returns the new value of an operand of the program.
            taken: returns the array of a result of the program.
        """

        def run(*operands: Any) -> list[Any]:
            results = evaluated(self.program, [given(each) for each in operands], operate)
            return [taken(each) for each in results]

        return replace(self, program=traced(run, self.jaxpr.invars))


def traced(function: Callable[..., Any], like: Sequence[Any]) -> Any:
    """A function traced for operands like some variables."""
    structs = [jax.ShapeDtypeStruct(each.aval.shape, each.aval.dtype) for each in like]
    return jax.make_jaxpr(function)(*structs)


def evaluated(program: Any, arguments: Sequence[Any], operate: Operate) -> list[Any]:
    """Evaluates the operations that the results of a program need."""

    def in_place(equation: Any, operands: list[Any]) -> Sequence[Any]:
        with source_of(equation):
            return operate(equation, operands)

    return interpret(program, arguments, in_place, equations=needed)


def _without_composites(equation: Any, operands: list[Any]) -> Sequence[Any]:
    """The results of an equation; jax does not export composites of symbolic sizes."""
    if equation.primitive.name != "composite":
        return bind_equation(
            with_bodies(equation, lambda body: body.rebuilt(_without_composites)), operands
        )
    (inner,) = inner_programs(equation)
    return evaluated(inner, operands, _without_composites)


def with_bodies(equation: Any, change: Callable[[PortableProgram], PortableProgram]) -> Any:
    """Returns an equation with changed loop body or branches, as programs without weights."""
    if equation.primitive.name not in CONTROL:
        return equation

    def changed(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(changed, value))
        return change(PortableProgram(value, ())).program if is_program(value) else value

    return equation.replace(params={name: changed(v) for name, v in equation.params.items()})


def uses(jaxpr: Any) -> dict[Any, int]:
    """Counts the readers of each variable, including results."""
    read = chain(*(each.invars for each in needed(jaxpr)), jaxpr.outvars)
    return Counter(atom for atom in read if not is_literal(atom))


def source_of(equation: Any) -> AbstractContextManager[Any]:
    """Context manager whose operations have the source line and module of an equation."""
    source = equation.source_info
    return source_info_util.user_context(source.traceback, name_stack=source.name_stack)


def again(equation: Any, operands: Sequence[Any], **changed: Any) -> Sequence[Any]:
    """The results of an equation for other operands, with some parameters changed."""
    return bind_equation(equation.replace(params={**equation.params, **changed}), operands)


def is_static(shape: Sequence[Any]) -> bool:
    return all(map(is_number, shape))


def is_key(dtype: Any) -> bool:
    return jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)
