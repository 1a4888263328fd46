"""Rounds arrays between quantized layers once, so that runtimes pass integers on.

A convolution whose outputs have a known range is rounded where it is read, unless its readers
round it. An array that one reader rounds is added rounded as well, as the shortcut of a residual
block. Results of the program stay as they are. Half precision between such layers is computed in
float32: runtimes have neither, and each rounding would end a chain of integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from pax_export._foundations.jax import run_inside
from pax_export._foundations.jaxpr import bind_equation, is_literal, jaxpr_dtypes, jaxpr_primitives
from pax_export._foundations.types import Array, Atom, DTypeLike, Equation, TracedProgram
from pax_export.export.portable import kept
from pax_export.export.portable.arithmetic import KnownValues
from pax_export.export.portable.program import PortableProgram, again, evaluated, traced, uses
from pax_export.precision.quantized import round_with, scale_of_range

#: Products that runtimes compute in integers, and what they are given.
_OF_INTEGERS = frozenset({"dequantize", "quantized_dot", "round_inputs", "round_rows"})
#: Operations on the bits of numbers, and programs that are not ours to change.
_BY_BITS = frozenset(
    "bitcast_convert_type composite ffi_call nextafter pure_callback reduce_precision".split()
)
#: Operations that move elements, or choose among them.
_MOVES = frozenset("transpose reshape squeeze reduce_window_max".split())


def has_half_between(program: TracedProgram) -> bool:
    """Whether a program has products of integers and half precision."""
    is_quantized = not _OF_INTEGERS.isdisjoint(jaxpr_primitives(program))
    return is_quantized and any(map(_is_half, jaxpr_dtypes(program)))


def without_half(program: PortableProgram) -> PortableProgram:
    """The program with float32 in place of half precision, if it has products of integers."""
    if not has_half_between(program.program):
        return program
    dtypes = [getattr(atom.aval, "dtype", None) for atom in program.jaxpr.outvars]

    def run(*operands: Array) -> list[Any]:
        results = _in_float32(program.program, operands)
        return [x.astype(dtype) for x, dtype in zip(results, dtypes)]

    return replace(program, program=traced(run, program.jaxpr.invars))


def _in_float32(program: TracedProgram, operands: Sequence[Any]) -> list[Any]:
    return [*map(_wide, evaluated(program, [*map(_wide, operands)], _operate_in_float32))]


def _operate_in_float32(equation: Equation, operands: list[Any]) -> Sequence[Any]:
    name, params = equation.primitive.name, equation.params
    if name in _BY_BITS:
        inputs = [x.astype(atom.aval.dtype) for x, atom in zip(operands, equation.invars)]
        return [*map(_wide, bind_equation(equation, inputs))]
    operands = [*map(_wide, operands)]
    opened = run_inside(equation, operands, _in_float32)
    if opened is not None:
        return opened
    changed: dict[str, Any] = {
        key: np.dtype(np.float32) for key, each in params.items() if _is_half(each)
    }
    if params.get("dtype") in ("bfloat16", "float16"):  # the name in a `Form`
        changed["dtype"] = "float32"
    if name == "convert_element_type":
        if operands[0].dtype == changed.get("new_dtype", params["new_dtype"]):
            return operands
    return again(equation, operands, **changed)


def _is_half(dtype: DTypeLike | None) -> bool:
    return isinstance(dtype, np.dtype) and dtype in (jnp.bfloat16, jnp.float16)


def _wide(x: Any) -> Any:
    return x.astype(np.float32) if _is_half(getattr(x, "dtype", None)) else x


class _Ranged:
    """An array that is rounded where it is read: with a scale and a zero point, if it is known."""

    def __init__(self, array: Array, low: float, high: float):
        self.array, self.low, self.high = array, low, high


def rounded_between(program: PortableProgram) -> PortableProgram:
    """The program with rounded arrays between layers of integers."""
    names = {equation.primitive.name for equation in program.jaxpr.eqns}
    if not names & {"bound_outputs", "round_inputs"}:
        return program
    return program.rebuilt(_Rounding(program).operate, unwrap=_plain)


def _plain(value: object) -> Any:
    return value.array if isinstance(value, _Ranged) else value


class _Rounding:
    def __init__(self, program: PortableProgram):
        self._known = KnownValues(program)
        self._uses = uses(program.jaxpr)
        self._made: dict[Any, Any] = {}
        #: Variables -> how their first reader rounds them, and the results of that.
        self._scales: dict[Any, tuple[float, int]] = {}
        self._rounded: set[Any] = set()
        for equation in program.jaxpr.eqns:
            scale = self._scale(equation)
            if scale is not None:
                self._scales.setdefault(equation.invars[0], scale)
                self._rounded.add(equation.outvars[0])

    def operate(self, equation: Equation, operands: list[Any]) -> Sequence[Any]:
        name, atoms = equation.primitive.name, equation.invars
        if name == "bound_outputs":
            return [self._ranged(equation, operands)]
        scale = self._scale(equation)
        if scale is not None:
            return [self._once(atoms[0], _plain(operands[0]), scale)]
        (x, *_) = operands or [None]
        if isinstance(x, _Ranged) and self._uses[atoms[0]] == 1:
            ends = _ends_after(equation, x)
            if ends is not None:
                (array,) = bind_equation(equation, [x.array])
                return [_Ranged(array, *ends)]
        together = name == "add" and all(map(self._is_rounded, atoms, operands))
        arrays = [self._read(*each, together) for each in zip(atoms, operands)]
        return bind_equation(equation, arrays)

    def _scale(self, equation: Equation) -> tuple[float, int] | None:
        """Returns the known scale and zero point of a rounding."""
        if equation.primitive.name != "round_inputs":
            return None
        _, *atoms = equation.invars
        if not all(atom in self._known and atom.aval.ndim == 0 for atom in atoms):
            return None
        scale, zero = (self._known.array(atom).item() for atom in atoms)
        return scale, zero

    def _ranged(self, equation: Equation, operands: Sequence[Any]) -> Any:
        y, low, high = operands
        if equation.params["axis"] is not None or not all(map(is_literal, equation.invars[1:])):
            return y
        ends = float(low), float(high)
        return _Ranged(_plain(y), *ends) if all(map(math.isfinite, ends)) else y

    def _is_rounded(self, atom: Atom, operand: object) -> bool:
        if isinstance(operand, _Ranged):
            return True
        return not is_literal(atom) and (atom in self._scales or atom in self._rounded)

    def _read(self, atom: Atom, operand: Any, together: bool) -> Any:
        is_ranged = isinstance(operand, _Ranged)
        if not is_ranged and not (together and atom in self._scales):
            return operand
        scale = self._scales.get(atom) or scale_of_range(operand.low, operand.high)
        return self._once(atom, _plain(operand), scale)

    def _once(self, atom: Atom, array: Array, scale: tuple[float, int]) -> Any:
        if (atom, scale) not in self._made:
            self._made[atom, scale] = round_with(array, *scale)
        return self._made[atom, scale]


def _ends_after(equation: Equation, x: _Ranged) -> tuple[float, float] | None:
    """Returns the range behind an operation that moves elements or clips them; None for others."""
    if equation.primitive.name in _MOVES and len(equation.invars) == 1:
        return x.low, x.high
    name, params = kept.operation(equation)
    if name != "clip":
        return None
    low, high = params.get("low"), params.get("high")
    ends = [x.low, x.high]
    if low is not None:
        ends = [max(each, low) for each in ends]
    if high is not None:
        ends = [min(each, high) for each in ends]
    return ends[0], ends[1]
