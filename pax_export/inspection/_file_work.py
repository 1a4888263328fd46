"""How much arithmetic the program in a TFLite or an ONNX file does.

It is gone through operation by operation, with what is known of each array.  Sizes are
numbers or symbols of jax, so counts may be formulas.  What is not known is said.
"""

from __future__ import annotations

import dataclasses
from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from pax_export.inspection._file_counts import CountRule, Piece, free
from pax_export.inspection._file_graph import Fact, Graph, Program
from pax_export.inspection._file_shapes import Call, Shape, ShapeRule, ValueRule, product
from pax_export.inspection._work import Work, counted, number, total

#: Functions that call each other twice, one after the other, would never end.
_MOST_STEPS = 2_000_000
_ONCE = "its body counts once"

#: What is known of arrays, innermost graph first: bodies may see what stands around them.
Maps = Sequence[MutableMapping[Any, Fact]]


@dataclass(frozen=True)
class Rule:
    """The shapes of what an operation gives, and its work."""

    shapes: ShapeRule
    count: CountRule = free
    value: ValueRule | None = None
    #: Of its results: a name, the operand that has it, or what finds it.
    dtype: str | int | Callable[[Call], str] = 0
    #: How many zeros stand around what it gives.
    margin: Callable[[Call], tuple[tuple[int, int], ...]] | None = None


@dataclass(frozen=True)
class Loop:
    """What goes round how often: `given` are the arguments of the body in a round."""

    body: Graph
    given: Sequence[Fact]
    rounds: Any  # None if nobody knows
    #: The results, of what the body gave.
    results: Callable[[Sequence[Fact]], Sequence[Fact]]


@dataclass(frozen=True)
class Language:
    """The operations of a runtime.

    Attributes:
        rules: by the name of an operation.
        loops: by the name, what makes a `Loop` of a call.
        branches: by the name, how many operands stand before those of its branches.
    """

    rules: Mapping[str, Rule]
    loops: Mapping[str, Callable[[Call], Loop]]
    branches: Mapping[str, int]


def work_of_program(
    program: Program, sizes: Mapping[str, Sequence[Any]], language: Language
) -> Work:
    """Counts a call.

    Args:
        program: of the signature.
        sizes: the shapes of its inputs, by name.
        language: of the file.
    """
    shapes = {place: tuple(sizes[name]) for name, place in program.inputs.items() if name in sizes}
    given = [_with_shape(program.graph.facts[each], shapes.get(each)) for each in
             program.graph.inputs]  # fmt: skip
    counting = _Counting(language)
    counting.graph(program.graph, given, 1, ())
    return counting.work


def _with_shape(fact: Fact, shape: Shape | None) -> Fact:
    if shape is None or (fact.shape is not None and len(fact.shape) != len(shape)):
        return fact
    return Fact(shape, fact.dtype)


