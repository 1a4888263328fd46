"""Detects state that a function updates and drops, such as statistics of third-party nets.

It looks in the traced program for keys that no input affects, and new values that no result uses.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pax_export._jax import needed_part, scan_operands
from pax_export._jaxpr import called_program, inner_programs, interpret, is_literal
from pax_export._types import Equation, Jaxpr, PyTree, TracedProgram
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.source_lines import Chain, source_text

#: Operations that draw random numbers, and how many of their operands are the key.
DRAWS = {"random_bits": 1, "random_gamma": 1, "rng_bit_generator": 1, "threefry2x32": 2}
#: How many numbers of 32 bits the data of a key has.
_KEY_SIZES = (2, 4)


@dataclass(frozen=True)
class Dropped:
    """State that a call changes and drops."""

    keys: dict[str, str]  # name -> line that draws from the key
    values: dict[str, str]  # recomputed leaves by name


def dropped_state(program: Any, leaves: Sequence[str], assigned: Collection[int]) -> Dropped:
    """State that a traced function drops; `assigned` leaves differ in each call."""
    flow = _Dependencies(program, len(leaves))
    varies = flow.inputs | _union_of_bits(1 << place for place in assigned)
    live = _union_of_bits(flow.results(needed_part(program)))
    keys: dict[str, str] = {}
    for origins, chain in flow.draws.values():
        if not origins & varies:
            for place in flow.places(origins):
                if _is_key(flow.avals[place]):
                    keys.setdefault(_leaf_name(leaves, place, "a key"), source_text(chain))
    values: dict[str, str] = {}
    flow.results(program.jaxpr)
    for origins, aval, chain in flow.unused:
        if origins & flow.inputs:
            for place in flow.places(origins & ~live & ~flow.inputs):
                leaf = flow.avals[place]
                if (leaf.shape, leaf.dtype) == (aval.shape, aval.dtype):
                    values.setdefault(_leaf_name(leaves, place, "an array"), source_text(chain))
    return Dropped(keys, values)


def made_of_inputs(program: Any, leaves: int) -> list[bool]:
    """Returns the results of a program that depend on inputs (the operands after its leaves)."""
    flow = _Dependencies(program, leaves)
    return [bool(origins & flow.inputs) for origins in flow.results(program.jaxpr)]


def _leaf_name(leaves: Sequence[str], place: int, what: str) -> str:
    return leaves[place] if place < len(leaves) else f"{what} that the function closes over"


class _Dependencies:
    """The operands and constants on which each value of a program depends, as bits."""

    def __init__(self, program: Any, leaves: int):
        self.avals: list[Any] = [each.aval for each in program.jaxpr.invars]
        count = len(self.avals)
        self.inputs = (1 << count) - (1 << leaves)
        self.draws: dict[tuple[int, ...], tuple[int, Chain]] = {}
        #: Values that nothing reads, with their dependencies.
        self.unused: list[tuple[int, Any, Chain]] = []
        self._read = _read_variables(program)
        self._constants = dict(zip(program.jaxpr.constvars, getattr(program, "consts", ())))
        #: By id: the bit of a constant, and itself, which keeps the id.
        self._held: dict[int, tuple[int, Any]] = {}

    def results(self, jaxpr: Jaxpr) -> list[int]:
        """Returns the dependencies of each result of a program, or of a part of it."""
        self.unused.clear()
        given = [1 << index for index in range(len(jaxpr.invars))]
        if getattr(jaxpr, "consts", ()):  # since jax 0.12 a jaxpr may have them itself
            return self._run(jaxpr, given, ())
        held = [self._constant_bit(self._constants.get(each)) for each in jaxpr.constvars]
        return self._run(jaxpr, [*held, *given], ())

    def places(self, origins: int) -> list[int]:
        """The operands and constants of these bits, by number."""
        return [place for place in range(len(self.avals)) if origins >> place & 1]

    def _constant_bit(self, value: PyTree) -> int:
        """Returns the bit of a constant array; 0 for scalars, which are literals."""
        if not hasattr(value, "shape") or not (math.prod(value.shape) > 1 or _is_key(value)):
            return 0
        if id(value) not in self._held:
            self._held[id(value)] = 1 << len(self.avals), value
            self.avals.append(value)
        return self._held[id(value)][0]

    def _run(self, program: TracedProgram, given: Sequence[int], callers: Chain) -> list[int]:
        def operate(equation: Equation, operands: list[int]) -> list[int]:
            chain = (*callers, equation)
            if size := DRAWS.get(equation.primitive.name):
                place = tuple(map(id, chain))
                before = self.draws.get(place, (0, chain))[0]
                self.draws[place] = before | _union_of_bits(operands[:size]), chain
            results = self._run_equation(equation, operands, chain)
            found = zip(equation.outvars, results)
            self.unused += [(x, each.aval, chain) for each, x in found if each not in self._read]
            return results

        return interpret(program, given, operate, constant=self._constant_bit)

    def _run_equation(self, equation: Equation, given: list[int], chain: Chain) -> list[int]:
        name, parameters = equation.primitive.name, equation.params
        called = called_program(equation)
        if called is not None and len(_operands_of(called)) == len(given):
            return self._run(called, given, chain)
        if name == "scan":
            constants, carry, _ = map(len, scan_operands(parameters, given))
            within = slice(constants, constants + carry)
            return self._run_loop(parameters["jaxpr"], given, within, chain)
        if name == "while":
            condition, body = parameters["cond_nconsts"], parameters["body_nconsts"]
            inside = given[condition:]
            found = self._run_loop(
                parameters["body_jaxpr"], inside, slice(body, len(inside)), chain
            )
            ends = self._run(parameters["cond_jaxpr"], [*given[:condition], *found], chain)
            return [each | _union_of_bits(ends) for each in found]
        if name == "cond":
            branches = [self._run(each, given[1:], chain) for each in parameters["branches"]]
            return [given[0] | _union_of_bits(each) for each in zip(*branches)]
        every = _union_of_bits(given)
        for inner in inner_programs(equation):
            every |= _union_of_bits(self._run(inner, [every] * len(_operands_of(inner)), chain))
        return [every] * len(equation.outvars)

    def _run_loop(self, body: Any, given: list[int], carry: slice, chain: Chain) -> list[int]:
        """Iterates a loop body until the dependencies of its carry do not change."""
        while True:
            results = self._run(body, given, chain)
            new = [old | found for old, found in zip(given[carry], results)]
            if new == given[carry]:
                return results
            given = [*given[: carry.start], *new, *given[carry.stop :]]


def _read_variables(program: TracedProgram) -> set[Any]:
    """The variables that a program, or one in it, reads or returns."""
    jaxpr = getattr(program, "jaxpr", program)
    atoms = (*jaxpr.outvars, *(atom for each in jaxpr.eqns for atom in each.invars))
    found = {atom for atom in atoms if not is_literal(atom)}
    inner = (each for equation in jaxpr.eqns for each in inner_programs(equation))
    return found.union(*map(_read_variables, inner))


def _operands_of(program: TracedProgram) -> Sequence[Any]:
    return getattr(program, "jaxpr", program).invars


def _union_of_bits(bits: Iterable[int]) -> int:
    found = 0
    for each in bits:
        found |= each
    return found


def _is_key(value: PyTree) -> bool:
    """Returns whether an array, or its type, is a random key or may be key data."""
    if dtypes.is_key(value.dtype):
        return True
    return value.dtype == jnp.uint32 and value.shape[-1:] in {(size,) for size in _KEY_SIZES}
