"""Recognizes activations."""

from __future__ import annotations

import math
from typing import Any

from pax_export._jaxpr import is_literal
from pax_export._types import Array, Equation
from pax_export.export.portable.graph import Producers, Recognized, close, pattern, scaled


@pattern("max", "min", "clamp")
def clip(graph: Producers, equation: Any) -> Recognized | None:
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
        made = graph.maker(gate, "div", "mul")
        inner = None if made is None else hard_sigmoid(graph, made)
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


def _is_gelu_curve(graph: Producers, atom: object, x: Array) -> bool:
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