@dataclass
class _Counting:
    language: Language
    steps: list[int] = field(default_factory=lambda: [0])  # of all that count together
    work: Work = field(default_factory=Work)

    def graph(self, graph: Graph, given: Sequence[Fact], times: Any, around: Maps) -> list[Fact]:
        """Goes through a graph whose inputs are known; what it gives."""
        facts: ChainMap[Any, Fact] = ChainMap({}, graph.facts, *around)
        facts.update(zip(graph.inputs, given))
        for operation in graph.operations:
            self.steps[0] += 1
            if self.steps[0] > _MOST_STEPS:
                raise ValueError("its functions call each other too often to be counted")
            operands = [
                None if each is None else facts.get(each, Fact()) for each in operation.operands
            ]
            declared = [graph.facts.get(each, Fact()) for each in operation.results]
            call = Call(operation, operands)
            found = self._results(call, declared, times, facts.maps)
            facts.update(zip(operation.results, found))
        return [facts.get(each, Fact()) for each in graph.outputs]

    def _results(self, call: Call, declared: Sequence[Fact], times: Any, facts: Maps) -> list[Fact]:
        name = call.operation.name
        if name in self.language.branches:
            given = self._branches(call, self.language.branches[name], times, facts)
        elif name in self.language.loops:
            given = self._loop(call, self.language.loops[name](call), times, facts)
        elif name in self.language.rules:
            return self._one(call, self.language.rules[name], declared, times)
        else:
            self.work.uncounted.add(name)
            given = []
        given = [*given, *[Fact()] * (len(declared) - len(given))]
        return [_together(*each) for each in zip(given, declared)]

    def _one(self, call: Call, rule: Rule, declared: Sequence[Fact], times: Any) -> list[Fact]:
        try:
            shapes: Sequence[Shape | None] = rule.shapes(call)
        except Exception:  # Unknown, what jax has for sizes it cannot compare, files of others
            shapes = []
        try:
            value = rule.value(call) if rule.value else None
        except Exception:  # the same
            value = None
        shapes = [*shapes, *[None] * (len(declared) - len(shapes))]
        dtype = _dtype(call, rule.dtype)
        try:
            margin = rule.margin(call) if rule.margin else ()
        except Exception:  # the same
            margin = ()
        found = [Fact(shape, dtype, value, margin=margin) for shape in shapes]
        results = [_together(*each) for each in zip(found, declared)]
        if value is None:  # arithmetic of sizes is no work on numbers
            self._count(call, rule, results, times)
        return results

    def _count(self, call: Call, rule: Rule, results: Sequence[Fact], times: Any) -> None:
        try:
            pieces = rule.count(call, results)
            for piece in pieces:
                product([size for shape in (*piece.operands, *piece.results) for size in shape])
        except Exception:  # as for shapes
            self.work.uncounted.add(f"{call.operation.name} (of sizes that only a call knows)")
            return
        dtype = next((each.dtype for each in call.operands if each and each.dtype), "")
        for piece in pieces:
            self._add(piece, dtype, times)

    def _add(self, piece: Piece, dtype: str, times: Any) -> None:
        if piece.flops is not None:
            self.work.flops[""] += times * piece.flops
            dtypes = self.work.dtypes[""]
            dtypes[dtype] = dtypes.get(dtype, 0) + times * piece.flops
            return
        made = SimpleNamespace(
            primitive=SimpleNamespace(name=piece.name),
            invars=[_variable(shape, dtype) for shape in piece.operands],
            outvars=[_variable(shape, dtype) for shape in piece.results],
            params=piece.params,
        )
        counted(made, "", times, self.work)

    # --- what holds programs ----------------------------------------------------

    def _branches(self, call: Call, first: int, times: Any, facts: Maps) -> list[Fact]:
        """Of branches the heaviest counts, as for jax's programs."""
        given = [each or Fact() for each in call.operands[first:]]
        tried = []
        for body in call.operation.bodies.values():
            inner = _Counting(self.language, self.steps)
            results = inner.graph(body, given, times, facts)
            tried.append((number(total(inner.work)), inner.work, results))
        if not tried:
            return []
        _, work, results = max(tried, key=lambda each: each[0])
        self._take(work)
        others = [each[2] for each in tried]
        return [_in_common(row) for row in zip(*others)] if len(others) > 1 else results

    def _loop(self, call: Call, loop: Loop, times: Any, facts: Maps) -> list[Fact]:
        rounds = loop.rounds
        if rounds is None:
            self.work.uncounted.add(f"{call.operation.name} ({_ONCE})")
            rounds = 1
        return list(loop.results(self.graph(loop.body, loop.given, times * rounds, facts)))

    def _take(self, work: Work) -> None:
        self.work.uncounted |= work.uncounted
        self.work.flops[""] += total(work)
        self.work.transcendentals[""] += work.transcendentals[""]
        for dtype, flops in work.dtypes[""].items():
            self.work.dtypes[""][dtype] = self.work.dtypes[""].get(dtype, 0) + flops


def _together(found: Fact, declared: Fact) -> Fact:
    """What the rules say and what the file says; the file knows its numbers better."""
    shape = found.shape
    if shape is None or declared.shape is None or len(shape) != len(declared.shape):
        shape = declared.shape if declared.shape is not None else shape
    else:
        shape = tuple(new if size is None else size for size, new in zip(declared.shape, shape))
    return dataclasses.replace(found, shape=shape, dtype=declared.dtype or found.dtype)


def _in_common(facts: Sequence[Fact]) -> Fact:
    """What is known whichever branch was taken."""
    first, *others = facts
    if first.shape is None or any(
        each.shape is None or len(each.shape) != len(first.shape) for each in others
    ):
        return Fact(None, first.dtype)
    columns = zip(*(each.shape or () for each in facts))
    return Fact(tuple(_agreed(column) for column in columns), first.dtype)


def _agreed(sizes: Sequence[Any]) -> Any:
    """The size that all branches give; where one tells no more, that of the others."""
    known = [each for each in sizes if each is not None]
    texts = {str(each) for each in known}
    return known[0] if len(texts) == 1 else None


def _dtype(call: Call, dtype: str | int | Callable[[Call], str]) -> str:
    if isinstance(dtype, int):
        fact = call.operands[dtype] if dtype < len(call) else None
        return fact.dtype if fact else ""
    return dtype if isinstance(dtype, str) else dtype(call)


def _variable(shape: Shape, dtype: str) -> Any:
    return SimpleNamespace(aval=SimpleNamespace(shape=shape, dtype=dtype))
