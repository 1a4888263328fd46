"""A traced program as a flat list of operations, with calls inlined, that can be cut anywhere."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from pax_export._jaxpr import bind_equation, called_program, interpret
from pax_export._types import PyTree


@dataclass(frozen=True)
class TapeStep:
    """One operation of a tape."""

    equation: Any  # of the program
    callers: tuple[Any, ...]  # enclosing equations, the outermost first
    operands: tuple[int, ...]  # numbers of values read
    results: tuple[int, ...]  # numbers of values made


class Tape:
    """The operations that the wanted results need; values are numbered, operands first."""

    def __init__(self, program: Any, wanted: Collection[int]):
        self._count = 0
        self._held: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}
        operands = [self._new_number() for _ in program.jaxpr.invars]
        played: list[TapeStep] = []
        results = self._play_all(program, operands, played)
        self.operands = tuple(operands)
        self.results = tuple(results[index] for index in sorted(wanted))
        self.steps = self._needed_by(played, self.results)

    def live(self, last: int) -> tuple[int, ...]:
        """Returns the values computed up to a step that later steps or the results need."""
        made = {number for step in self.steps[: last + 1] for number in step.results}
        later = {number for step in self.steps[last + 1 :] for number in step.operands}
        return tuple(sorted(made & (later | set(self.results))))

    def run(self, last: int, operands: Sequence[Any]) -> dict[int, Any]:
        """The values that are `live` after a step, computed by jax."""
        values = self._run_steps(last, operands)
        return {number: values[number] for number in self.live(last)}

    def read(self, steps: Sequence[TapeStep], operands: Sequence[Any]) -> list[list[Any]]:
        """The operands of some steps, computed by jax; a literal is among them."""
        values = self._run_steps(len(self.steps) - 1, operands)
        return [[values[number] for number in step.operands] for step in steps]

    def _run_steps(self, last: int, operands: Sequence[Any]) -> dict[int, Any]:
        values = {**self._held, **dict(zip(self.operands, operands, strict=True))}
        for step in self.steps[: last + 1]:
            given = [values[number] for number in step.operands]
            values.update(zip(step.results, bind_equation(step.equation, given)))
        return values

    def _new_number(self) -> int:
        self._count += 1
        return self._count - 1

    def _constant_number(self, value: PyTree) -> int:
        """Returns the number of a constant array of the program."""
        if id(value) not in self._numbers:
            self._numbers[id(value)] = number = self._new_number()
            self._held[number] = value  # which keeps the id
        return self._numbers[id(value)]

    def _play_all(self, program: Any, given: Sequence[int], played: list[TapeStep]) -> list[int]:
        callers: list[Any] = []

        def operate(equation: Any, operands: list[int]) -> list[int] | None:
            if called_program(equation) is not None:
                return None
            results = [self._new_number() for _ in equation.outvars]
            played.append(TapeStep(equation, tuple(callers), tuple(operands), tuple(results)))
            return results

        return interpret(program, given, operate, constant=self._constant_number, callers=callers)

    def needed_by(self, place: int) -> tuple[TapeStep, ...]:
        """The steps that one of the wanted results needs, by its place among them."""
        return self._needed_by(self.steps, self.results[place : place + 1])

    def _needed_by(
        self, played: Sequence[TapeStep], results: Sequence[int]
    ) -> tuple[TapeStep, ...]:
        used, kept = set(results), []
        for step in reversed(played):
            if not used.isdisjoint(step.results):
                used.update(step.operands)
                kept.append(step)
        return tuple(reversed(kept))
