"""Finds attention, two products with a softmax between them, which torch computes in one call.

As in `portable.patterns`, only the arithmetic is matched. Scores may be scaled, have a bias, and be
masked by a large negative number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pax_export._foundations.jaxpr import bind_equation, is_literal
from pax_export._foundations.types import Atom, Equation, Size, Var
from pax_export.export.portable import PortableProgram, kept
from pax_export.export.portable.graph import Producers, is_one
from pax_export.export.portable.program import with_bodies
from pax_export.export.portable.sizes import same_shape

#: A score of at most this has no weight beside any other.
_LOWEST = -1e9
#: torch's derivative of scores beyond this is wrong: it needs the logarithm of a sum after them.
_MODERATE = 1e6
#: For each axis of an array the axis of another, or None for an axis of size 1.
Axes = Sequence[int | None]


def attention_kept(program: PortableProgram, trains: bool) -> PortableProgram:
    """Returns the program with attention as one call, also in loops and branches."""
    finder = _Finder(program, _MODERATE if trains else math.inf)
    found = {}
    for equation in program.jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            found[equation.outvars[0]] = finder.attention_of(equation)
    values: dict[Var, jax.Array] = {}
    keep = partial(attention_kept, trains=trains)

    def operate(equation: Equation, operands: list[jax.Array]) -> Sequence[jax.Array]:
        values.update((a, x) for a, x in zip(equation.invars, operands) if not is_literal(a))
        match = found.get(equation.outvars[0]) if equation.outvars else None
        if match is None:
            return bind_equation(with_bodies(equation, keep), operands)
        return [match.as_call(values)]

    return program.rebuilt(operate)


def weigh_values(
    query: jax.Array, key: jax.Array, value: jax.Array, *bias: jax.Array, scale: float
) -> jax.Array:
    """Attention of arrays of four axes: batch, heads, places and features.

    Returns the places before the heads, the order in memory of torch's result.
    """
    scores = query @ key.swapaxes(2, 3) * scale
    return (jax.nn.softmax(scores + bias[0] if bias else scores) @ value).swapaxes(1, 2)


class _Grouped(NamedTuple):
    """An array whose axes become four, each from a group of its own ones."""

    array: Var
    groups: Sequence[Axes]

    def group_sizes(self, values: dict[Var, jax.Array]) -> list[list[Size]]:
        own = values[self.array].shape
        return [[1 if axis is None else own[axis] for axis in group] for group in self.groups]

    def in_four(
        self, values: dict[Var, jax.Array], sizes: Sequence[Sequence[Size]] = ()
    ) -> jax.Array:
        """The array; in a group of which it has some axes, it is broadcast to the sizes."""
        x = values[self.array]
        order = [axis for group in self.groups for axis in group if axis is not None]
        x = jnp.transpose(x, [*order, *(axis for axis in range(x.ndim) if axis not in order)])
        shape = self.group_sizes(values)
        mixed = [None in group and any(axis is not None for axis in group) for group in self.groups]
        if any(mixed):
            wide = [full if each else own for each, full, own in zip(mixed, sizes, shape)]
            x = lax.reshape(x, [size for each in shape for size in each])
            x = jnp.broadcast_to(x, [size for each in wide for size in each])
            shape = wide
        return lax.reshape(x, [math.prod(each) for each in shape])


class _Scores(NamedTuple):
    """The operand of a softmax; `axes` are those of the result of the product."""

    product: Equation
    axes: Axes
    scale: float = 1.0
    bias: tuple[Var, Axes] | None = None
    mask: tuple[Var, Axes] | None = None
    lowest: float = 0.0
    is_inverse: bool = False  # whether the mask is True where a score is masked


class _Attention(NamedTuple):
    query: _Grouped
    key: _Grouped
    value: _Grouped
    bias: _Grouped | None
    mask: _Grouped | None
    scores: _Scores
    order: Sequence[int]  # of the axes of the result

    def as_call(self, values: dict[Var, jax.Array]) -> jax.Array:
        query, key, value = (e.in_four(values) for e in (self.query, self.key, self.value))
        sizes, columns = self.query.group_sizes(values)[:3], self.value.group_sizes(values)[3]
        wide = [*sizes, [key.shape[2]]]
        bias = None if self.bias is None else self.bias.in_four(values, wide)
        if self.mask is not None:
            mask = self.mask.in_four(values, wide)
            mask = ~mask if self.scores.is_inverse else mask
            # Queries that see no key weigh all alike, and have no slope: those of zeros. torch's
            # derivative needs scores near 0, also there.
            sees = jnp.any(mask, -1, keepdims=True)
            query = jnp.where(sees, query, 0)
            zero, lowest = (jnp.asarray(each, query.dtype) for each in (0, self.scores.lowest))
            bias = jnp.where(sees & ~mask, lowest, zero if bias is None else
                             jnp.where(mask, bias, zero))  # fmt: skip
        call = lax.composite(weigh_values, f"{kept.PREFIX}attention")
        operands = (query, key, value) if bias is None else (query, key, value, bias)
        found = call(*operands, scale=float(self.scores.scale)).swapaxes(1, 2)
        shape = [size for each in (*sizes, columns) for size in each]
        return jnp.transpose(lax.reshape(found, shape), self.order)


class _Finder:
    def __init__(self, program: PortableProgram, limit: float):
        self._graph, self._limit = Producers(program), limit
        jaxpr = program.jaxpr
        self._arrays = dict(zip(jaxpr.invars, program.weights))
        self._makers = {out: each for each in jaxpr.eqns for out in each.outvars}
        read = [*jaxpr.outvars, *(atom for each in jaxpr.eqns for atom in each.invars)]
        self._uses = Counter(atom for atom in read if not is_literal(atom))
        # Each variable is looked at once, however many ways lead to it.
        self._scores_of: dict[Atom, _Scores | None] = {}
        self._moderate: dict[Atom, bool] = {}

    def attention_of(self, equation: Equation) -> _Attention | None:
        """The attention whose second product an equation is."""
        for side in (0, 1):
            weights, axes = self._turned(equation.invars[side])
            softmax = self._made_by(weights, "composite")
            if softmax is None or kept.operation(softmax)[0] != "softmax":
                continue
            is_read_once = all(self._uses[each] == 1 for each in (equation.invars[side], weights))
            scores = self._scores(softmax.invars[0])
            if scores is not None and is_read_once:
                column = kept.operation(softmax)[1]["axis"]
                return _joined(equation, side, axes, scores, column)
        return None

    def _made_by(self, atom: Atom, *names: str) -> Equation | None:
        """The equation that makes a variable; not through `stop_gradient`."""
        is_itself = not is_literal(atom) and self._graph.same(atom) is atom
        return self._graph.maker(atom, *names) if is_itself else None

    def _turned(self, atom: Atom) -> tuple[Atom, Axes]:
        """The array before it was transposed, and axes of size 1 were added or removed."""
        axes: Axes = range(atom.aval.ndim)
        while True:
            equation = self._made_by(atom, "transpose", "reshape", "squeeze", "broadcast_in_dim")
            inner = None if equation is None else _axes_before(equation)
            if equation is None or inner is None or self._uses[atom] > 1:
                return atom, axes
            axes = [None if axis is None else inner[axis] for axis in axes]
            atom = equation.invars[0]

    def _scores(self, atom: Atom) -> _Scores | None:
        if is_literal(atom):
            return None
        if atom not in self._scores_of:
            self._scores_of[atom] = self._find_scores(atom)
        return self._scores_of[atom]

    def _find_scores(self, atom: Atom) -> _Scores | None:
        atom, axes = self._turned(atom)
        equation = self._made_by(atom, "dot_general", "select_n", "add", "mul", "div")
        if equation is None:
            return None
        name, operands = equation.primitive.name, equation.invars
        if name == "dot_general":
            return _Scores(equation, axes)
        if name == "select_n":
            which, *cases = operands
            for position, case in enumerate(cases):
                lowest = self._graph.scalar(cases[1 - position]) if len(cases) == 2 else None
                inner = None if lowest is None else self._scores(case)
                is_lowest = lowest is not None and -math.inf < lowest <= _LOWEST
                if inner is not None and is_lowest and inner.mask is None and which.aval.ndim:
                    thin, positions = self._graph.unspread(which)
                    back = {position: axis for axis, position in enumerate(positions)}
                    of_mask = [None if axis is None else back.get(axis) for axis in axes]
                    return _under(inner, axes)._replace(
                        mask=(thin, of_mask), lowest=lowest, is_inverse=position == 0
                    )
            return None
        for one, other in (operands, operands[::-1])[: 1 if name == "div" else 2]:
            number, inner = self._graph.scalar(other), self._scores(one)
            if inner is None or inner.mask is not None:
                continue
            if name == "add" and inner.bias is None and self._is_moderate(other):
                return _under(inner, axes)._replace(bias=(other, axes))
            if name != "add" and number and math.isfinite(number) and inner.bias is None:
                scale = inner.scale / number if name == "div" else inner.scale * number
                return _under(inner, axes)._replace(scale=scale)
        return None

    def _is_moderate(self, atom: Atom) -> bool:
        """Whether a bias masks no row: by no constant, and by no number of the caller."""
        if is_literal(atom) or atom in self._arrays:
            array = atom.val if is_literal(atom) else self._arrays[atom].array
            return bool(np.all(np.abs(np.asarray(array, np.float64)) < self._limit))
        if not jnp.issubdtype(atom.aval.dtype, jnp.floating):
            return True
        equation = self._makers.get(atom)
        if equation is None:
            return False
        if atom not in self._moderate:
            self._moderate[atom] = equation.primitive.name == "dot_general" or all(
                map(self._is_moderate, equation.invars)
            )
        return self._moderate[atom]


def _under(scores: _Scores, axes: Axes) -> _Scores:
    """The scores after their axes were turned."""

    def turn_axes(inner: Axes) -> Axes:
        return [None if axis is None else inner[axis] for axis in axes]

    bias = scores.bias and (scores.bias[0], turn_axes(scores.bias[1]))
    return scores._replace(axes=turn_axes(scores.axes), bias=bias)


def _axes_before(equation: Equation) -> Axes | None:
    """For each axis of a result that of the operand; None if more than axes of size 1 change."""
    name, x, result = equation.primitive.name, equation.invars[0].aval, equation.outvars[0].aval
    if name == "transpose":
        return equation.params["permutation"]
    if equation.params.get("dimensions") is not None and name == "reshape":
        return None
    before, after = (
        [at for at, size in enumerate(each.shape) if not is_one(size)] for each in (x, result)
    )
    if not same_shape([x.shape[at] for at in before], [result.shape[at] for at in after]):
        return None
    places = dict(zip(after, before))
    return [places.get(at) for at in range(result.ndim)]


def _joined(
    equation: Equation, side: int, axes: Axes, scores: _Scores, column: int
) -> _Attention | None:
    """The attention whose weights are one operand of an equation, if the axes fit.

    Args:
        equation: the second product.
        side: which operand the weights are.
        axes: for each axis of the weights that of the softmax.
        scores: what the softmax is of.
        column: the axis of the softmax.
    """
    (sums, batches), pair = scores.product.params["dimension_numbers"], scores.product.invars
    other, value = 1 - side, equation.invars[1 - side]
    sum_axes, batch_axes = equation.params["dimension_numbers"]
    dtypes = {each.aval.dtype.name for each in (*pair, value, *equation.outvars)}
    if dtypes not in ({"float32"}, {"float64"}):
        return None
    # For each axis of the first product, which operand has it alone, and where.
    own = [_free(x.aval.ndim, s, b) for x, s, b in zip(pair, sums, batches)]
    source = [(2, index) for index in range(len(batches[0]))]
    source += [(at, axis) for at in (0, 1) for axis in own[at]]

    def sources_of(places: Axes) -> list[tuple[int, int]]:
        """Those of axes of the weights; 3 stands for an axis of size 1 that the scores lack."""
        through = [None if at is None else scores.axes[at] for at in places]
        return [(3, 0) if at is None else source[at] for at in through]

    batch, rows, columns = (
        [axes[at] for at in each]
        for each in (batch_axes[side], _free(len(axes), sum_axes[side], batch_axes[side]),
                     sum_axes[side])
    )  # fmt: skip
    (key_at, key_axis) = sources_of(columns)[0]
    at_fault = columns != [column] or key_at > 1 or own[key_at] != [key_axis]
    if at_fault or {at for at, _ in sources_of(batch)} - {2}:
        return None
    if {at for at, _ in sources_of(rows)} - {1 - key_at}:
        return None

    def group_axes(x: Atom, of_batch: Axes, *groups: Axes) -> _Grouped:
        split = len(of_batch) - 1 if len(of_batch) < 2 else 1
        return _Grouped(x, [of_batch[: max(split, 0)], of_batch[max(split, 0) :], *groups])

    def of_scores(operand: tuple[Var, Axes] | None) -> _Grouped | None:
        if operand is None:
            return None
        x, at = operand
        return group_axes(x, *([None if a is None else at[a] for a in each]
                            for each in (batch, rows, columns)))  # fmt: skip

    query_at, free = 1 - key_at, _free(value.aval.ndim, sum_axes[other], batch_axes[other])
    indices = [index for _, index in sources_of(batch)]
    query_rows = [axis for _, axis in sources_of(rows)]
    of_batch, of_rows, of_free = _ranges(len(batch), len(rows), len(free))
    return _Attention(
        group_axes(pair[query_at], [batches[query_at][at] for at in indices], query_rows,
                sums[query_at]),
        group_axes(pair[key_at], [batches[key_at][at] for at in indices], [key_axis], sums[key_at]),
        group_axes(value, batch_axes[other], sum_axes[other], free),
        of_scores(scores.bias), of_scores(scores.mask), scores,
        [*of_batch, *of_free, *of_rows] if side else [*of_batch, *of_rows, *of_free],
    )  # fmt: skip


def _free(rank: int, *used: Sequence[int]) -> list[int]:
    return [axis for axis in range(rank) if not any(axis in each for each in used)]


def _ranges(*counts: int) -> list[range]:
    """Ranges of these lengths, one after another."""
    ends = list(accumulate(counts, initial=0))
    return [range(start, end) for start, end in pairwise(ends)]
