"""Powers, exponentials, logarithms, trigonometric and hyperbolic functions.

Series are used where the plain formula would lose digits; float64 has more terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from pax_export._foundations.types import Array, Equation
from pax_export.export.portable.decompositions.registry import NotDecomposedError, decomposes


def polynomial(x: Array, coefficients: Sequence[float]) -> Any:
    """Evaluates a polynomial by Horner's scheme, constant first."""
    total = jnp.full_like(x, coefficients[-1])
    for each in reversed(coefficients[:-1]):
        total = total * x + each
    return total


def _terms(x: Array, single: int, double: int) -> int:
    return double if x.dtype == jnp.float64 else single


@decomposes("polynomial", single=True, any_dtype=True)
def polynomial_of_operands(x: Array, *coefficients: Array, **_: object) -> Any:
    total = coefficients[-1]
    for each in reversed(coefficients[:-1]):
        total = total * x + each
    shapes = [each.shape for each in (x, *coefficients)]
    return jnp.broadcast_to(total, lax.broadcast_shapes(*shapes))


@decomposes("integer_pow", any_dtype=True)
def integer_pow(x: Array, *, y: int, **_: object) -> Any:
    """Raises to a power by repeated squares."""
    if y < 0 and not jnp.issubdtype(x.dtype, jnp.inexact):
        raise NotDecomposedError("of whole numbers with a negative exponent")
    exponent, factor, power = abs(y), x, None
    while exponent:
        if exponent & 1:
            power = factor if power is None else power * factor
        exponent >>= 1
        if exponent:
            factor = factor * factor
    power = jnp.ones_like(x) if power is None else power
    return 1 / power if y < 0 else power


@decomposes("expm1", single=True)
def expm1(x: Array, **_: object) -> Any:
    count = _terms(x, 9, 18)
    near = x * polynomial(x, [1 / math.factorial(n) for n in range(1, count + 1)])
    half = jnp.exp(x * 0.5)  # which a runtime has where the whole is nearly infinite
    return jnp.where(jnp.abs(x) < 0.5, near, half * half - 1)


@decomposes("log1p", single=True)
def log1p(x: Array, **_: object) -> Any:
    """Near 0 by the series of the inverse hyperbolic tangent."""
    close = jnp.abs(x) < 0.3
    part = jnp.where(close, x, 0)
    part = part / (1 + 0.5 * part)  # twice the argument, to keep digits of tiny numbers
    count = _terms(x, 7, 12)
    near = part * polynomial(part * part, [0.25**n / (2 * n + 1) for n in range(count)])
    return jnp.where(close, near, jnp.log(1 + x))


@decomposes("sinh", single=True)
def sinh(x: Array, **_: object) -> Any:
    odd = range(1, 2 * _terms(x, 6, 10), 2)
    near = x * polynomial(x * x, [1 / math.factorial(n) for n in odd])
    # exp(x) may be infinite where its half is not.
    half, other = jnp.exp(x * 0.5), jnp.exp(x * -0.5)
    far = 0.5 * half * half - 0.5 * other * other
    return jnp.where(jnp.abs(x) < 1, near, far)


@decomposes("cosh", single=True)
def cosh(x: Array, **_: object) -> Any:
    half = jnp.exp(jnp.abs(x) * 0.5)
    return 0.5 * half * half + 0.5 / half / half


#: Beyond this the square of a number plus 1 is its square.
_LARGE = 1e9


def _log_of_double(x: Array) -> Any:
    """For large numbers, because a runtime's logarithm of the largest may be infinite."""
    return jnp.log(x * 0.25) + math.log(8)


@decomposes("asinh", single=True)
def asinh(x: Array, **_: object) -> Any:
    size = jnp.abs(x)
    bounded = jnp.minimum(size, _LARGE)
    squared = bounded * bounded
    near = jnp.log1p(bounded + squared / (1 + jnp.sqrt(squared + 1)))
    far = _log_of_double(size)
    return jnp.sign(x) * jnp.where(size > _LARGE, far, near)


