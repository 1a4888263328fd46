"""The operation behind an error: the first whose result differs from jax's, or a refused one.

The model is exported in parts that end with an operation and return all values that later
operations read. Each part that contains the fault is wrong, so halving finds it in log2 exports;
see docs/decisions/parting.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pax_export._foundations.errors import PaxError
from pax_export._foundations.jaxpr import bind_equation, called_program, interpret
from pax_export._foundations.types import Array, ClosedJaxpr, Equation
from pax_export.core import Module, label_modules, named_modules, traced_anew
from pax_export.export.artifact.options import Request
from pax_export.export.lowering.lower import export_unchecked
from pax_export.export.pipeline.format_exporter import FormatExporter
from pax_export.export.pipeline.phases import scratch_path
from pax_export.export.portable.any_size import lowerable
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.exportable import Model
from pax_export.export.tracing.names import describe_structure, tree_names
from pax_export.export.tracing.programs import Program
from pax_export.export.tracing.source_lines import (
    Chain,
    join_texts,
    module_path,
    operations,
    source_text,
)
from pax_export.export.tracing.traced import Traced, trace


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


def first_divergences(
    program: Program,
    calls: int,
    test: Callable[[Program], Sequence[str | None]],
    end: float,
    kinds: Mapping[str, str],
    with_state: bool = False,
) -> list[Divergence | None]:
    """The operation after which jax and an export begin to differ, for each of some calls.

    `test` exports a part of the program, and returns the difference of each call: "" for none, None
    if unknown. After `end` no further part is exported. `kinds` has the classes of modules by path;
    `with_state` searches new state, too.
    """
    search = _BisectSearch(program, with_state, end)
    known: dict[int, Sequence[str | None]] = {}

    def apart(call: int, last: int) -> str | None:
        if last not in known:
            try:
                known[last] = test(search.part(last))
            except Exception:  # of the format or a runtime; a mistake costs the operation's name
                known[last] = [None] * calls
        return known[last][call]

    found = [search.found(functools.partial(apart, call)) for call in range(calls)]
    return [None if each is None else _divergence(*each, kinds) for each in found]


def _divergence(
    step: InlinedOperation, apart: str, candidates: int, kinds: Mapping[str, str]
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

    def _constant_number(self, value: Array) -> int:
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


def _exportable_arrays(value: Array) -> list[Any]:
    """Returns a value as arrays of dtypes that every format supports."""
    value = dtypes.store(value)
    return [jnp.real(value), jnp.imag(value)] if jnp.iscomplexobj(value) else [value]


def _from_the_middle(good: int, bad: int) -> list[int]:
    """The numbers between two, from the middle outwards."""
    return sorted(range(good + 1, bad), key=lambda number: abs(number - (good + bad) // 2))


# --- the module of a refused operation --------------------------------------


def with_paths(model: Model) -> tuple[Model, dict[str, str]]:
    """Returns a model whose modules record their paths in traces, and their classes by path."""
    if not isinstance(model, Module):
        return model, {}
    kinds = {path: type(each).__name__ for path, each in named_modules(model)}
    return label_modules(model), kinds


def name_modules(error: PaxError, exporter: FormatExporter, request: Request) -> None:
    """Adds to an error about operations their modules."""
    chains = operations(error)
    if not chains:
        return
    # It only improves a message: a failure here must not hide the error.
    with contextlib.suppress(Exception):
        net, kinds = with_paths(request.model)
        if kinds:
            labeled = dataclasses.replace(request, model=net)
            chains = _refused_again(error, exporter, labeled) or chains
        named = [(_module_text(chain, kinds), chain) for chain in chains]
        error.where = join_texts(
            ", ".join(filter(None, (n, source_text(chain)))) for n, chain in named
        )


def _refused_again(
    error: PaxError, exporter: FormatExporter, request: Request
) -> tuple[Chain, ...]:
    """Returns the operations of the error of another export, if it is the same error."""
    try:
        with traced_anew(), scratch_path(exporter.format) as path:
            exporter.lower(*exporter.trace(request), request).write(path)
    except PaxError as other:
        if other.what == error.what:
            return operations(other)
    return ()


def _module_text(chain: Chain, kinds: Mapping[str, str]) -> str:
    """Formats ``encoder.pool: Pool``; or another library's names of its modules."""
    path = module_path(chain)
    return ": ".join(filter(None, (path, kinds.get(path, ""))))
