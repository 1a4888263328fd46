"""Recognizes functions for which runtimes have an operator: means, norms, softmax and activations.

The source may be jax, flax, Equinox or the model itself: only the arithmetic is matched, for
numbers of 32 bits and more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from pax_export._foundations.jaxpr import bind_equation, is_literal
from pax_export._foundations.types import Array, Atom, Equation
from pax_export.export.portable import kept
from pax_export.export.portable import patterns as patterns
from pax_export.export.portable.graph import (
    PATTERNS,
    Producers,
    Recognized,
    close,
    is_one,
    pattern,
    scaled,
)
from pax_export.export.portable.program import CONTROL, PortableProgram, is_static, with_bodies

#: A product of more is no norm; a number squared n times has 2 ** n.
_MOST_FACTORS = 16


def reduced(graph: Producers, atom: Atom, name: str) -> tuple[Any, int] | None:
    """Returns the operand of a reduction over one axis, and the axis."""
    equation = graph.maker(atom, name)
    if equation is None or len(equation.params["axes"]) != 1:
        return None
    return graph.same(equation.invars[0]), equation.params["axes"][0]


@pattern("div", "sub")
def softmax(graph: Producers, equation: Equation) -> Recognized | None:
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


def _without_largest(graph: Producers, shifted: Atom, axis: int) -> Any:
    """Returns the array from which its maximum along an axis was subtracted."""
    equation = graph.maker(shifted, "sub")
    if equation is None:
        return None
    x, most = equation.invars
    rank = x.aval.ndim
    largest = None if is_literal(most) else graph.reduced_from(most, rank, axis)
    if largest is None:
        return None
    largest, order = graph.unturned(largest)  # `jax.vmap` turns both
    bounded = graph.maker(largest, "max")
    for one, other in () if bounded is None else (bounded.invars, bounded.invars[::-1]):
        if graph.scalar(one) == -math.inf:
            largest = graph.reduced_from(other, rank, axis)
    found = None if largest is None else reduced(graph, largest, "reduce_max")
    if found is None:
        return None
    source, axes = graph.unturned(x)
    if (source, axes[axis]) != found:
        return None
    rest = (each - (each > axes[axis]) for at, each in enumerate(axes) if at != axis)
    return x if tuple(rest) == order else None


@pattern("div", "mul")
def mean(graph: Producers, equation: Equation) -> Recognized | None:
    number, parts = scaled(graph, equation.outvars[0])
    inner, positions = graph.unspread(parts[0]) if len(parts) == 1 else (None, ())
    total = None if inner is None else graph.maker(inner, "reduce_sum")
    if total is None:
        return None
    (x,), axes = total.invars, tuple(total.params["axes"])
    left = tuple(axis for axis in range(x.aval.ndim) if axis not in axes)
    keepdims = equation.outvars[0].aval.ndim == x.aval.ndim
    thin = all(is_one(equation.outvars[0].aval.shape[axis]) for axis in axes) if keepdims else True
    if not thin or positions != (left if keepdims else tuple(range(len(left)))):
        return None
    if not keepdims and equation.outvars[0].aval.ndim != len(left):
        return None
    sizes = [x.aval.shape[axis] for axis in axes]
    if not axes or not is_static(sizes):
        return None
    if not math.isclose(number * math.prod(sizes), 1, rel_tol=1e-6):
        return None
    return Recognized("mean", (x,), {"axes": axes, "keepdims": keepdims})


def _mean(graph: Producers, atom: Atom, rank: int) -> Any:
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


def _centered(graph: Producers, atom: Atom) -> Any:
    """Returns the array from which its mean was subtracted."""
    equation = graph.maker(atom, "sub")
    if equation is None or is_literal(equation.invars[0]):
        return None
    x = graph.same(equation.invars[0])
    return x if _mean(graph, equation.invars[1], x.aval.ndim) is x else None


def _variance(graph: Producers, atom: Atom, rank: int) -> Any:
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


def _mean_square(graph: Producers, atom: Atom, rank: int) -> Any:
    """The operand of a mean of squares over the last of `rank` axes."""
    squares = _mean(graph, atom, rank)
    return None if squares is None else _square_root(graph, squares)


def _square_root(graph: Producers, atom: Atom) -> Any:
    """Returns the squared array."""
    equation = graph.maker(atom, "square", "mul", "integer_pow")
    if equation is None:
        return None
    name, inner = equation.primitive.name, [graph.same(each) for each in equation.invars]
    if name == "integer_pow" and equation.params["y"] != 2:
        return None
    return inner[0] if name != "mul" or inner[0] is inner[1] else None


@pattern("add", "mul")
def layer_norm(graph: Producers, equation: Equation) -> Recognized | None:
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
    attributes = {"epsilon": epsilon, "scaled": bool(scales), "shifted": shift is not None}
    return Recognized("layer_norm", (x, *vectors), attributes)


@pattern("mul")
def rms_norm(graph: Producers, equation: Equation) -> Recognized | None:
    found = _normalized(graph, equation.outvars[0], _mean_square)
    if found is None or graph.same(found[0]) is not found[1]:
        return None
    _, x, epsilon, scales = found
    return Recognized("rms_norm", (x, *scales), {"epsilon": epsilon})


def _normalized(
    graph: Producers, atom: Atom, spread: Callable[[Producers, Any, int], Any]
) -> tuple[Any, Any, float, list[Any]] | None:
    """Splits the product of an array with the inverse root of its spread over the last axis.

    Returns:
        The array, the array of which it is the spread, the number added to it, and the scale, if
        there is one.
    """
    last = atom.aval.ndim - 1

    def root_of(part: Atom) -> tuple[Any, float] | None:
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


def _factors(graph: Producers, atom: Atom, whole: Any = None) -> Iterator[Any]:
    """Yields the factors of a product, except those of `whole`."""
    equation = None if graph.same(atom) is whole else graph.maker(atom, "mul")
    if equation is None:
        yield atom
    else:
        for each in equation.invars:
            yield from _factors(graph, each, whole)


def _of_sum(
    graph: Producers, atom: Atom, rank: int, spread: Callable[[Producers, Any, int], Any]
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


# --- activations ------------------------------------------------------------


@pattern("max", "min", "clamp")
def clip(graph: Producers, equation: Equation) -> Recognized | None:
    name = equation.primitive.name
    if name == "clamp":
        low, x, high = equation.invars
        least, most = graph.scalar(low), graph.scalar(high)
        if least is None or most is None or math.isnan(least + most):
            return None
        return Recognized("clip", (x,), {"low": least, "high": most})
    for x, bound_ in (equation.invars, equation.invars[::-1]):
        end = graph.scalar(bound_)
        if end is None or math.isnan(end) or is_literal(x) or x in graph.known:
            continue
        if name == "max":
            return Recognized("clip", (x,), {"low": end})
        below = graph.maker(x, "max")
        inner = clip(graph, below) if below is not None else None
        if inner is not None and inner.attributes["low"] <= end:
            return Recognized("clip", inner.operands, {"low": inner.attributes["low"], "high": end})
        return Recognized("clip", (x,), {"high": end})
    return None


@pattern("mul")
def silu(graph: Producers, equation: Equation) -> Recognized | None:
    for x, gate in (equation.invars, equation.invars[::-1]):
        logistic = graph.maker(gate, "logistic")
        if logistic is not None and graph.same(logistic.invars[0]) is graph.same(x):
            return Recognized("silu", (x,), {})
    return None


@pattern("div", "mul")
def hard_sigmoid(graph: Producers, equation: Equation) -> Recognized | None:
    x, by = equation.invars
    number = graph.scalar(by)
    if number is not None and equation.primitive.name == "mul":
        number = 1 / (number or 1)
    if number is None or not math.isclose(number, 6, rel_tol=1e-6):
        return None
    above = graph.maker(x, "min")
    within = None if above is None else clip(graph, above)
    if within is None or within.attributes != {"low": 0.0, "high": 6.0}:
        return None
    moved = graph.maker(within.operands[0], "add")
    if moved is None:
        return None
    for inner, three in (moved.invars, moved.invars[::-1]):
        if graph.scalar(three) == 3.0:
            return Recognized("hard_sigmoid", (inner,), {})
    return None


@pattern("mul")
def hard_swish(graph: Producers, equation: Equation) -> Recognized | None:
    for x, gate in (equation.invars, equation.invars[::-1]):
        producer = graph.maker(gate, "div", "mul")
        inner = None if producer is None else hard_sigmoid(graph, producer)
        if inner is not None and graph.same(inner.operands[0]) is graph.same(x):
            return Recognized("hard_swish", (x,), {})
    return None


@pattern("mul")
def gelu(graph: Producers, equation: Equation) -> Recognized | None:
    number, parts = scaled(graph, equation.outvars[0])
    if len(parts) != 2:
        return None
    for x, gate in (parts, parts[::-1]):
        erfc = graph.maker(gate, "erfc")
        if erfc is not None and close(number, 0.5):
            by, inner = scaled(graph, erfc.invars[0])
            if close(by, -math.sqrt(0.5)) and inner == [x]:
                return Recognized("gelu", (x,), {"approximate": False})
        moved = graph.maker(gate, "add")
        if moved is None or not close(number, 0.5):
            continue
        for one, curve in (moved.invars, moved.invars[::-1]):
            if graph.scalar(one) != 1.0:
                continue
            erf, tanh = graph.maker(curve, "erf"), graph.maker(curve, "tanh")
            if erf is not None:
                by, inner = scaled(graph, erf.invars[0])
                if close(by, math.sqrt(0.5)) and inner == [x]:
                    return Recognized("gelu", (x,), {"approximate": False})
            if tanh is not None and _is_gelu_curve(graph, tanh.invars[0], x):
                return Recognized("gelu", (x,), {"approximate": True})
    return None


def _is_gelu_curve(graph: Producers, atom: Atom, x: Array) -> bool:
    """Whether it is ``sqrt(2 / pi) * (x + 0.044715 * x**3)``."""
    number, parts = scaled(graph, atom)
    total = graph.maker(parts[0], "add") if len(parts) == 1 else None
    if total is None or not close(number, math.sqrt(2 / math.pi)):
        return False
    for one, cubic in (total.invars, total.invars[::-1]):
        by, inner = scaled(graph, cubic)
        if graph.same(one) is not x or not close(by, 0.044715):
            continue
        if inner == [x, x, x]:
            return True
        power = graph.maker(inner[0], "integer_pow") if len(inner) == 1 else None
        if power is not None and power.params["y"] == 3 and graph.same(power.invars[0]) is x:
            return True
    return False


# --- Recognizes functions for which runtimes have an operator, by their arithmetic ---


_DTYPES = frozenset({"float32"})


def recognized(program: PortableProgram) -> PortableProgram:
    """Returns the program with calls of kept functions instead of their definitions.

    Loops and branches are searched, too.
    """
    graph = Producers(program)
    found = {}
    for equation in program.jaxpr.eqns:
        if equation.primitive.name in PATTERNS:
            (result, *_) = equation.outvars
            if result.aval.dtype.name in _DTYPES:
                matches = (match(graph, equation) for match in PATTERNS[equation.primitive.name])
                match = next((each for each in matches if each is not None), None)
                if match is not None:
                    found[result] = match
    if not found and CONTROL.isdisjoint(each.primitive.name for each in program.jaxpr.eqns):
        return program
    values: dict[Any, Any] = {}

    def operate(equation: Equation, operands: list[Any]) -> Sequence[Any]:
        values.update((a, x) for a, x in zip(equation.invars, operands) if not is_literal(a))
        match = found.get(equation.outvars[0]) if equation.outvars else None
        if match is None:
            return bind_equation(with_bodies(equation, recognized), operands)
        arguments = [each.val if is_literal(each) else values[each] for each in match.operands]
        return [kept.call(match.name, *arguments, **match.attributes)]

    return program.rebuilt(operate)
