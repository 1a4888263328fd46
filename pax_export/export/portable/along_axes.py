"""Recognizes means, norms and softmax."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from pax_export._jaxpr import is_literal
from pax_export.export.portable.graph import Producers, Recognized, is_one, pattern, scaled
from pax_export.export.portable.program import is_static

#: A product of more is no norm; a number squared n times has 2 ** n.
_MOST_FACTORS = 16


def reduced(graph: Producers, atom: Any, name: str) -> tuple[Any, int] | None:
    """Returns the operand of a reduction over one axis, and the axis."""
    equation = graph.maker(atom, name)
    if equation is None or len(equation.params["axes"]) != 1:
        return None
    return graph.same(equation.invars[0]), equation.params["axes"][0]


@pattern("div", "sub")
def softmax(graph: Producers, equation: Any) -> Recognized | None:
    left, right = equation.invars
    if equation.primitive.name == "sub":  # its logarithm
        log = graph.maker(graph.unspread(right)[0], "log")
        right = None if log is None else log.invars[0]
    if right is None or is_literal(right):
        return None
    total, _ = graph.unspread(right)
    summed = reduced(graph, total, "reduce_sum")
    if summed is None or graph.maker(summed[0], "exp") is None:
        return None
    exps, axis = summed
    shifted = graph.same(graph.maker(exps, "exp").invars[0])
    numerator = exps if equation.primitive.name == "div" else shifted
    if graph.same(left) is not numerator:
        return None
    if graph.reduced_from(equation.invars[1], shifted.aval.ndim, axis) is None:
        return None
    x = _without_largest(graph, shifted, axis)
    if x is None:
        return None
    name = "softmax" if equation.primitive.name == "div" else "log_softmax"
    return Recognized(name, (x,), {"axis": axis})


def _without_largest(graph: Producers, shifted: Any, axis: int) -> Any:
    """Returns the array from which its maximum along an axis was subtracted."""
    equation = graph.maker(shifted, "sub")
    if equation is None:
        return None
    x, most = equation.invars
    rank = x.aval.ndim
    largest = None if is_literal(most) else graph.reduced_from(most, rank, axis)
    bounded = None if largest is None else graph.maker(largest, "max")
    if bounded is not None:
        for one, other in (bounded.invars, bounded.invars[::-1]):
            if graph.scalar(one) == -math.inf:
                largest = graph.reduced_from(other, rank, axis)
    if largest is None:
        return None
    found = reduced(graph, largest, "reduce_max")
    if found is None or found[0] is not graph.same(x) or found[1] != axis:
        return None
    return x


@pattern("div", "mul")
def mean(graph: Producers, equation: Any) -> Recognized | None:
    number, parts = scaled(graph, equation.outvars[0])
    inner, places = graph.unspread(parts[0]) if len(parts) == 1 else (None, ())
    total = None if inner is None else graph.maker(inner, "reduce_sum")
    if total is None:
        return None
    (x,), axes = total.invars, tuple(total.params["axes"])
    left = tuple(axis for axis in range(x.aval.ndim) if axis not in axes)
    keepdims = equation.outvars[0].aval.ndim == x.aval.ndim
    thin = all(is_one(equation.outvars[0].aval.shape[axis]) for axis in axes) if keepdims else True
    if not thin or places != (left if keepdims else tuple(range(len(left)))):
        return None
    if not keepdims and equation.outvars[0].aval.ndim != len(left):
        return None
    sizes = [x.aval.shape[axis] for axis in axes]
    if not axes or not is_static(sizes):
        return None
    if not math.isclose(number * math.prod(sizes), 1, rel_tol=1e-6):
        return None
    return Recognized("mean", (x,), {"axes": axes, "keepdims": keepdims})


def _mean(graph: Producers, atom: Any, rank: int) -> Any:
    """The operand of a mean over the last of `rank` axes; None for anything else."""
    inner = None if is_literal(atom) else graph.reduced_from(atom, rank, rank - 1)
    if inner is None:
        return None
    equation = graph.maker(inner, "div", "mul")
    found = None if equation is None else mean(graph, equation)
    if found is None or found.attributes["axes"] != (rank - 1,):
        return None
    x = graph.same(found.operands[0])
    return x if x.aval.ndim == rank else None


def _centered(graph: Producers, atom: Any) -> Any:
    """Returns the array from which its mean was subtracted."""
    equation = graph.maker(atom, "sub")
    if equation is None or is_literal(equation.invars[0]):
        return None
    x = graph.same(equation.invars[0])
    return x if _mean(graph, equation.invars[1], x.aval.ndim) is x else None


def _variance(graph: Producers, atom: Any, rank: int) -> Any:
    """The operand of a variance over the last of `rank` axes."""
    bounded = graph.maker(atom, "max")
    if bounded is not None:
        for one, other in (bounded.invars, bounded.invars[::-1]):
            if graph.scalar(one) == 0.0:
                atom = other
    squares = _mean(graph, atom, rank)
    if squares is not None:
        root = _square_root(graph, squares)
        return None if root is None else _centered(graph, root)
    apart = graph.maker(atom, "sub")
    if apart is None:
        return None
    squares, middle = _mean(graph, apart.invars[0], rank), _square_root(graph, apart.invars[1])
    root = None if squares is None else _square_root(graph, squares)
    found = None if middle is None else _mean(graph, middle, rank)
    return root if root is not None and found is root else None


def _mean_square(graph: Producers, atom: Any, rank: int) -> Any:
    """The operand of a mean of squares over the last of `rank` axes."""
    squares = _mean(graph, atom, rank)
    return None if squares is None else _square_root(graph, squares)


def _square_root(graph: Producers, atom: Any) -> Any:
    """Returns the squared array."""
    equation = graph.maker(atom, "square", "mul", "integer_pow")
    if equation is None:
        return None
    name, inner = equation.primitive.name, [graph.same(each) for each in equation.invars]
    if name == "integer_pow" and equation.params["y"] != 2:
        return None
    return inner[0] if name != "mul" or inner[0] is inner[1] else None


@pattern("add", "mul")
def layer_norm(graph: Producers, equation: Any) -> Recognized | None:
    last = equation.outvars[0].aval.ndim - 1
    shift = None
    result = equation.outvars[0]
    if equation.primitive.name == "add":
        for one, other in (equation.invars, equation.invars[::-1]):
            vector = None if is_literal(other) else graph.is_vector(other, last)
            if vector is not None:
                shift, result = vector, one
        if shift is None:
            return None
    found = _normalized(graph, result, _variance)
    x = None if found is None else _centered(graph, found[0])
    if found is None or x is None or found[1] is not x:
        return None
    _, _, epsilon, scales = found
    vectors = (*scales, *([shift] if shift is not None else []))
    told = {"epsilon": epsilon, "scaled": bool(scales), "shifted": shift is not None}
    return Recognized("layer_norm", (x, *vectors), told)


@pattern("mul")
def rms_norm(graph: Producers, equation: Any) -> Recognized | None:
    found = _normalized(graph, equation.outvars[0], _mean_square)
    if found is None or graph.same(found[0]) is not found[1]:
        return None
    _, x, epsilon, scales = found
    return Recognized("rms_norm", (x, *scales), {"epsilon": epsilon})


def _normalized(
    graph: Producers, atom: Any, spread: Callable[[Producers, Any, int], Any]
) -> tuple[Any, Any, float, list[Any]] | None:
    """Splits the product of an array with the inverse root of its spread over the last axis.

    Returns:
        The array, the array of which it is the spread, the number added to it, and the scale, if
        there is one.
    """
    last = atom.aval.ndim - 1

    def root_of(part: Any) -> tuple[Any, float] | None:
        inner = graph.reduced_from(part, last + 1, last)
        root = None if inner is None else graph.maker(inner, "rsqrt")
        return None if root is None else _of_sum(graph, root.invars[0], last + 1, spread)

    parts = islice(_factors(graph, atom), _MOST_FACTORS)
    roots = [(part, found) for part in parts if (found := root_of(part))]
    if len(roots) != 1:
        return None
    ((root, (of, epsilon)),) = roots
    arrays, scales = [], []
    for part in _factors(graph, atom, of):  # all of them: none may be dropped
        if part is not root and graph.scalar(part) != 1.0:
            vector = graph.is_vector(part, last)
            arrays += [part] * (vector is None)
            scales += [vector] * (vector is not None)
        if len(arrays) > 1 or len(scales) > 1:
            return None
    if not arrays or arrays[0].aval.shape != atom.aval.shape:
        return None
    return arrays[0], of, epsilon, scales


def _factors(graph: Producers, atom: Any, whole: Any = None) -> Iterator[Any]:
    """Yields the factors of a product, except those of `whole`."""
    equation = None if graph.same(atom) is whole else graph.maker(atom, "mul")
    if equation is None:
        yield atom
    else:
        for each in equation.invars:
            yield from _factors(graph, each, whole)


def _of_sum(
    graph: Producers, atom: Any, rank: int, spread: Callable[[Producers, Any, int], Any]
) -> tuple[Any, float] | None:
    """Returns the array of a variance or mean square, and the small number added to it."""
    equation = graph.maker(atom, "add")
    if equation is None:
        return None
    for one, other in (equation.invars, equation.invars[::-1]):
        epsilon = graph.scalar(other)
        if epsilon is not None and not is_literal(one):
            inner = graph.reduced_from(one, rank, rank - 1)
            found = None if inner is None else spread(graph, inner, rank)
            if found is not None:
                return found, epsilon
    return None
