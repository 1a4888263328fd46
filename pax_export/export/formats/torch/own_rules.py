"""Functions with derivatives of their own, as `jax.custom_jvp` and `jax.custom_vjp` make them.

`portable` inlines them. Where that changes a derivative, they are kept: as torch's own function if
it has one with the same derivative, and else with the traced derivative. Whether it does is found
by comparing both on a few numbers, in jax.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax

from pax_export._foundations.jaxpr import (
    bind_equation,
    called_program,
    has_own_derivative,
    interpret,
)
from pax_export.export.artifact import dimensions
from pax_export.export.artifact.dimensions import names as _names
from pax_export.export.portable.program import rewritten
from pax_export.export.portable.sizes import is_number

#: Sizes of the arrays on which derivatives are compared.
_MOST = 1 << 16
#: Functions of these alone are alike at all shapes.
_ELEMENTWISE = frozenset(
    "abs add and broadcast_in_dim convert_element_type copy div eq erf exp ge gt integer_pow le "
    "log logistic lt max min mul ne neg not or pow rsqrt select_n sign sqrt square "
    "stop_gradient sub tanh".split()
)
_SLOW = {"conv_general_dilated", "dot_general", "scan", "sort", "while"}
_PREFIX = "pax_export."


class OwnRule(NamedTuple):
    """A call, the program of the function, and which operands and results are floats."""

    equation: Any
    forward: Any
    floats: tuple[int, ...]

    def backward_program(self) -> Any:
        """The program of operands and cotangents of results to cotangents of floats."""
        back = _pull_back(self.equation, _call(self.equation))
        count = len(self.equation.invars)
        structs = [*map(_struct_of, self.equation.invars), *map(_struct_of, self.equation.outvars)]
        return jax.make_jaxpr(lambda *xs: back(xs[:count], xs[count:]))(*structs)

    def tangent_program(self) -> Any:
        """The program of operands and tangents of floats to tangents of results."""
        operands, results = self.equation.invars, self.equation.outvars
        structs = [*map(_struct_of, operands), *(_struct_of(operands[p]) for p in self.floats)]
        count, outer = len(operands), list(map(_struct_of, results))
        back = _pull_back(self.equation, _call(self.equation))

        def run(*xs: Any) -> list[Any]:
            transposed = jax.linear_transpose(lambda *given: back(xs[:count], given), *outer)
            return list(transposed(list(xs[count:])))

        return jax.make_jaxpr(run)(*structs)


def _struct_of(atom: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)


def with_own_rules(program: Any) -> tuple[Any, list[OwnRule]]:
    """Keeps functions of a program whose derivatives are not those of the calls inside them."""
    found: list[OwnRule] = []
    known: dict[str, str] = {}

    def replace(equation: Any) -> Any:
        if not has_own_derivative(equation):
            return None
        key = f"{equation.primitive.name} {called_program(equation)}"
        if {each.primitive.name for each in _flat(called_program(equation))} <= _ELEMENTWISE:
            key = re.sub(r"(?<=:)(\w+)\[[^\]]*\]|\bshape=\([^)]*\)|\bbroadcast_dim\w*=\([^)]*\)",
                         r"\1", key)  # fmt: skip
        if (kind := known.get(key)) is None:
            kind = known[key] = _kind_of(equation)
        if kind == "same":
            return None
        operands, body = [each.aval for each in equation.invars], called_program(equation)
        if kind in _KNOWN:
            return _composite(kind, lambda *xs: _evaluate(body, xs), operands)
        rule = _rule_of(equation)
        if rule is None:
            return None
        found.append(rule)
        told = {"key": len(found) - 1}
        return _composite("own_rule", lambda *xs: _evaluate(body, xs), operands, told)

    return rewritten(program, replace), found


def _kind_of(equation: Any) -> str:
    """How a function is kept: as "relu", by its "own" rule, or as the "same" calls."""
    floats = _floats(equation.invars)
    if not floats:
        return "same"
    elements = sum(math.prod(s for s in v.aval.shape if is_number(s)) for v in equation.invars)
    names = {each.primitive.name for each in _flat(called_program(equation))}
    if elements > (_MOST if names & _SLOW else 64 * _MOST):
        return "own"
    try:
        own, other = (_slopes(equation, each) for each in (_call(equation), _inlined(equation)))
        if kind := _known(equation, own):
            return kind
        return "same" if all(map(_is_close, own, other)) else "own"
    except Exception:  # of jax: a derivative that it has of one kind only
        return "own"


def _is_close(one: Any, other: Any) -> bool:
    one, other = (np.asarray(each, np.float64) for each in (one, other))
    return np.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)


def _slopes(equation: Any, function: Callable[..., Any]) -> list[np.ndarray]:
    """The cotangents of a function for a few numbers, at some sizes."""
    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars]
    back = _pull_back(equation, function)
    run = jax.export.export(jax.jit(lambda *xs: back(xs, None)))(*structs).call
    shapes = [_shape_of(each.shape) for each in structs]
    return [
        np.asarray(slope)
        for number in range(_PROBES)
        for slope in run(*(_probe(s, x.dtype, number, at)
                           for at, (s, x) in enumerate(zip(shapes, structs))))
    ]  # fmt: skip


def _shape_of(shape: Sequence[Any]) -> tuple[int, ...]:
    names = sorted({name for size in shape if not is_number(size) for name in _names(str(size))})
    sizes = {name: 3 + sum(map(ord, name)) % 4 for name in names}
    return tuple(int(s) if is_number(s) else dimensions.value(str(s), sizes) for s in shape)


def _composite(
    name: str, function: Callable[..., Any], operands: Sequence[Any], told: Any = None
) -> Any:
    structs = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in operands]
    kept = lax.composite(lambda *xs, **_: function(*xs), _PREFIX + name)
    return jax.make_jaxpr(lambda *xs: kept(*xs, **(told or {})))(*structs)


#: Functions of torch with derivatives of their own: the steps at which these are 0.
_KNOWN = {"relu": (0.0, math.inf), "relu6": (0.0, 6.0)}


def _known(equation: Any, slopes: Sequence[np.ndarray]) -> str:
    """The name of a function with the derivative of `jax.nn.relu` or `relu6`; empty for others."""
    if len(equation.invars) != 1 or len(equation.outvars) != 1:
        return ""
    if str(equation.invars[0].aval.shape) != str(equation.outvars[0].aval.shape):
        return ""
    names = {each.primitive.name for each in _flat(called_program(equation))}
    if not names <= {"max", "min", "broadcast_in_dim", "convert_element_type"}:
        return ""
    aval = equation.invars[0].aval
    inputs = [_probe(_shape_of(aval.shape), aval.dtype, n, 0) for n in range(_PROBES)]
    for name, (low, high) in _KNOWN.items():
        steps = [((x > low) & (x < high)).astype(np.float32) for x in inputs]
        if all(map(_is_close, slopes, steps)) and ("min" in names) == (name == "relu6"):
            return name
    return ""


def _flat(program: Any) -> Any:
    for equation in getattr(program, "jaxpr", program).eqns:
        inner = called_program(equation)
        yield from ([equation] if inner is None else _flat(inner))


def _call(equation: Any) -> Callable[..., list[Any]]:
    """The function, with its own derivative."""
    return lambda *xs: list(bind_equation(equation, xs))


def _inlined(equation: Any) -> Callable[..., list[Any]]:
    """The function, with the derivatives of the calls inside it."""
    return lambda *xs: _evaluate(called_program(equation), xs)


def _evaluate(program: Any, xs: Sequence[Any]) -> list[Any]:
    def operate(equation: Any, operands: list[Any]) -> Any:
        return None if called_program(equation) is not None else bind_equation(equation, operands)

    return interpret(program, xs, operate)


def _pull_back(equation: Any, function: Any = None) -> Callable[..., list[Any]]:
    """Cotangents of the floats among the operands."""
    function = function or _call(equation)
    floats = _floats(equation.invars)

    def run(operands: Sequence[Any], cotangents: Any) -> list[Any]:
        def of_floats(*moved: Any) -> list[Any]:
            filled = list(operands)
            for place, value in zip(floats, moved):
                filled[place] = value
            return function(*filled)

        results, back = jax.vjp(of_floats, *(operands[place] for place in floats))
        given = cotangents or [jnp.ones_like(each) for each in results]
        return list(back(list(given)))

    return run


def _floats(atoms: Sequence[Any]) -> tuple[int, ...]:
    kinds = (getattr(each.aval, "dtype", None) for each in atoms)
    return tuple(at for at, kind in enumerate(kinds) if kind is not None
                 and jnp.issubdtype(kind, jnp.floating))  # fmt: skip


def _rule_of(equation: Any) -> OwnRule | None:
    floats = _floats(equation.invars)
    if not floats or len(_floats(equation.outvars)) != len(equation.outvars):
        return None
    return OwnRule(equation, called_program(equation), floats)


def _probe(shape: tuple[int, ...], dtype: Any, number: int, place: int) -> Any:
    """Numbers of a few sizes, ties and zeros among them."""
    random = np.random.default_rng(place)
    if dtype == np.bool_:
        return random.integers(0, 2, shape).astype(bool)
    if not jnp.issubdtype(dtype, jnp.floating):
        return np.zeros(shape, dtype)
    made = random.normal(size=shape)
    tries = made, np.zeros(shape), 100 * made, np.ones(shape), 1e4 * made, np.full(shape, 6.0)
    return tries[number].astype(dtype)


_PROBES = 6
