"""Powers, exponentials, logarithms, trigonometric and hyperbolic functions.

Series are used where the plain formula would lose digits; float64 has more terms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from pax_export._types import Array
from pax_export.export.portable.decompositions.registry import NotDecomposedError, decomposes


def polynomial(x: Array, coefficients: Sequence[float]) -> Any:
    """Evaluates a polynomial by Horner's scheme, constant first."""
    total = jnp.full_like(x, coefficients[-1])
    for each in reversed(coefficients[:-1]):
        total = total * x + each
    return total


def _terms(x: Array, single: int, double: int) -> int:
    return double if x.dtype == jnp.float64 else single


@decomposes("square", any_dtype=True)
def square(x: Array, **_: object) -> Any:
    return x * x


@decomposes("one_minus_square", any_dtype=True)
def one_minus_square(x: Array, **_: object) -> Any:
    return (1 - x) * (1 + x)


@decomposes("polynomial", single=True)
def polynomial_of_operands(x: Array, *coefficients: Any, **_: object) -> Any:
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
    exponent, factor, made = abs(y), x, None
    while exponent:
        if exponent & 1:
            made = factor if made is None else made * factor
        exponent >>= 1
        if exponent:
            factor = factor * factor
    made = jnp.ones_like(x) if made is None else made
    return 1 / made if y < 0 else made


@decomposes("rsqrt", single=True)
def rsqrt(x: Array, **_: object) -> Any:
    return 1 / jnp.sqrt(x)


@decomposes("cbrt", single=True)
def cbrt(x: Array, **_: object) -> Any:
    return jnp.sign(x) * jnp.power(jnp.abs(x), 1 / 3)


@decomposes("exp2", single=True)
def exp2(x: Array, **_: object) -> Any:
    return lax.pow(jnp.full_like(x, 2), x)


@decomposes("log2", single=True)
def log2(x: Array, **_: object) -> Any:
    return jnp.log(x) * (1 / math.log(2))


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


@decomposes("tan", single=True)
def tan(x: Array, **_: object) -> Any:
    return jnp.sin(x) / jnp.cos(x)


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


@decomposes("atanh", single=True)
def atanh(x: Array, **_: object) -> Any:
    return 0.5 * jnp.log1p(2 * x / (1 - x))


@decomposes("asin", single=True)
def asin(x: Array, **_: object) -> Any:
    return lax.atan2(x, jnp.sqrt((1 - x) * (1 + x)))


@decomposes("acos", single=True)
def acos(x: Array, **_: object) -> Any:
    return lax.atan2(jnp.sqrt((1 - x) * (1 + x)), x)


@decomposes("atan", single=True)
def atan(x: Array, **_: object) -> Any:
    return lax.atan2(x, jnp.ones_like(x))


@decomposes("atan2", single=True)
def atan2(y: Array, x: Array, **_: object) -> Any:
    """Two zeros have no quotient, nor have two infinities; the signs of zeros choose the side."""
    rise, run = jnp.abs(y), jnp.abs(x)
    angle = lax.atan(jnp.where(rise == run, jnp.sign(rise), rise / run))
    angle = jnp.where(_is_negative(x), jnp.pi - angle, angle)
    return angle * jnp.where(_is_negative(y), -1, 1)


def _is_negative(x: Array) -> Any:
    """Also of zeros: one divided by the negative one is below zero."""
    return (x < 0) | (1 / x < 0)


@decomposes("clamp")
def clamp(low: Array, x: Array, high: Array, **_: object) -> Any:
    return lax.min(lax.max(x, low), high)


def to_even(equation: Any) -> bool:
    """Whether halves are rounded to the nearest even number, as targets round."""
    return int(equation.params["rounding_method"]) == 1


@decomposes("round")
def round_away(x: Array, **_: object) -> Any:
    """Halves away from zero."""
    size = jnp.abs(x)
    whole = jnp.floor(size)
    return jnp.sign(x) * (whole + (size - whole >= 0.5).astype(x.dtype))


@decomposes("is_finite")
def is_finite(x: Array, **_: object) -> Any:
    return jnp.abs(x) < jnp.inf


@decomposes("lt_to")
def less_in_order(x: Array, y: Array) -> Any:
    """Compares in the order of sorting, with NaN as the largest number."""
    return (x < y) | (_is_nan(y) & ~_is_nan(x)) if _has_nan(x) else x < y


@decomposes("le_to")
def less_equal_in_order(x: Array, y: Array) -> Any:
    return (x <= y) | _is_nan(y) if _has_nan(x) else x <= y


@decomposes("eq_to")
def equal_in_order(x: Array, y: Array) -> Any:
    return (x == y) | (_is_nan(x) & _is_nan(y)) if _has_nan(x) else x == y


def _has_nan(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _is_nan(x: Array) -> Any:
    return x != x
