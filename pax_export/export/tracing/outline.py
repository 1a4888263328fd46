"""Outlines repeated layers of a program as one function, which jax lowers once.

Copies follow each other and have equal operations, parameters, literals, shapes, dtypes and wiring;
weights and the previous layer's result may differ. The exported program has the calls inlined again
(`lowering/lower.py`). docs/decisions/outlining.md has the measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import jax
import numpy as np

from pax_export._foundations.jax import call_part, needed_part
from pax_export._foundations.jaxpr import (
    bind_equation,
    inner_programs,
    is_literal,
    is_program,
    jaxpr_of,
)
from pax_export._foundations.types import Array, Atom, Aval, Equation, Jaxpr, TracedProgram

#: Shorter copies are not outlined, because a call is as long.
LEAST_LENGTH = 8
#: The number of operations that outlining must save to be tried.
LEAST_SAVED = 32
#: Repeats of kinds that are looked at closely; the others would save little.
MOST_TRIED = 100
#: The maximum number of derivatives in a SavedModel.
DERIVATIVES = 2


@dataclass(frozen=True)
class Repeat:
    """Equal copies, one after the other, among the equations of a program."""

    start: int
    length: int  # of a copy
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.length * self.count

    @property
    def starts(self) -> range:
        """The first equation of each copy."""
        return range(self.start, self.stop, self.length)

    @property
    def saved(self) -> int:
        """The number of equations that outlining the copies saves."""
        return self.length * (self.count - 1)


def outline(program: TracedProgram) -> Callable[[list[Any]], list[Any]] | None:
    """A function of flat arguments equal to a program, sharing repeated parts; or None."""
    jaxpr = jaxpr_of(program)
    wires = _Wires(jaxpr)
    repeats = sorted(_find_repeats(jaxpr.eqns, wires), key=lambda repeat: repeat.start)
    if not repeats:
        return None
    parts = list(_make_segments(jaxpr, wires, repeats))
    known = dict(zip(jaxpr.constvars, getattr(program, "consts", ())))

    def run(operands: list[Any]) -> list[Any]:
        values = known | dict(zip(jaxpr.invars, operands))
        for part in parts:
            results = part.call(*[values[variable] for variable in part.inputs])
            values.update(zip(part.outputs, results))
        return [atom.val if is_literal(atom) else values[atom] for atom in jaxpr.outvars]

    return run


class _Wires:
    """Lifetimes: `last` equation that reads a variable, and live values `crossing` an equation."""

    def __init__(self, jaxpr: Jaxpr):
        self.last: dict[Any, int] = {}
        for i, equation in enumerate(jaxpr.eqns):
            self.last.update((atom, i) for atom in equation.invars if not is_literal(atom))
        self.last.update((a, len(jaxpr.eqns)) for a in jaxpr.outvars if not is_literal(a))
        change = np.zeros(len(jaxpr.eqns) + 2, np.int64)
        for index, equation in enumerate(jaxpr.eqns):
            for variable in equation.outvars:
                change[index + 1] += 1
                change[self.last.get(variable, index) + 1] -= 1
        self.crossing = np.cumsum(change)

    def read_from(self, equations: Sequence[Any]) -> list[Any]:
        """The variables that equations read and do not make, in order."""
        own = {out for equation in equations for out in equation.outvars}
        read = [atom for equation in equations for atom in equation.invars]
        return list(dict.fromkeys(a for a in read if not is_literal(a) and a not in own))

    def used_after(self, equations: Sequence[Any], stop: int) -> set[tuple[int, int]]:
        """Returns the results of these equations that are read later, by equation and index."""
        return {
            (i, number)
            for i, equation in enumerate(equations)
            for number, out in enumerate(equation.outvars)
            if self.last.get(out, -1) >= stop
        }


# --- finding repeats ---------------------------------------------------------


def _find_repeats(equations: Sequence[Any], wires: _Wires) -> list[Repeat]:
    """Repeats that do not overlap, those first that save most."""
    if len(equations) < LEAST_LENGTH + LEAST_SAVED:
        return []
    kinds, exactly = Alike(0).numbers(equations), Alike(DERIVATIVES)
    chosen: list[Repeat] = []
    candidates = sorted(_candidates(kinds), key=lambda each: (-each[0].saved, each[0].length))
    for found, slack in candidates[:MOST_TRIED]:
        if any(found.start < old.stop and old.start < found.stop + slack for old in chosen):
            continue
        starts = range(found.start, found.start + slack + 1)
        start = min(starts, key=lambda start: wires.crossing[start + found.length])
        repeats = _equal_runs(equations, Repeat(start, found.length, found.count), exactly)
        chosen.extend(repeat for repeat in repeats if repeat.saved >= LEAST_SAVED)
    return chosen


def _candidates(kinds: np.ndarray) -> Iterator[tuple[Repeat, int]]:
    """Returns where equations of the same kinds repeat, and at which distance."""
    for length in range(LEAST_LENGTH, len(kinds) // 2 + 1):
        same = np.concatenate([[False], kinds[:-length] == kinds[length:], [False]])
        starts, stops = np.flatnonzero(np.diff(same)).reshape(-1, 2).T
        for start, stop in zip(starts.tolist(), stops.tolist()):
            count, slack = divmod(stop - start + length, length)
            repeat = Repeat(start, length, count)
            if count > 1 and repeat.saved >= LEAST_SAVED:
                yield repeat, slack


def _equal_runs(equations: Sequence[Any], repeat: Repeat, exactly: Alike) -> Iterator[Repeat]:
    """Yields runs of copies that are exactly equal, with equal wiring."""
    copies = [equations[first : first + repeat.length] for first in repeat.starts]
    described = [(_wiring_of(copy), exactly.numbers(copy).tolist()) for copy in copies]
    start = repeat.start
    for _, run in groupby(described):
        count = len(list(run))
        yield Repeat(start, repeat.length, count)
        start += count * repeat.length


def _wiring_of(equations: Sequence[Any]) -> list[Hashable]:
    """The origin of each operand: the result of an equation, or a value from outside."""
    created: dict[Any, Hashable] = {}
    outside: dict[Any, int] = {}
    wiring: list[Hashable] = []
    for i, equation in enumerate(equations):
        for atom in equation.invars:
            if not is_literal(atom):
                inner = created.get(atom)
                wiring.append(outside.setdefault(atom, len(outside)) if inner is None else inner)
        created.update((out, (i, number)) for number, out in enumerate(equation.outvars))
    return wiring


# --- making the function -----------------------------------------------------


@dataclass(frozen=True)
class _Segment:
    """Some equations as a function, from the values they read to those read later."""

    call: Callable[..., Sequence[Any]]
    inputs: list[Any]
    outputs: list[Any]


def _make_segments(jaxpr: Jaxpr, wires: _Wires, repeats: Sequence[Repeat]) -> Iterator[_Segment]:
    start = 0
    for repeat in repeats:
        yield _plain_segment(jaxpr, wires, start, repeat.start)
        yield from _copy_segments(jaxpr, wires, repeat)
        start = repeat.stop
    yield _plain_segment(jaxpr, wires, start, len(jaxpr.eqns))


def _plain_segment(jaxpr: Jaxpr, wires: _Wires, start: int, stop: int) -> _Segment:
    equations = jaxpr.eqns[start:stop]
    inputs = wires.read_from(equations)
    outputs = _outputs_used(equations, wires.used_after(equations, stop))
    return _Segment(call_part(jaxpr, equations, inputs, outputs), inputs, outputs)


def _copy_segments(jaxpr: Jaxpr, wires: _Wires, repeat: Repeat) -> Iterator[_Segment]:
    """Returns all copies, as calls of the first one."""
    copies = [jaxpr.eqns[start : start + repeat.length] for start in repeat.starts]
    used: set[tuple[int, int]] = set()
    for start, copy in zip(repeat.starts, copies):
        used |= wires.used_after(copy, start + repeat.length)
    first = copies[0]
    call = call_part(jaxpr, first, wires.read_from(first), _outputs_used(first, used))

    def repeated(*values: Array) -> Sequence[Any]:
        return call(*values)

    shared = jax.jit(repeated)
    for copy in copies:
        yield _Segment(shared, wires.read_from(copy), _outputs_used(copy, used))


def _outputs_used(equations: Sequence[Any], used: set[tuple[int, int]]) -> list[Any]:
    return [equations[i].outvars[number] for i, number in sorted(used)]


_OWN_DERIVATIVE = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


class Alike:
    """Numbers equations by equality: primitive, parameters, literals, shapes and dtypes.

    Inner programs are compared operation by operation; functions with their own derivative by
    their traces, and by those of their derivatives up to this order.
    """

    def __init__(self, derivatives: int) -> None:
        self._numbers: dict[Hashable, int] = {}
        # By id; numbered objects are kept alive, so that ids are not reused.
        self._equations: dict[int, tuple[Any, int]] = {}
        self._programs: dict[int, tuple[Any, int]] = {}
        self._traced: list[Any] = []
        self._lower = Alike(derivatives - 1) if derivatives else None

    def numbers(self, equations: Sequence[Any]) -> np.ndarray:
        return np.array([self._number_of(equation) for equation in equations], np.int64)

    def _number_of(self, equation: Equation) -> int:
        if id(equation) not in self._equations:
            self._equations[id(equation)] = equation, self._of(self._kind_of(equation))
        return self._equations[id(equation)][1]

    def _of(self, kind: Hashable) -> int:
        try:
            return self._numbers.setdefault(kind, len(self._numbers))
        except TypeError:  # it contains a value that cannot be compared
            return self._numbers.setdefault(object(), len(self._numbers))

    def _kind_of(self, equation: Equation) -> Hashable:
        if equation.effects:
            return object()  # equal to itself only
        if equation.primitive.name in _OWN_DERIVATIVE:
            derivative = self._lower and self._lower._describe_derivative(equation)
            parameters = (self._number_of_program(next(inner_programs(equation))), derivative)
        else:
            parameters = tuple((name, self._comparable(v)) for name, v in equation.params.items())
        operands = tuple(map(_comparable_atom, equation.invars))
        results = tuple(variable.aval for variable in equation.outvars)
        return equation.primitive, id(equation.ctx), parameters, operands, results

    def _comparable(self, value: Any) -> Hashable:
        """A parameter as something that equals that of an equal equation."""
        if is_program(value):
            return self._number_of_program(value)
        if isinstance(value, (tuple, list)):
            return tuple(map(self._comparable, value))
        return value

    def _number_of_program(self, program: TracedProgram) -> int:
        if id(program) not in self._programs:
            jaxpr, constants = jaxpr_of(program), getattr(program, "consts", ())
            self._programs[id(program)] = program, self._of(self._described(jaxpr, constants))
        return self._programs[id(program)][1]

    def _described(self, jaxpr: Jaxpr, constants: Sequence[Any]) -> Hashable:
        """Describes a whole program: equations, wiring, and constants."""
        wires = {variable: i for i, variable in enumerate((*jaxpr.constvars, *jaxpr.invars))}
        equations = []
        for equation in jaxpr.eqns:
            read = tuple(wires.get(a) for a in equation.invars if not is_literal(a))
            equations.append((self._number_of(equation), read))
            for variable in equation.outvars:
                wires[variable] = len(wires)
        results = tuple(_comparable_atom(a) if is_literal(a) else wires[a] for a in jaxpr.outvars)
        arguments = tuple(variable.aval for variable in jaxpr.invars)
        return arguments, tuple(equations), results, tuple(map(id, constants))

    def _describe_derivative(self, equation: Equation) -> Hashable:
        """Describes the program of a function with a custom derivative."""
        operands = [_struct_of_aval(atom.aval) for atom in equation.invars]
        results = [_struct_of_aval(variable.aval) for variable in equation.outvars]

        def pull_back(primals: list[Any], cotangents: list[Any]) -> Any:
            return jax.vjp(lambda *values: list(bind_equation(equation, values)), *primals)[1](
                cotangents
            )

        try:
            program = jax.make_jaxpr(pull_back)(operands, results)
            self._traced.append(program)
            return self._described(needed_part(program), program.consts)
        except Exception:  # of a custom rule; after a mistake a layer is written each time
            return object()  # equal to itself only


def _struct_of_aval(aval: Aval) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _comparable_atom(atom: Atom) -> Hashable:
    """Identifies an operand: the value of a literal, the type of a variable."""
    if not is_literal(atom):
        return atom.aval
    if np.ndim(atom.val):
        return id(atom.val)
    return atom.aval, np.asarray(atom.val).tobytes()
