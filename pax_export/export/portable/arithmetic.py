"""Constant folding: evaluates operations that depend only on known arrays.

It is the last pass, because others leave arithmetic on weights: a folded scale, a transposed
kernel. Files do not grow: a result larger than its operands stays in the program, and so does one
of a large array that the program also reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from pax_export._foundations.jax import is_key
from pax_export._foundations.jaxpr import bind_equation, inner_programs, is_literal
from pax_export._foundations.types import Array, Atom, Equation, Jaxpr
from pax_export.export.portable.program import (
    PortableProgram,
    Weight,
    is_static,
    needed,
    source_of,
    traced,
)

#: Results of up to this size in bytes are computed, however small their operands are.
SMALL = 1024
#: Larger arrays, in bytes, are not stored twice for readers of two forms.
LARGE = 1 << 16
#: Intermediate results of up to this size in bytes may be larger than their operands.
_INTERMEDIATE = 1 << 22
#: Operations that numpy computes as jax does, for these dtypes; compiling takes longer.
_BY_NUMPY = frozenset({"float32", "float64", "int32", "int64"})
#: Operations that only move elements, of any dtype.
MOVES = frozenset("transpose squeeze rev broadcast_in_dim reshape slice concatenate".split())
#: Operations without operands whose results are known only at run time.
_WHEN_RUN = frozenset({"dim_as_value", "platform_index", "axis_index"})
#: Operations that are not evaluated although they are known, because files store the integers.
_STORED = frozenset({"dequantize", "quantized_dot", "quantized_rows"})


def broadcast_array(
    x: Array, *, shape: Sequence[Any], broadcast_dimensions: Sequence[int], **_: object
) -> Any:
    between = [1] * len(shape)
    for axis, dimension in enumerate(broadcast_dimensions):
        between[dimension] = x.shape[axis]
    return np.broadcast_to(x.reshape(between), shape)


_OF_PAIRS = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}
_NUMPY: dict[str, Callable[..., Any]] = {
    "add": lambda x, y, **_: x + y,
    "sub": lambda x, y, **_: x - y,
    "mul": lambda x, y, **_: x * y,
    "neg": lambda x, **_: -x,
    "sqrt": lambda x, **_: np.sqrt(x),
    "rsqrt": lambda x, **_: (1 / np.sqrt(x.astype(np.float64))).astype(x.dtype),
    "square": lambda x, **_: x * x,
    "transpose": lambda x, permutation, **_: x.transpose(permutation),
    "reshape": lambda x, new_sizes, dimensions, **_: (
        x if dimensions is None else x.transpose(dimensions)
    ).reshape(new_sizes),
    "squeeze": lambda x, dimensions, **_: x.squeeze(tuple(dimensions)),
    "rev": lambda x, dimensions, **_: np.flip(x, dimensions),
    "broadcast_in_dim": broadcast_array,
    "concatenate": lambda *xs, dimension, **_: np.concatenate(xs, dimension),
    "slice": lambda x, start_indices, limit_indices, strides: x[
        tuple(map(slice, start_indices, limit_indices, strides or [1] * x.ndim))
    ],
    "select_n": lambda which, *cases: np.choose(which.astype(np.int32), cases),
    "reduce_sum": lambda x, axes, **_: x.sum(tuple(axes), dtype=x.dtype),
    "reduce_and": lambda x, axes, **_: np.bitwise_and.reduce(x, tuple(axes)),
    **{name: lambda x, y, _f=function, **_: _f(x, y) for name, function in _OF_PAIRS.items()},
}


class KnownValues:
    """The values of a program that depend only on its weights and literals.

    Args:
        program: the program.
        spread: the maximum size of a result that only broadcasts, in bytes.
        most: the maximum size of another result that is larger than its operands, in bytes.
    """

    def __init__(self, program: PortableProgram, spread: int = 0, most: int = SMALL):
        self.program = program
        self._spread, self._most = spread, most
        self.given = dict(zip(program.jaxpr.invars, program.weights))
        self._arrays = {variable: weight.array for variable, weight in self.given.items()}
        self._sources = {v: each.sources or (each.name,) for v, each in self.given.items()}
        self.makers: dict[Any, Any] = {}
        for equation in needed(program.jaxpr):
            if self._is_known(equation):
                self.makers.update(dict.fromkeys(equation.outvars, equation))

    def __contains__(self, atom: Atom) -> bool:
        return is_literal(atom) or atom in self._arrays or atom in self.makers

    def forget(self, atoms: Sequence[Any]) -> None:
        """Keeps these, and values computed from them, in the program."""
        gone = set(atoms)
        for variable, equation in list(self.makers.items()):
            read = (atom for atom in equation.invars if not is_literal(atom))
            if variable in gone or not gone.isdisjoint(read):
                gone.add(variable)
                del self.makers[variable]

    def root(self, atom: Atom) -> Any:
        """Returns the largest operand of the program from which a known variable is computed."""
        while atom in self.makers:
            read = [each for each in self.makers[atom].invars if not is_literal(each)]
            if not read:
                break
            atom = max(read, key=_bytes)
        return atom

    def weights_of(self, atom: Atom) -> set[Any]:
        """Returns the weights from which a known variable is computed."""
        seen, left = {atom}, [atom]
        while left:
            maker = self.makers.get(left.pop())
            new = {each for each in (maker.invars if maker else ()) if not is_literal(each)} - seen
            left += new
            seen |= new
        return seen & self.given.keys()

    def _is_known(self, equation: Equation) -> bool:
        if equation.primitive.name in _WHEN_RUN | _STORED or equation.effects:
            return False
        if not all(atom in self for atom in equation.invars):
            return False
        if any(True for _ in inner_programs(equation)):
            return False  # loops and branches are not evaluated
        sizes = []
        for variable in equation.outvars:
            if not (hasattr(variable.aval, "dtype") and is_static(variable.aval.shape)):
                return False
            sizes.append(_bytes(variable))
        operands = {id(a): _bytes(a) for a in equation.invars if not is_literal(a)}
        # Runtimes broadcast by themselves.
        least = self._spread if equation.primitive.name == "broadcast_in_dim" else self._most
        return sum(sizes) <= max(least, sum(operands.values()))

    def array(self, atom: Atom) -> Any:
        """Returns the value of a known variable or a literal."""
        if is_literal(atom):
            return np.asarray(atom.val)
        if atom not in self._arrays:
            equation = self.makers[atom]
            results = computed_equation(equation, [self.array(each) for each in equation.invars])
            self._arrays.update(zip(equation.outvars, results))
        return self._arrays[atom]

    def fixed(self, atom: Atom) -> Any:
        """The value of a known variable or a literal; None if training may change it."""
        is_fixed = is_literal(atom) or self.program.fixed or not any(self.sources(atom))
        return self.array(atom) if is_fixed else None

    def sources(self, atom: Atom) -> tuple[str, ...]:
        """Returns the names of the weights of a known variable, the largest first."""
        if atom not in self._sources:
            read = [each for each in self.makers[atom].invars if not is_literal(each)]
            read.sort(key=_bytes, reverse=True)
            found = [name for each in read for name in self.sources(each) if name]
            self._sources[atom] = tuple(dict.fromkeys(found))
        return self._sources[atom]


def _bytes(variable: Any) -> int:
    dtype, shape = variable.aval.dtype, variable.aval.shape
    return math.prod(shape) * dtype.itemsize if is_static(shape) else 1 << 62


def computed_equation(equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
    """Evaluates an equation on arrays, by numpy if it gives the same results, else by jax."""
    dtypes = {atom.aval.dtype.name for atom in (*equation.invars, *equation.outvars)} - {"bool"}
    function = _NUMPY.get(equation.primitive.name)
    result = equation.outvars[0]
    moves = equation.primitive.name in MOVES and not is_key(result.aval.dtype)
    if function is not None and (moves or (dtypes <= _BY_NUMPY and len(dtypes) < 2)):
        arrays = [np.asarray(each) for each in operands]
        with np.errstate(all="ignore"):
            return [np.asarray(function(*arrays, **equation.params), result.aval.dtype)]
    with jax.ensure_compile_time_eval():  # a pass may be tracing
        return bind_equation(equation, [jax.numpy.asarray(each) for each in operands])


def computed(program: PortableProgram) -> PortableProgram:
    """Returns the program with results of known arrays as additional weights."""
    known, frontier = _frontier(program)
    names: set[str] = {each.name for each in program.weights}
    weights = [_weight(known, atom, names) for atom in frontier]
    order = [*frontier, *program.inputs]
    left = _needed_after(program.jaxpr, set(order))

    def run(*operands: Array) -> list[Any]:
        values = dict(zip(order, operands))
        values.update(zip(program.jaxpr.constvars, program.program.consts))

        def read(atom: Atom) -> Any:
            return atom.val if is_literal(atom) else values[atom]

        for equation in left:
            with source_of(equation):
                results = bind_equation(equation, [read(atom) for atom in equation.invars])
            values.update(zip(equation.outvars, results))
        return [read(atom) for atom in program.jaxpr.outvars]

    return replace(program, program=traced(run, order), weights=tuple(weights))


def _frontier(program: PortableProgram) -> tuple[KnownValues, list[Any]]:
    """Returns the known arrays that unknown operations read, without copies of large weights."""
    # A broadcast array stays in the program; combined with others it is computed.
    bounded, known = KnownValues(program, LARGE), KnownValues(program, LARGE, _INTERMEDIATE)
    while True:
        read = [atom for atom in program.jaxpr.outvars if atom in known]
        for equation in needed(program.jaxpr):
            if not all(variable in known for variable in equation.outvars):
                read.extend(atom for atom in equation.invars if atom in known)
        frontier = list(dict.fromkeys(atom for atom in read if not is_literal(atom)))
        left = _grown(known, bounded, frontier)
        left = left or _copies(known, frontier) or _spread(known, frontier)
        if not left:
            return known, frontier
        known.forget(left)


def _grown(known: KnownValues, bounded: KnownValues, frontier: Sequence[Any]) -> list[Any]:
    """Returns arrays that are larger than the weights from which they are computed."""
    return [
        atom
        for atom in frontier
        if atom not in bounded
        and _bytes(atom) > max(SMALL, sum(map(_bytes, known.weights_of(atom))))
    ]


def _copies(known: KnownValues, frontier: Sequence[Any]) -> list[Any]:
    """Returns large arrays computed from an array that is also read elsewhere."""
    of_root: dict[Any, list[Any]] = {}
    for atom in frontier:
        if _bytes(atom) > LARGE:
            of_root.setdefault(known.root(atom), []).append(atom)
    several = (atoms for atoms in of_root.values() if len(atoms) > 1)
    return [atom for atoms in several for atom in atoms if atom in known.makers]


def _spread(known: KnownValues, frontier: Sequence[Any]) -> list[Any]:
    """Returns the arrays that runtimes broadcast themselves."""
    found = []
    for atom in frontier:
        maker = known.makers.get(atom)
        if maker is not None and maker.primitive.name == "broadcast_in_dim":
            if _bytes(atom) > sum(_bytes(a) for a in maker.invars if not is_literal(a)):
                found.append(atom)
    return found


def _needed_after(jaxpr: Jaxpr, operands: set[Any]) -> list[Any]:
    """The equations that the results of a program need where some variables are operands."""
    used = {atom for atom in jaxpr.outvars if not is_literal(atom)} - operands
    equations = []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not used.isdisjoint(equation.outvars):
            equations.append(equation)
            used.update(a for a in equation.invars if not (is_literal(a) or a in operands))
    return equations[::-1]


def _weight(known: KnownValues, atom: Atom, names: set[str]) -> Weight:
    """Returns a known array as a weight; a computed one is named after its largest source."""
    if atom not in known.makers:
        return known.given[atom]
    sources = known.sources(atom)
    name = ""
    if sources:
        base = name = f"{sources[0]}:folded"
        while name in names:
            name = f"{base}{len(names)}"
        names.add(name)
    return Weight(name, known.array(atom), sources)
