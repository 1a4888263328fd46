"""Producers of the variables of a program, for recognition."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pax_export._foundations.jaxpr import is_literal
from pax_export._foundations.types import Atom, Equation
from pax_export.export.portable.arithmetic import KnownValues
from pax_export.export.portable.program import PortableProgram

_TRANSPARENT = frozenset({"copy", "stop_gradient", "optimization_barrier", "pvary"})


@dataclass(frozen=True)
class Recognized:
    """A call of a kept function with the same result; its operands are variables of the program."""

    name: str
    operands: tuple[Any, ...]
    attributes: dict[str, Any]


class Producers:
    def __init__(self, program: PortableProgram):
        self.jaxpr = program.jaxpr
        self.known = KnownValues(program)
        self._makers = {out: e for e in program.jaxpr.eqns for out in e.outvars}

    def maker(self, atom: Atom, *names: str) -> Any:
        """Returns the equation that produces a variable, if it is of one of these primitives."""
        atom = self.same(atom)
        equation = None if is_literal(atom) else self._makers.get(atom)
        return equation if equation is not None and equation.primitive.name in names else None

    def same(self, atom: Atom) -> Any:
        """The first variable that is equal to a variable."""
        while not is_literal(atom) and atom in self._makers:
            before = self._equal(self._makers[atom])
            if before is None:
                break
            atom = before
        return atom

    def _equal(self, equation: Equation) -> Any:
        """Returns the operand that an equation returns unchanged, or None."""
        name, operands = equation.primitive.name, equation.invars
        if name == "select_n" and operands[0].aval.ndim == 0 and operands[0] in self.known:
            which = self.known.fixed(operands[0])
            return None if which is None else operands[1 + int(np.asarray(which))]
        changes = name not in _TRANSPARENT or len(operands) != 1
        if name == "convert_element_type":
            changes = operands[0].aval.dtype != equation.outvars[0].aval.dtype
        return None if changes else operands[0]

    def scalar(self, atom: Atom) -> float | None:
        """Returns the number that fills an array, if known."""
        if is_literal(atom):
            return float(np.asarray(atom.val)) if np.ndim(atom.val) == 0 else None
        atom = self.unspread(atom)[0]
        if atom.aval.ndim or atom not in self.known:
            return None
        value = self.known.fixed(atom)
        return None if value is None else float(np.asarray(value))

    def unspread(self, atom: Atom) -> tuple[Any, tuple[int, ...]]:
        """Returns the array that another is broadcast from, and the positions of its axes."""
        atom = self.same(atom)
        axes = tuple(range(atom.aval.ndim))
        while True:
            equation = self.maker(atom, "broadcast_in_dim", "reshape")
            positions = None if equation is None else _dimensions_of(equation)
            if equation is None or positions is None:
                return atom, axes
            inner = self.same(equation.invars[0])
            # Axes of size 1 do not determine their position.
            axes = tuple(axes[position] for position in positions)
            atom = inner

    def unturned(self, atom: Atom) -> tuple[Any, tuple[int, ...]]:
        """Returns the array before it was transposed, and the axis of it for each axis."""
        order = tuple(range(atom.aval.ndim))
        while (equation := self.maker(atom, "transpose")) is not None:
            order = tuple(equation.params["permutation"][axis] for axis in order)
            atom = equation.invars[0]
        return self.same(atom), order

    def reduced_from(self, atom: Atom, rank: int, axis: int) -> Any:
        """The array before it was broadcast along one of `rank` axes; None if it was not."""
        inner, axes = self.unspread(atom)
        if not rank:
            return None
        without = tuple(each for each in range(rank) if each != axis)
        if atom.aval.ndim == rank - 1:  # it has not been broadcast yet
            return inner if axes == tuple(range(rank - 1)) else None
        if atom.aval.ndim != rank:
            return None
        is_thin = axes == tuple(range(rank)) and is_one(inner.aval.shape[axis])
        return inner if is_thin or axes == without else None

    def is_vector(self, atom: Atom, axis: int) -> Any:
        """Returns the known vector broadcast along an axis, or None."""
        inner, axes = self.unspread(atom)
        if inner not in self.known or inner.aval.ndim != 1 or axes != (axis,):
            return None
        return inner


def is_one(size: int) -> bool:
    return isinstance(size, int) and size == 1


def _dimensions_of(equation: Equation) -> Sequence[int] | None:
    """Returns the positions of an operand's axes in a broadcast result."""
    name, (x, *others) = equation.primitive.name, equation.invars
    if others:
        return None
    if name == "broadcast_in_dim":
        return equation.params["broadcast_dimensions"]
    old, new, dimensions = x.aval.shape, equation.outvars[0].aval.shape, []
    for axis, size in enumerate(new):
        at = len(dimensions)
        if at < len(old) and str(old[at]) == str(size):
            dimensions.append(axis)
        elif not is_one(size):
            return None
    return (
        dimensions
        if len(dimensions) == len(old) and equation.params["dimensions"] is None
        else None
    )


Pattern = Callable[[Producers, Any], Recognized | None]
PATTERNS: dict[str, list[Pattern]] = {}


def pattern(*names: str) -> Callable[[Pattern], Pattern]:
    def register(function: Pattern) -> Pattern:
        for name in names:
            PATTERNS.setdefault(name, []).append(function)
        return function

    return register


#: The largest number of factors of a pattern; a number squared n times has 2 ** n factors.
_MOST_FACTORS = 32


def scaled(graph: Producers, atom: Atom) -> tuple[float, list[Any]]:
    """Splits a product into a known number and the other factors; none of a long product."""
    number, others, left = 1.0, [], [atom]
    for _ in range(_MOST_FACTORS):
        if not left:
            return number, others
        atom = left.pop()
        equation, known = graph.maker(atom, "neg", "div", "mul"), graph.scalar(atom)
        name = "" if equation is None else equation.primitive.name
        operands: list[Any] = [] if equation is None else equation.invars
        by = graph.scalar(operands[1]) if name == "div" else None
        if known is not None:
            number *= known
        elif name == "neg":
            number, left = -number, [*left, *operands]
        elif name == "mul":
            left += operands[::-1]
        elif by:
            number, left = number / by, [*left, operands[0]]
        else:
            others.append(graph.same(atom))
    return 1.0, []


def close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-4)
