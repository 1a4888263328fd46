"""Functions and operations whose derivative in torch would be another one than in jax.

`portable` inlines what `jax.custom_jvp` and `jax.custom_vjp` make. Where that changes a derivative,
they are kept: as torch's own function if it has one with the same derivative, and else with the
traced derivative. Whether it does is found by comparing both on a few numbers, in jax. Operations
of which torch has another derivative, at ties or zeros, are kept with that of jax.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

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
    is_literal,
    jaxpr_of,
)
from pax_export.export.artifact import dimensions
from pax_export.export.artifact.dimensions import names as _names
from pax_export.export.portable import kept
from pax_export.export.portable.program import rewritten, with_python_numbers
from pax_export.export.portable.sizes import is_number

if TYPE_CHECKING:
    from pax_export._foundations.types import Array, Atom, DTypeLike, Equation, TracedProgram

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


#: Operations of floats that keep jax's derivative, and for which equations.
#: At 0, jax's of `pow` and `atan2` is NaN, and of `cbrt` infinity; `acosh` has NaN outside of its
#: domain. torch takes a matrix for symmetric in `cholesky`, and gives a tie of `cummax` to one.
#: A solver is differentiated through its equation.
_DIFFERENT: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys("acosh atan2 cbrt cholesky cummax cummin".split(), lambda equation: True),
    "custom_linear_solve": lambda equation: equation.params["jaxprs"].transpose_solve is not None,
    "pow": lambda equation: not is_literal(equation.invars[1]) or not equation.invars[1].val,
}


def _is_different(equation: Equation) -> bool:
    is_here = _DIFFERENT.get(equation.primitive.name)
    return is_here is not None and is_here(equation)


class OwnRule(NamedTuple):
    """A call, the program of the function, and which operands and results are floats."""

    equation: Equation
    forward: Any
    floats: tuple[int, ...]

    def backward_program(self) -> Any:
        """The program of operands and cotangents of results to cotangents of floats."""
        back = _pull_back(_call(self.equation), self.floats)
        count = len(self.equation.invars)
        structs = [*map(_struct_of, self.equation.invars), *map(_struct_of, self.equation.outvars)]
        return _program(lambda *xs: back(xs[:count], xs[count:]))(*structs)

    def tangent_program(self) -> Any:
        """The program of operands and tangents of floats to tangents of results."""
        operands, results = self.equation.invars, self.equation.outvars
        structs = [*map(_struct_of, operands), *(_struct_of(operands[p]) for p in self.floats)]
        count, outer = len(operands), list(map(_struct_of, results))
        if not self.equation.primitive.name.startswith("custom_vjp"):
            of_floats, call = partial(_of_floats, self.floats), _call(self.equation)
            return _program(
                lambda *xs: jax.jvp(
                    of_floats(call, xs[:count]), tuple(xs[p] for p in self.floats), xs[count:]
                )[1]
            )(*structs)
        back = _pull_back(_call(self.equation), self.floats)

        def run(*xs: Array) -> list[Any]:
            transposed = jax.linear_transpose(
                lambda *cotangents: back(xs[:count], cotangents), *outer
            )
            return list(transposed(list(xs[count:])))

        return _program(run)(*structs)


def _program(function: Callable[..., Any]) -> Callable[..., Any]:
    trace = jax.make_jaxpr(function)
    return lambda *structs: with_python_numbers(trace(*structs))


def _struct_of(atom: Atom) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)


#: Shapes in the text of a program of elementwise operations.
_SHAPES = re.compile(r"(?<=:)(\w+)\[[^\]]*\]|\bshape=\([^)]*\)|\bbroadcast_dim\w*=\([^)]*\)")


def with_own_rules(program: TracedProgram) -> tuple[Any, list[OwnRule]]:
    """Keeps functions of a program whose derivatives are not those of the calls inside them."""
    found: list[OwnRule] = []
    known: dict[str, str] = {}

    def replace(equation: Equation) -> Any:
        ends = equation.invars[::2] if equation.primitive.name == "clamp" else ()
        if ends and all(map(is_literal, ends)) and _floats(equation.invars[1:2]):
            low, high = (float(end.val) for end in ends if is_literal(end))
            return _strict_clip(equation, low, high, 1)
        if _is_different(equation):
            kind, body = "own", _program(_call(equation))(*map(_struct_of, equation.invars))
        elif has_own_derivative(equation):
            body = called_program(equation)
            key = f"{equation.primitive.name} {body}"
            if {each.primitive.name for each in _flat(body)} <= _ELEMENTWISE:
                key = _SHAPES.sub(r"\1", key)
            if (kind := known.get(key)) is None:
                kind = known[key] = _kind_of(equation)
        else:
            return None
        if kind == "same":
            return None
        if kind in _KNOWN:
            return _strict_clip(equation, *_KNOWN[kind])
        rule = _rule_of(equation, body)
        if rule is None:
            return None
        found.append(rule)
        attributes = {"key": len(found) - 1}
        return _composite("own_rule", lambda *xs: _evaluate(body, xs), equation, attributes)

    return rewritten(program, replace), found


def _kind_of(equation: Equation) -> str:
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


def _is_close(one: Array, other: Array) -> bool:
    one, other = (np.asarray(each, np.float64) for each in (one, other))
    return np.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)


def _slopes(equation: Equation, function: Callable[..., Any]) -> list[np.ndarray]:
    """The cotangents of a function for a few numbers, at some sizes."""
    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars]
    back = _pull_back(function, _floats(equation.invars))
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
    name: str,
    function: Callable[..., Any],
    equation: Equation,
    attributes: Mapping[str, Any],
    places: slice = slice(None),
) -> Any:
    """A program of the operands of an equation that calls a function of those at these places."""
    whole = lax.composite(lambda *xs, **_: function(*xs), _PREFIX + name)
    return _program(lambda *xs: whole(*xs[places], **attributes))(*map(_struct_of, equation.invars))


#: Functions between two ends, at which their derivative is 0.
_KNOWN = {"relu": (0.0, None), "relu6": (0.0, 6.0)}


def _strict_clip(equation: Equation, low: float, high: float | None, index: int = 0) -> Any:
    """A program that clips an operand between ends at which there is no slope."""
    ends: Any = {"low": low, "high": high}
    return _composite(
        "strict_clip", partial(kept.clip, **ends), equation, ends, slice(index, index + 1)
    )


def _known(equation: Equation, slopes: Sequence[np.ndarray]) -> str:
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
        steps = [((x > low) & (x < (high or np.inf))).astype(np.float32) for x in inputs]
        if all(map(_is_close, slopes, steps)) and ("min" in names) == (name == "relu6"):
            return name
    return ""


def _flat(program: TracedProgram) -> Iterator[Equation]:
    for equation in jaxpr_of(program).eqns:
        inner = called_program(equation)
        yield from ([equation] if inner is None else _flat(inner))


def _call(equation: Equation) -> Callable[..., list[Any]]:
    """The function, with its own derivative."""
    return lambda *xs: list(bind_equation(equation, xs))


def _inlined(equation: Equation) -> Callable[..., list[Any]]:
    """The function, with the derivatives of the calls inside it."""
    return lambda *xs: _evaluate(called_program(equation), xs)


def _evaluate(program: TracedProgram, xs: Sequence[Any]) -> list[Any]:
    def operate(equation: Equation, operands: list[Any]) -> Any:
        return None if called_program(equation) is not None else bind_equation(equation, operands)

    return interpret(program, xs, operate)


def _pull_back(function: Callable[..., Any], floats: Sequence[int]) -> Callable[..., list[Any]]:
    """Cotangents of the floats among the operands."""

    def run(operands: Sequence[Any], cotangents: Sequence[Array] | None) -> list[Any]:
        moved = _of_floats(floats, function, operands)
        results, back = jax.vjp(moved, *(operands[index] for index in floats))
        seeds = cotangents or [jnp.ones_like(each) for each in results]
        return list(back(list(seeds)))

    return run


def _of_floats(
    floats: Sequence[int], function: Callable[..., list[Any]], operands: Sequence[Any]
) -> Callable[..., list[Any]]:
    """A function of some of its operands."""

    def run(*moved: Array) -> list[Any]:
        filled = list(operands)
        for index, value in zip(floats, moved):
            filled[index] = value
        return function(*filled)

    return run


def _floats(atoms: Sequence[Any]) -> tuple[int, ...]:
    kinds = (getattr(each.aval, "dtype", None) for each in atoms)
    return tuple(at for at, kind in enumerate(kinds) if kind is not None
                 and jnp.issubdtype(kind, jnp.floating))  # fmt: skip


def _rule_of(equation: Equation, body: TracedProgram) -> OwnRule | None:
    floats = _floats(equation.invars)
    if len(_floats(equation.outvars)) != len(equation.outvars):
        return None
    while floats:  # jax differentiates no `custom_vjp` by what it closes over: its first operands
        rule = OwnRule(equation, body, floats)
        try:
            rule.backward_program()
            return rule
        except Exception as error:  # which has no public class
            if "closed-over" not in str(error):
                raise
            floats = floats[1:]
    return None


def _probe(shape: tuple[int, ...], dtype: DTypeLike, number: int, seed: int) -> Any:
    """Numbers of a few sizes, ties and zeros among them."""
    random = np.random.default_rng(seed)
    if dtype == np.bool_:
        return random.integers(0, 2, shape).astype(bool)
    if not jnp.issubdtype(dtype, jnp.floating):
        return np.zeros(shape, dtype)
    normal = random.normal(size=shape)
    mixed = np.where(random.integers(0, 2, shape), normal, random.integers(-1, 3, shape))
    tries = normal, 0.0, 100 * normal, 1.0, 1e4 * normal, 6.0, mixed
    return np.broadcast_to(tries[number], shape).astype(dtype)


_PROBES = 7
