"""Finds the first operation whose result in an export differs from jax's, by bisection.

The model is exported in parts that end with an operation and return all values that later
operations read. Each part that contains the fault is wrong, so halving finds it in log2 exports;
see docs/decisions/parting.md.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from pax_export._foundations.errors import PaxError, ValidationError
from pax_export._foundations.jaxpr import bind_equation, called_program, interpret
from pax_export._foundations.types import ClosedJaxpr, Equation, PyTree
from pax_export.export.artifact.formats import Format
from pax_export.export.lowering.lower import export_unchecked
from pax_export.export.pipeline.export_run import scratch_path
from pax_export.export.portable.any_size import lowerable
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.exportable import Exportable
from pax_export.export.tracing.names import describe_structure, tree_names
from pax_export.export.tracing.programs import Program
from pax_export.export.tracing.source_lines import module_path, source_text
from pax_export.export.tracing.traced import Traced, trace

#: Seconds after which no further trial is started.
PATIENCE = 120.0

#: Writes a part of the model at a place and tests it, as the whole is written and tested.
Tester = Callable[[Exportable, Program, Path], object]


@dataclass(frozen=True)
class Divergence:
    """The first operation after which jax and an export differ."""

    operation: str  # name of the primitive
    path: str  # of the calling module; "" for the model
    kind: str  # the class of that module
    source: str  # lines of the model's code
    apart: str  # the difference of its results
    candidates: int = 1  # number of operations it may be

    def __str__(self) -> str:
        where = f"{self.path} ({self.kind})" if self.path and self.kind else self.path or self.kind
        location = ", ".join(filter(None, (where, self.source)))
        return f"{self.named} in {location}" if location else self.named

    @property
    def named(self) -> str:
        """The operation, and how many others it may be."""
        if self.candidates > 1:
            return f"{self.operation} or one of the {self.candidates - 1} operations before it"
        return self.operation


def bisect(
    format: Format,
    model: Exportable,
    programs: Sequence[Program],
    kinds: dict[str, str],
    error: ValidationError,
    test: Tester,
) -> Divergence | None:
    """Finds the operation after which jax and an export differ, or None; `kinds`: path -> class."""
    end = time.perf_counter() + PATIENCE
    key = (error.where or "").split(" ")[0].rstrip(":")
    ordered = sorted(programs, key=lambda each: each.key != key)
    with_state = "variable:" in (error.where or "")
    for program in ordered:
        search = _BisectSearch(program, with_state, end)
        found = search.found(functools.partial(_difference_after, search, format, model, test))
        if found is not None:
            return _divergence(*found, kinds)
    return None


def _difference_after(
    search: _BisectSearch, format: Format, model: Exportable, test: Tester, last: int
) -> str | None:
    """The difference after a step: empty if the part is right, None if it cannot be exported."""
    try:
        with scratch_path(format) as path:
            test(model, search.part(last), path)
    except ValidationError as error:
        return str(error.got)
    except PaxError:  # the format does not support an output of this dtype
        return None
    return ""


def bisect_calls(
    program: Program, calls: int, test: Callable[[Program], Sequence[str]], seconds: float
) -> list[Divergence | None]:
    """The first diverging operation of each call; `test` exports a part and compares it."""
    search = _BisectSearch(program, False, time.perf_counter() + seconds)
    known: dict[int, Sequence[str | None]] = {}

    def apart(call: int, last: int) -> str | None:
        if last not in known:
            try:
                known[last] = test(search.part(last))
            except Exception:  # of the format or a runtime; a mistake costs the operation's name
                known[last] = [None] * calls
        return known[last][call]

    found = [search.found(functools.partial(apart, call)) for call in range(calls)]
    return [None if each is None else _divergence(*each, {}) for each in found]


def _divergence(
    step: InlinedOperation, apart: str, candidates: int, kinds: dict[str, str]
) -> Divergence:
    equations = (*step.callers, step.equation)
    path = module_path(equations)
    name, kind = step.equation.primitive.name, kinds.get(path, "")
    return Divergence(name, path, kind, source_text(equations), apart, candidates)


@dataclass(frozen=True)
class InlinedOperation:
    """One operation of a program in which calls are inlined."""

    equation: Any
    callers: tuple[Any, ...]  # enclosing equations, the outermost first
    operands: tuple[int, ...]  # numbers of values read
    results: tuple[int, ...]  # numbers of values made


class _Operations:
    """The operations that the wanted results need; values are numbered, operands first."""

    def __init__(self, program: ClosedJaxpr, wanted: Collection[int]):
        self._numbers = itertools.count()
        self._constants: dict[int, tuple[int, Any]] = {}  # id -> number, constant
        self._operands = [next(self._numbers) for _ in program.jaxpr.invars]
        every, callers = list[InlinedOperation](), list[Any]()

        def operate(equation: Equation, operands: list[int]) -> list[int] | None:
            if called_program(equation) is not None:
                return None
            results = [next(self._numbers) for _ in equation.outvars]
            every.append(
                InlinedOperation(equation, tuple(callers), tuple(operands), tuple(results))
            )
            return results

        options: Any = {"constant": self._constant_number, "callers": callers}
        results = interpret(program, self._operands, operate, **options)
        self._results = {results[index] for index in wanted}
        needed, self.steps = set(self._results), list[InlinedOperation]()
        for step in reversed(every):
            if not needed.isdisjoint(step.results):
                needed.update(step.operands)
                self.steps.insert(0, step)

    def _constant_number(self, value: PyTree) -> int:
        return self._constants.setdefault(id(value), (next(self._numbers), value))[0]

    def run(self, last: int, operands: Sequence[Any]) -> list[Any]:
        """The values computed up to a step that later steps or the results need, by jax."""
        values = {**dict(self._constants.values()), **dict(zip(self._operands, operands))}
        computed = set[int]()
        for step in self.steps[: last + 1]:
            arguments = [values[number] for number in step.operands]
            values.update(zip(step.results, bind_equation(step.equation, arguments)))
            computed.update(step.results)
        later = {number for step in self.steps[last + 1 :] for number in step.operands}
        return [values[number] for number in sorted(computed & (later | self._results))]


class _BisectSearch:
    def __init__(self, program: Program, with_state: bool, end: float):
        self._program = program
        self._end = end
        # Repeated layers are inlined, so that each operation has its own source line.
        traced = program.traced
        self._whole = trace(traced.function, traced.structs, outlined=False)
        wanted = range(len(self._whole.results) if with_state else len(program.output_names))
        self._operations = _Operations(self._whole.program, wanted)

    def found(
        self, apart_after: Callable[[int], str | None]
    ) -> tuple[InlinedOperation, str, int] | None:
        """The step, its difference, and the number of candidates.

        `apart_after` returns the difference after a step: "" for none, None if unknown.
        """
        steps = self._operations.steps
        if not steps:
            return None
        good, bad = -1, len(steps) - 1
        apart = apart_after(bad)
        if not apart:
            return None  # the parts are right, and only the whole is not
        while bad - good > 1 and time.perf_counter() < self._end:
            for middle in _from_the_middle(good, bad):
                difference = apart_after(middle)
                if difference is not None:
                    break
            else:
                break
            if difference:
                bad, apart = middle, difference
            else:
                good = middle
        return steps[bad], apart, bad - good

    def part(self, last: int) -> Program:
        """Returns the program up to a step, with all values that later steps read as results."""

        def function(values: list[Any]) -> list[Any]:
            live = self._operations.run(last, values)
            return [array for value in live for array in _exportable_arrays(value)]

        structs = self._whole.structs
        traced = trace(function, structs, outlined=False)
        if any(not isinstance(size, int) for each in structs for size in each.shape):
            traced = traced.with_function(_with_sizes(traced))
        tree = list(range(len(traced.results)))
        names = tree_names(tree, "part")
        return dataclasses.replace(
            self._program,
            traced=traced,
            output_names=names,
            output_structure=describe_structure(tree, names),
            changed=(),
            trains=False,
        )


def _with_sizes(traced: Traced) -> Callable[[Sequence[Any]], list[Any]]:
    """Returns results of a function traced for symbolic sizes, as jax's export lowers it."""

    @functools.cache
    def exported() -> Any:
        program = traced.with_program(lowerable(traced.program))
        return export_unchecked(program.lowerable, ("cpu",), list(traced.structs))

    return lambda values: exported().call(list(values))


def _exportable_arrays(value: Any) -> list[Any]:
    """Returns a value as arrays of dtypes that every format supports."""
    value = dtypes.store(value)
    return [jnp.real(value), jnp.imag(value)] if jnp.iscomplexobj(value) else [value]


def _from_the_middle(good: int, bad: int) -> list[int]:
    """The numbers between two, from the middle outwards."""
    return sorted(range(good + 1, bad), key=lambda number: abs(number - (good + bad) // 2))
