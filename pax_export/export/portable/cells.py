"""Analyzes the step of a loop as products with weights and elementwise functions.

`recurrent.py` compares it with the steps of recurrent layers. Other values of a step are a
`StepValue` named "other", which occurs in no layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np

from pax_export._foundations.jaxpr import (
    bind_equation,
    called_program,
    inner_programs,
    is_literal,
    jaxpr_of,
)
from pax_export._foundations.types import Array, Atom, DTypeLike, Equation, TracedProgram
from pax_export.export.portable.program import is_static, source_of

#: Operations that return their operand; a conversion does if the dtype does not change.
_SAME = "copy stop_gradient optimization_barrier pvary convert_element_type".split()


@dataclass(frozen=True, eq=False)
class StepValue:
    """A value of a step, with its operands.

    Attributes:
        name: ``"carry"`` and ``"row"`` are operands of the step, ``"joined"`` a concatenation, and
            other names the primitive that computes it.
        of: its operands.
        shape: its shape.
        axis: the axis of its features; the others are batch axes.
        index: its index among the operands.
    """

    name: str
    of: tuple[Any, ...] = ()
    shape: tuple[Any, ...] = ()
    axis: int = -1
    index: int = 0


@dataclass(frozen=True, eq=False)
class Known:
    """An array that is equal in all steps, computed outside of the loop.

    Attributes:
        make: computes it.
        shape: its shape.
        thin: computes it with size 1 along broadcast axes.
        number: its value if all elements are one literal.
    """

    make: Callable[[], Any]
    shape: tuple[Any, ...]
    thin: Callable[[], Any]
    number: float | None = None

    @cached_property
    def array(self) -> Any:
        return self.make()

    def vector(self, axis: int, rank: int) -> Any:
        """Its numbers along an axis; None if others than that differ."""
        thin = self.thin()
        if not thin.ndim:
            return thin.reshape(1)
        if thin.ndim != rank or any(n != 1 for i, n in enumerate(thin.shape) if i != axis):
            return None
        return thin.reshape(-1)


@dataclass(frozen=True, eq=False)
class Affine:
    """A sum of products with weights and a bias.

    Attributes:
        terms: each value with its matrix, ``[features of the value, size]``.
        bias: ``[size]`` or ``[1]``; None without.
        size: the number of features.
        shape: the shape of the value.
        axis: the axis of its features.
    """

    terms: tuple[tuple[StepValue, Any], ...]
    bias: Any
    size: int
    shape: tuple[Any, ...]
    axis: int

    def part(self, begin: int, end: int, shape: tuple[Any, ...]) -> Affine:
        terms = tuple((each, matrix[:, begin:end]) for each, matrix in self.terms)
        bias = self.bias
        if bias is not None and bias.shape[0] != 1:
            bias = bias[begin:end]
        return replace(self, terms=terms, bias=bias, size=end - begin, shape=shape)

    def plus(self, other: Affine, sign: int = 1) -> Affine:
        terms = dict(self.terms)
        for each, matrix in other.terms:
            matrix = matrix if sign > 0 else -matrix
            terms[each] = terms[each] + matrix if each in terms else matrix
        bias = _sum(self.bias, other.bias, sign)
        return replace(self, terms=tuple(terms.items()), bias=bias)

    def shifted(self, bias: Array, sign: int = 1) -> Affine:
        return replace(self, bias=_sum(self.bias, bias, sign))

    def negative(self) -> Affine:
        terms = tuple((each, -matrix) for each, matrix in self.terms)
        bias = None if self.bias is None else -self.bias
        return replace(self, terms=terms, bias=bias)

    def matrix(self, step: StepValue) -> Any:
        return next((matrix for each, matrix in self.terms if each is step), None)

    def biases(self, dtype: DTypeLike) -> Any:
        bias = jnp.zeros(1, dtype) if self.bias is None else self.bias
        return jnp.broadcast_to(bias, (self.size,))


def _sum(one: Any, other: Any, sign: int) -> Any:
    if other is None:
        return one
    other = other if sign > 0 else -other
    return other if one is None else one + other


def _array(make: Callable[[], Any], shape: Sequence[Any], number: float | None = None) -> Known:
    value = Known(make, tuple(shape), lambda: value.array, number)
    return value


def step_results(program: TracedProgram, constants: Sequence[Any], carries: int) -> list[Any]:
    """Returns the results of a step as sums of products and functions.

    Args:
        program: the closed jaxpr of the step.
        constants: the values of its first operands, which all steps share.
        carries: the number of operands that come from the previous step.
    """
    count, invars = len(constants), jaxpr_of(program).invars
    operands: list[Any] = [
        _array(lambda value=value: value, atom.aval.shape) for value, atom in zip(constants, invars)
    ]
    for index, atom in enumerate(invars[count:]):
        name, index = ("carry", index) if index < carries else ("row", index - carries)
        operands.append(StepValue(name, (), atom.aval.shape, atom.aval.ndim - 1, index))
    return _results(program, operands)


def _results(program: TracedProgram, operands: Sequence[Any]) -> list[Any]:
    jaxpr = jaxpr_of(program)
    values = dict(zip(jaxpr.invars, operands))
    for variable, array in zip(jaxpr.constvars, getattr(program, "consts", ())):
        values[variable] = _array(lambda array=array: jnp.asarray(array), variable.aval.shape)
    for equation in jaxpr.eqns:
        inputs = [_read(values, atom) for atom in equation.invars]
        called = called_program(equation)
        with source_of(equation):
            outputs = _result_of(equation, inputs) if called is None else _results(called, inputs)
        values.update(zip(equation.outvars, outputs))
    return [_read(values, atom) for atom in jaxpr.outvars]


def _read(values: dict[Any, Any], atom: Atom) -> Any:
    if not is_literal(atom):
        return values[atom]
    number = None if np.ndim(atom.val) else float(np.real(atom.val))
    return _array(lambda: jnp.asarray(atom.val, atom.aval.dtype), atom.aval.shape, number)


def _result_of(equation: Equation, operands: list[Any]) -> Sequence[Any]:
    name, results = equation.primitive.name, equation.outvars
    if all(isinstance(each, Known) for each in operands) and not equation.effects:
        if not any(True for _ in inner_programs(equation)):
            return _known(equation, operands)
    dtypes = {each.aval.dtype for each in (*equation.invars, *results)}
    rule = _RULES.get(name) if len(dtypes) == 1 else None
    found = None if rule is None else rule(equation, operands)
    return [StepValue("other", (), each.aval.shape) for each in results] if found is None else found


def _known(equation: Equation, operands: Sequence[Known]) -> list[Known]:
    results: list[Any] = []

    def all_results() -> list[Any]:
        if not results:
            with source_of(equation):
                results.extend(bind_equation(equation, [each.array for each in operands]))
        return results

    arrays = [
        _array(lambda at=at: all_results()[at], each.aval.shape)
        for at, each in enumerate(equation.outvars)
    ]
    if equation.primitive.name == "broadcast_in_dim" and len(operands) == 1:
        shape, dimensions = equation.params["shape"], equation.params["broadcast_dimensions"]
        (of,) = operands

        def thin() -> Any:
            inner = of.thin()
            sizes = [1] * len(shape)
            for axis, dimension in enumerate(dimensions):
                sizes[dimension] = inner.shape[axis]
            return inner.reshape(sizes)

        return [Known(arrays[0].make, tuple(shape), thin, of.number)]
    return arrays


def _pieces(value: Any) -> tuple[Any, ...]:
    return value.of if value.name == "joined" else (value,)


def _dot(equation: Equation, operands: Sequence[Any]) -> list[Any] | None:
    ((left, right), batch) = equation.params["dimension_numbers"]
    if any(batch) or len(left) != 1:
        return None
    (x, w), (axis, of_w) = operands, (left[0], right[0])
    if isinstance(x, Known):
        x, w, axis, of_w = w, x, of_w, axis
    first = x is operands[0]
    if not isinstance(x, StepValue) or not isinstance(w, Known) or len(w.shape) != 2:
        return None
    if axis != x.axis or not is_static(w.shape) or x.name == "other":
        return None
    matrix = w.array if of_w == 0 else w.array.T
    begin, terms = 0, []
    for piece in _pieces(x):
        size = piece.shape[piece.axis]
        terms.append((piece, matrix[begin : begin + size]))
        begin += size
    shape = equation.outvars[0].aval.shape
    if len(shape) > 2 or len({id(piece) for piece, _ in terms}) != len(terms):
        return None
    return [Affine(tuple(terms), None, matrix.shape[1], shape, len(shape) - 1 if first else 0)]


def _add(equation: Equation, operands: Sequence[Any]) -> list[Any] | None:
    x, y = operands
    sign = 1 if equation.primitive.name == "add" else -1
    if isinstance(x, Known) and sign > 0:
        x, y = y, x
    if isinstance(x, Affine) and isinstance(y, Affine):
        return [x.plus(y, sign)] if (x.axis, x.size) == (y.axis, y.size) else None
    if isinstance(x, Affine) and isinstance(y, Known):
        vector = y.vector(x.axis, len(x.shape))
        return None if vector is None else [x.shifted(vector, sign)]
    return _function(equation, operands)


def _function(equation: Equation, operands: Sequence[Any]) -> list[Any] | None:
    """Returns an elementwise function of values with the same layout."""
    axes = {each.axis for each in operands if not isinstance(each, Known)}
    if len(axes) != 1 or any(_is_other(each) for each in operands):
        return None
    shape = equation.outvars[0].aval.shape
    return [StepValue(equation.primitive.name, tuple(operands), shape, *axes)]


def _is_other(value: object) -> bool:
    return isinstance(value, StepValue) and value.name == "other"


def _concatenate(equation: Equation, operands: Sequence[Any]) -> list[Any] | None:
    axis, shape = equation.params["dimension"], equation.outvars[0].aval.shape
    if not all(isinstance(each, StepValue) and each.axis == axis for each in operands):
        return None
    if any(_is_other(each) for each in operands):
        return None
    return [StepValue("joined", tuple(p for each in operands for p in _pieces(each)), shape, axis)]


def _parts(value: Any, axis: int, bounds: Sequence[tuple[int, int]], shapes: Any) -> Any:
    if isinstance(value, Affine) and value.axis == axis:
        return [value.part(*each, shape) for each, shape in zip(bounds, shapes)]
    if isinstance(value, StepValue) and value.name in ("logistic", "tanh") and value.axis == axis:
        inner = _parts(value.of[0], axis, bounds, shapes)
        if inner is not None:
            return [StepValue(value.name, (e,), shape, axis) for e, shape in zip(inner, shapes)]
    return None


def _split(equation: Equation, operands: Sequence[Any]) -> list[Any] | None:
    begin, bounds = 0, []
    for size in equation.params["sizes"]:
        bounds.append((begin, begin + int(size)))
        begin += int(size)
    shapes = [each.aval.shape for each in equation.outvars]
    return _parts(operands[0], equation.params["axis"], bounds, shapes)


def _slice(equation: Equation, operands: Sequence[Any]) -> list[Any] | None:
    params, (x,) = equation.params, operands
    shape = equation.outvars[0].aval.shape
    if isinstance(x, Known) or _is_other(x) or any(n != 1 for n in params["strides"] or ()):
        return None
    whole = zip(params["start_indices"], params["limit_indices"], x.shape)
    others = [each for axis, each in enumerate(whole) if axis != x.axis]
    if any(str(begin) != "0" or str(end) != str(size) for begin, end, size in others):
        return None
    bounds = params["start_indices"][x.axis], params["limit_indices"][x.axis]
    return _parts(x, x.axis, [bounds], [shape])


def _transpose(equation: Equation, operands: Sequence[Any]) -> list[Any] | None:
    (x,), shape = operands, equation.outvars[0].aval.shape
    if not isinstance(x, Affine):
        return None
    axis = equation.params["permutation"].index(x.axis)
    return [replace(x, shape=shape, axis=axis)]


_RULES: dict[str, Callable[[Any, Sequence[Any]], Sequence[Any] | None]] = {
    **dict.fromkeys(_SAME, lambda _, operands: operands),
    "dot_general": _dot,
    **dict.fromkeys(("add", "sub"), _add),
    **dict.fromkeys(("mul", "tanh", "logistic", "max"), _function),
    "concatenate": _concatenate,
    "split": _split,
    "slice": _slice,
    "transpose": _transpose,
}
