"""Detects state that a function updates and drops, such as statistics of third-party nets.

It looks in the traced program for keys that no input affects, and for moving averages that no
result uses. Other unused values that are computed from an array may be outputs of an unused part.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from pax_export._foundations.jax import needed_part, scan_operands
from pax_export._foundations.jaxpr import called_program, inner_programs, interpret, jaxpr_of
from pax_export._foundations.types import (
    Array,
    Aval,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    TracedProgram,
)
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


def dropped_state(
    program: ClosedJaxpr, leaves: Sequence[str], assigned: Collection[int]
) -> Dropped:
    """State that a traced function drops; `assigned` leaves differ in each call."""
    flow = _Dependencies(program, len(leaves))
    varies = flow.inputs | _union_of_bits(1 << index for index in assigned)
    live = _union_of_bits(flow.results(needed_part(program)))
    keys: dict[str, str] = {}
    for origins, chain in flow.draws.values():
        if not origins & varies:
            for index in flow.indices_of(origins):
                if _is_key(flow.avals[index]):
                    keys.setdefault(_leaf_name(leaves, index, "a key"), source_text(chain))
    values: dict[str, str] = {}
    for origin, aval, chain in flow.averages(program):
        for index in flow.indices_of(origin & ~live & ~flow.inputs):
            if flow.avals[index].shape == aval.shape:
                values.setdefault(_leaf_name(leaves, index, "an array"), source_text(chain))
    return Dropped(keys, values)


def depend_on_inputs(program: ClosedJaxpr, leaves: int) -> list[bool]:
    """Returns the results of a program that depend on inputs (the operands after its leaves)."""
    flow = _Dependencies(program, leaves)
    return [bool(origins & flow.inputs) for origins in flow.results(jaxpr_of(program))]


def passed_on(program: ClosedJaxpr) -> list[int | None]:
    """Returns for each result of a program the operand that it is, or None for a new value.

    Jitted functions of flax.nnx return all of the state that they are given.
    """

    def operate(equation: Equation, operands: list[int | None]) -> list[int | None] | None:
        name, parameters = equation.primitive.name, equation.params
        if called_program(equation) is not None:
            return None
        if name in _COPIES:
            return operands
        if name == "cond":
            branches = [run(each, operands[1:]) for each in parameters["branches"]]
            return [each[0] if len({*each}) == 1 else None for each in zip(*branches)]
        if name == "scan":
            constants, carry, inputs = scan_operands(parameters, operands)
            return loop(parameters["jaxpr"], constants, carry, inputs)
        if name == "while":
            first = parameters["cond_nconsts"]
            last = first + parameters["body_nconsts"]
            return loop(parameters["body_jaxpr"], operands[first:last], operands[last:], [])
        return [None for _ in equation.outvars]

    def loop(body: TracedProgram, constants: list, carry: list, inputs: list) -> list[int | None]:
        """A carry is passed on if the body returns it at its own place."""
        while True:
            results = run(body, [*constants, *carry, *inputs])
            same = [old if new == old else None for old, new in zip(carry, results)]
            if same == carry:
                return results
            carry = same

    run = partial(interpret, operate=operate, constant=lambda value: None)
    return run(program, range(len(program.jaxpr.invars)))


#: Operations that return their operands.
_COPIES = frozenset({"copy", "copy_p", "optimization_barrier", "sharding_constraint"})


def _leaf_name(leaves: Sequence[str], index: int, what: str) -> str:
    return leaves[index] if index < len(leaves) else f"{what} that the function closes over"


class _Dependencies:
    """The operands and constants on which each value of a program depends, as bits."""

    def __init__(self, program: ClosedJaxpr, leaves: int):
        self.avals: list[Any] = [each.aval for each in program.jaxpr.invars]
        count = len(self.avals)
        self.inputs = (1 << count) - (1 << leaves)
        self.draws: dict[tuple[int, ...], tuple[int, Chain]] = {}
        self._constants = dict(zip(program.jaxpr.constvars, getattr(program, "consts", ())))
        #: By id: the bit of a constant, and itself, which keeps the id.
        self._constant_bits: dict[int, tuple[int, Any]] = {}

    def results(self, jaxpr: Jaxpr) -> list[int]:
        """Returns the dependencies of each result of a program, or of a part of it."""
        return self._run(jaxpr, self._operand_bits(jaxpr), ())

    def _operand_bits(self, jaxpr: Jaxpr) -> list[int]:
        operands = [1 << index for index in range(len(jaxpr.invars))]
        if getattr(jaxpr, "consts", ()):  # since jax 0.12 a jaxpr may have them itself
            return operands
        return [
            *(self._constant_bit(self._constants.get(each)) for each in jaxpr.constvars),
            *operands,
        ]

    def averages(self, program: ClosedJaxpr) -> list[tuple[int, Any, Chain]]:
        """Returns the moving averages of arrays: bit of the old values, type, operation."""
        found = []

        def constant(value: Array) -> _Sum:
            bit = self._constant_bit(value)
            return _Sum({bit: 1.0}) if bit else _Sum({_ONE: float(np.real(np.mean(value)))})

        def operate(equation: Equation, operands: list[_Sum]) -> list[_Sum] | None:
            name = equation.primitive.name
            if called_program(equation) is not None:
                return None
            if name == "scan":
                constants, carry, inputs = scan_operands(equation.params, operands)
                start = [_Sum() for _ in carry]
                callers.append(equation)
                stacked = run(equation.params["jaxpr"], [*constants, *start, *inputs])[len(carry) :]
                callers.pop()
                results = [*start, *stacked]
            else:
                results = [_sum_of(equation, operands) for _ in equation.outvars]
            for variable, each in zip(equation.outvars, results):
                chain = (*callers, equation)
                found.extend((bit, variable.aval, chain) for bit in each.averaged())
            return results

        callers: list[Equation] = []
        run = partial(interpret, operate=operate, constant=constant, callers=callers)
        bits = self._operand_bits(jaxpr_of(program))
        run(program.jaxpr, [_Sum({bit: 1.0}) if bit else _Sum() for bit in bits])
        return found

    def indices_of(self, origins: int) -> list[int]:
        """The operands and constants of these bits, by number."""
        return [index for index in range(len(self.avals)) if origins >> index & 1]

    def _constant_bit(self, value: Array | None) -> int:
        """Returns the bit of a constant array; 0 for scalars, which are literals."""
        if (
            value is None
            or not hasattr(value, "shape")
            or not (math.prod(value.shape) > 1 or _is_key(value))
        ):
            return 0
        if id(value) not in self._constant_bits:
            self._constant_bits[id(value)] = 1 << len(self.avals), value
            self.avals.append(value)
        return self._constant_bits[id(value)][0]

    def _run(self, program: TracedProgram, bits: Sequence[int], callers: Chain) -> list[int]:
        def operate(equation: Equation, operands: list[int]) -> list[int]:
            chain = (*callers, equation)
            if size := DRAWS.get(equation.primitive.name):
                identity = tuple(map(id, chain))
                before = self.draws.get(identity, (0, chain))[0]
                self.draws[identity] = before | _union_of_bits(operands[:size]), chain
            return self._run_equation(equation, operands, chain)

        return interpret(program, bits, operate, constant=self._constant_bit)

    def _run_equation(self, equation: Equation, bits: list[int], chain: Chain) -> list[int]:
        name, parameters = equation.primitive.name, equation.params
        called = called_program(equation)
        if called is not None and len(_operands_of(called)) == len(bits):
            return self._run(called, bits, chain)
        if name == "scan":
            constants, carry, _ = map(len, scan_operands(parameters, bits))
            within = slice(constants, constants + carry)
            return self._run_loop(parameters["jaxpr"], bits, within, chain)
        if name == "while":
            condition, body = parameters["cond_nconsts"], parameters["body_nconsts"]
            inside = bits[condition:]
            found = self._run_loop(
                parameters["body_jaxpr"], inside, slice(body, len(inside)), chain
            )
            ends = self._run(parameters["cond_jaxpr"], [*bits[:condition], *found], chain)
            return [each | _union_of_bits(ends) for each in found]
        if name == "cond":
            branches = [self._run(each, bits[1:], chain) for each in parameters["branches"]]
            return [bits[0] | _union_of_bits(each) for each in zip(*branches)]
        every = _union_of_bits(bits)
        for inner in inner_programs(equation):
            every |= _union_of_bits(self._run(inner, [every] * len(_operands_of(inner)), chain))
        return [every] * len(equation.outvars)

    def _run_loop(
        self, body: TracedProgram, bits: list[int], carry: slice, chain: Chain
    ) -> list[int]:
        """Iterates a loop body until the dependencies of its carry do not change."""
        while True:
            results = self._run(body, bits, chain)
            new = [old | found for old, found in zip(bits[carry], results)]
            if new == bits[carry]:
                return results
            bits = [*bits[: carry.start], *new, *bits[carry.stop :]]


#: The term of a constant number in a `_Sum`, which is the bit of nothing.
_ONE = 0
#: The number of terms after which a sum counts as one value.
_MOST_TERMS = 64
#: How far rounded factors of an average, 0.9 and 0.1 in bfloat16, may be from 1 together.
_ROUNDED = 0.005
#: Operations that leave the numbers as they are.
_MOVES = frozenset(
    "broadcast_in_dim convert_element_type copy copy_p expand_dims reduce_precision reshape "
    "sharding_constraint squeeze transpose".split()
)


class _Sum(dict[int | object, float]):
    """A value as a sum of others with numbers as factors: bits of arrays, `_ONE`, or any value."""

    def __init__(self, terms: Mapping[int | object, float] | None = None):
        super().__init__({object(): 1.0} if terms is None or len(terms) > _MOST_TERMS else terms)

    def times(self, factor: float) -> _Sum:
        return _Sum({term: factor * each for term, each in self.items()})

    def plus(self, other: _Sum) -> _Sum:
        return _Sum(
            {term: self.get(term, 0.0) + other.get(term, 0.0) for term in {**self, **other}}
        )

    def averaged(self) -> list[int]:
        """Returns the arrays of which this is a moving average, ``0.9 * old + 0.1 * new``."""
        if abs(sum(self.values()) - 1) > _ROUNDED:
            return []
        return [term for term in self.arrays() if 0 < self[term] < 1]

    def arrays(self) -> list[int]:
        return [term for term in self if isinstance(term, int) and term != _ONE]


def _sum_of(equation: Equation, operands: Sequence[_Sum]) -> _Sum:
    """Returns the result of an operation; a new term if it is not linear."""
    name = equation.primitive.name
    first, *others = operands or (_Sum(),)
    if name in _MOVES:
        return first
    if name == "neg":
        return first.times(-1)
    if name in ("add", "add_any", "sub"):
        return first.plus(others[0].times(-1 if name == "sub" else 1))
    if name in ("mul", "div"):
        for one, factor in ((first, others[0]), (others[0], first))[: 2 if name == "mul" else 1]:
            number = factor.get(_ONE, 0.0)
            if [*factor] == [_ONE] and number and (name == "mul" or one.arrays()):
                return one.times(number if name == "mul" else 1 / number)
    if name == "select_n":  # of a first call and others
        return next((each for each in others if each.arrays()), _Sum())
    return _Sum()


def _operands_of(program: ClosedJaxpr) -> Sequence[Any]:
    return jaxpr_of(program).invars


def _union_of_bits(bits: Iterable[int]) -> int:
    found = 0
    for each in bits:
        found |= each
    return found


def _is_key(value: Array | Aval) -> bool:
    """Returns whether an array, or its type, is a random key or may be key data."""
    if dtypes.is_key(value.dtype):
        return True
    return value.dtype == jnp.uint32 and value.shape[-1:] in {(size,) for size in _KEY_SIZES}