@decomposes("acosh", single=True)
def acosh(x: Array, **_: object) -> Any:
    above = jnp.minimum(x, _LARGE) - 1
    near = jnp.log1p(above + jnp.sqrt(above * (above + 2)))
    far = _log_of_double(x)
    return jnp.where(x < 1, jnp.nan, jnp.where(x > _LARGE, far, near))


@decomposes("atan2", single=True)
def atan2(y: Array, x: Array, **_: object) -> Any:
    """Two zeros have no quotient, nor have two infinities; the signs of zeros choose the side."""
    rise, run = jnp.abs(y), jnp.abs(x)
    angle = lax.atan(jnp.where(rise == run, jnp.sign(rise), rise / run))
    angle = jnp.where(_is_negative(x), jnp.pi - angle, angle)
    return angle * jnp.where(_is_negative(y), -1, 1)


@decomposes("atan", single=True)
def atan(x: Array, **_: object) -> Any:
    """In float64, where `atan2` is made of it, by a series after halving the angle twice."""
    if x.dtype != jnp.float64:
        return lax.atan2(x, jnp.ones_like(x))
    size = jnp.abs(x)
    part = jnp.where(size > 1, 1 / size, size)
    for _step in range(2):
        part = part / (1 + jnp.sqrt(1 + part * part))
    series = polynomial(part * part, [(-1) ** n / (2 * n + 1) for n in range(14)])
    angle = 4 * part * series
    return jnp.sign(x) * jnp.where(size > 1, jnp.pi / 2 - angle, angle)


def _is_negative(x: Array) -> Any:
    """Also of zeros: one divided by the negative one is below zero."""
    return (x < 0) | (1 / x < 0)


def to_even(equation: Equation) -> bool:
    """Whether halves are rounded to the nearest even number, as targets round."""
    return int(equation.params["rounding_method"]) == 1


@decomposes("round")
def round_away(x: Array, **_: object) -> Any:
    """Halves away from zero."""
    size = jnp.abs(x)
    whole = jnp.floor(size)
    return jnp.sign(x) * (whole + (size - whole >= 0.5).astype(x.dtype))


def _in_order(
    compare: Callable[[Any, Any], Any], with_nan: Callable[[Any, Any], Any]
) -> Callable[..., Any]:
    """Compares in the order of sorting, with NaN as the largest number."""

    def apply(x: Array, y: Array) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return compare(x, y)
        return compare(x, y) | with_nan(x != x, y != y)

    return apply


decomposes("lt_to")(_in_order(lax.lt, lambda x_is_nan, y_is_nan: y_is_nan & ~x_is_nan))
decomposes("le_to")(_in_order(lax.le, lambda _, y_is_nan: y_is_nan))
decomposes("eq_to")(_in_order(lax.eq, lambda x_is_nan, y_is_nan: x_is_nan & y_is_nan))
decomposes("clamp")(lambda low, x, high, **_: lax.min(lax.max(x, low), high))
decomposes("is_finite")(lambda x, **_: jnp.abs(x) < jnp.inf)
decomposes("square", any_dtype=True)(lambda x, **_: x * x)
decomposes("one_minus_square", any_dtype=True)(lambda x, **_: (1 - x) * (1 + x))

for _name, _function in {
    "rsqrt": lambda x, **_: 1 / jnp.sqrt(x),
    "cbrt": lambda x, **_: jnp.sign(x) * jnp.power(jnp.abs(x), 1 / 3),
    "exp2": lambda x, **_: lax.pow(jnp.full_like(x, 2), x),
    "log2": lambda x, **_: jnp.log(x) * (1 / math.log(2)),
    "tan": lambda x, **_: jnp.sin(x) / jnp.cos(x),
    "atanh": lambda x, **_: 0.5 * jnp.log1p(2 * x / (1 - x)),
    "asin": lambda x, **_: lax.atan2(x, jnp.sqrt((1 - x) * (1 + x))),
    "acos": lambda x, **_: lax.atan2(jnp.sqrt((1 - x) * (1 + x)), x),
}.items():
    decomposes(_name, single=True, any_dtype=True)(_function)
