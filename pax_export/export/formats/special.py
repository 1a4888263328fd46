"""Functions of mathematics in operations that every format has, and what none decomposes.

Each takes and gives arrays of jax, and is traced in the place of the operation of its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax import numpy as jnp

#: Abramowitz and Stegun, 9.8.1 to 9.8.4: below 3.75 in (x / 3.75)**2, and beyond in 3.75 / x.
_I0_NEAR = (1.0, 3.5156229, 3.0899424, 1.2067492, 0.2659732, 0.0360768, 0.0045813)
_I0_FAR = (
    *(0.39894228, 0.01328592, 0.00225319, -0.00157565, 0.00916281),
    *(-0.02057706, 0.02635537, -0.01647633, 0.00392377),
)
_I1_NEAR = (0.5, 0.87890594, 0.51498869, 0.15084934, 0.02658733, 0.00301532, 0.00032411)
_I1_FAR = (
    *(0.39894228, -0.03988024, -0.00362018, 0.00163801, -0.01031555),
    *(0.02282967, -0.02895312, 0.01787654, -0.00420059),
)
#: Moshier's erfcf of Cephes: between 1 and 2 in 1 / x**2, and beyond; 0 in float32 from 10.06 on.
_ERFC_NEAR = (
    *(5.638259427386472e-1, -2.741127028184656e-1, 3.404879937665872e-1),
    *(-4.944515323274145e-1, 6.210004621745983e-1, -5.824733027278666e-1),
    *(3.687424674597105e-1, -1.387039388740657e-1, 2.326819970068386e-2),
)
_ERFC_FAR = (
    *(5.641895067754075e-1, -2.820767439740514e-1, 4.218463358204948e-1),
    *(-1.015265279202700, 2.921019019210786, -7.495518717768503),
    *(1.297719955372516e1, -1.047766399936249e1),
)
_ERFC_NONE = 15.0
#: Bernoulli's numbers B2, B4, ... over (2j)!.
_BERNOULLI = (1 / 12, -1 / 720, 1 / 30240, -1 / 1209600, 1 / 47900160)
#: So many terms at most: enough for parameters of some thousand.
_MOST = 1000


def written_out(name: str, structs: Sequence[Any]) -> Callable[..., Any] | None:
    """The function for an operation and its operands; None where there is none as exact."""
    exact = all(each.dtype in ("float32", "float16", "bfloat16") for each in structs)
    return _in_float32(FUNCTIONS[name]) if exact and name in FUNCTIONS else None


def or_nan(decompose: Callable[[Any], tuple[Any, ...]], matrix: Any) -> tuple[Any, ...]:
    """The parts of a matrix; NaN where it has NaN or infinity, as LAPACK's are where it fails.

    Rotations would leave numbers among them that look like any others.
    """
    right = jnp.isfinite(matrix).all((-2, -1))[..., None]
    found = decompose(jnp.where(right[..., None], matrix, 0))
    ranks = (right if each.ndim < matrix.ndim else right[..., None] for each in found)
    return tuple(jnp.where(at, each, jnp.nan) for at, each in zip(ranks, found))


def _in_float32(function: Callable) -> Callable:
    def run(*operands: Any) -> Any:
        wide = [jnp.asarray(each, jnp.float32) for each in operands]
        return function(*wide).astype(operands[0].dtype)

    return run


def _polynomial(x: Any, coefficients: Sequence[float]) -> Any:
    total = jnp.full_like(x, coefficients[-1])
    for each in reversed(coefficients[:-1]):
        total = total * x + each
    return total


def _bessel_i0e(x: Any) -> Any:
    size = jnp.abs(x)
    inside, outside = jnp.minimum(size, 3.75), jnp.maximum(size, 3.75)
    near = _polynomial((inside / 3.75) ** 2, _I0_NEAR) * jnp.exp(-inside)
    far = _polynomial(3.75 / outside, _I0_FAR) / jnp.sqrt(outside)
    return jnp.where(size > 3.75, far, near)


def _bessel_i1e(x: Any) -> Any:
    size = jnp.abs(x)
    inside, outside = jnp.minimum(size, 3.75), jnp.maximum(size, 3.75)
    near = inside * _polynomial((inside / 3.75) ** 2, _I1_NEAR) * jnp.exp(-inside)
    far = _polynomial(3.75 / outside, _I1_FAR) / jnp.sqrt(outside)
    return jnp.where(size > 3.75, far, near) * jnp.sign(x)


def _erfc(x: Any) -> Any:
    """As jax has it, so that what is far out, where all is lost in 1 - erf, is no less exact."""
    size = jnp.abs(x)
    away = jnp.maximum(size, 1)
    inverse = 1 / (away * away)
    near, far = (_polynomial(inverse, each) for each in (_ERFC_NEAR, _ERFC_FAR))
    tail = jnp.exp(-away * away) / away * jnp.where(away < 2, near, far)
    # What is infinite has a tail of 0 times infinity, or the like.
    tail = jnp.where(away > _ERFC_NONE, 0, tail)
    return jnp.where(size < 1, 1 - lax.erf(x), jnp.where(x < 0, 2 - tail, tail))


def _is_negative(x: Any) -> Any:
    """Also of zeros: one divided by the negative one is below zero."""
    return (x < 0) | (1 / x < 0)


def _atan2(y: Any, x: Any) -> Any:
    """Two zeros have no quotient, nor have two infinities; the signs of zeros choose the side."""
    rise, run = jnp.abs(y), jnp.abs(x)
    angle = lax.atan(jnp.where(rise == run, jnp.sign(rise), rise / run))
    angle = jnp.where(_is_negative(x), jnp.pi - angle, angle)
    return angle * jnp.where(_is_negative(y), -1.0, 1.0)


def _until_small(step: Callable, start: tuple[Any, ...]) -> Any:
    """Runs ``step(number, state) -> (state, change)``; the first of a state is the result."""
    bit = float(jnp.finfo(jnp.float32).eps)

    def goes_on(carry: Any) -> Any:
        number, _, left = carry
        return left & (number < _MOST)

    def again(carry: Any) -> Any:
        number, state, _ = carry
        state, change = step(number, state)
        return number + 1, state, jnp.any(change > bit)

    first = jnp.float32(1), start, jnp.bool_(True)
    return lax.while_loop(goes_on, again, first)[1][0]


def _gamma_series(a: Any, x: Any) -> Any:
    """The lower part, without its factor, where x is less than a + 1."""

    def step(number: Any, state: Any) -> Any:
        total, term = state
        term = term * x / (a + number)
        return (total + term, term), jnp.abs(term) / total

    return _until_small(step, (1 / a, 1 / a))


def _fraction(first: Any, pair: Callable) -> Any:
    """A continued fraction by Lentz: 1 / (first + a1 / (b1 + a2 / (b2 + ...)))."""
    tiny = 1e-30

    def away(value: Any) -> Any:
        return jnp.where(jnp.abs(value) < tiny, tiny, value)

    def step(number: Any, state: Any) -> Any:
        found, c, d = state
        a, b = pair(number)
        d = 1 / away(a * d + b)
        c = away(b + a / c)
        return (found * c * d, c, d), jnp.abs(c * d - 1)

    d = 1 / away(first)
    return _until_small(step, (d, jnp.full_like(d, 1 / tiny), d))


def _gamma_fraction(a: Any, x: Any) -> Any:
    """The upper part, without its factor, where x is more than a + 1."""
    return _fraction(x + 1 - a, lambda n: (-n * (n - a), x + 1 - a + 2 * n))


def _gamma_parts(a: Any, x: Any) -> tuple[Any, Any]:
    bad = (x < 0) | (a < 0) | ((a == 0) & (x == 0)) | jnp.isnan(a) | jnp.isnan(x)
    none, whole = x == 0, (x == jnp.inf) | (a == 0)
    plain = bad | none | whole
    a, x = jnp.where(plain, 1.0, a), jnp.where(plain, 1.0, x)
    below = x < a + 1
    factor = jnp.exp(a * jnp.log(x) - x - lax.lgamma(a))
    lower = factor * _gamma_series(a, jnp.where(below, x, 0.5 * a))
    upper = factor * _gamma_fraction(a, jnp.where(below, a + 2, x))
    lower = jnp.where(below, lower, 1 - upper)
    upper = jnp.where(below, 1 - lower, upper)
    lower = jnp.where(none, 0.0, jnp.where(whole, 1.0, lower))
    upper = jnp.where(none, 1.0, jnp.where(whole, 0.0, upper))
    return jnp.where(bad, jnp.nan, lower), jnp.where(bad, jnp.nan, upper)


def _beta(a: Any, b: Any, x: Any) -> Any:
    bad = (a <= 0) | (b <= 0) | (x < 0) | (x > 1) | jnp.isnan(a + b + x)
    none, whole = x == 0, x == 1
    plain = bad | none | whole
    a, b, x = (jnp.where(plain, each, value) for each, value in ((1.0, a), (1.0, b), (0.5, x)))
    turned = x > (a + 1) / (a + b + 2)
    one, two = jnp.where(turned, b, a), jnp.where(turned, a, b)
    at = jnp.where(turned, 1 - x, x)
    logarithm = lax.lgamma(a + b) - lax.lgamma(a) - lax.lgamma(b)
    factor = jnp.exp(logarithm + one * jnp.log(at) + two * jnp.log1p(-at)) / one

    def pair(number: Any) -> Any:
        m = jnp.floor(number / 2)
        even = m * (two - m) * at / ((one + 2 * m - 1) * (one + 2 * m))
        odd = -(one + m) * (one + two + m) * at / ((one + 2 * m) * (one + 2 * m + 1))
        return jnp.where(number % 2 == 0, even, odd), jnp.ones_like(at)

    found = factor * _fraction(jnp.ones_like(at), pair)
    found = jnp.where(turned, 1 - found, found)
    found = jnp.where(none, 0.0, jnp.where(whole, 1.0, found))
    return jnp.where(bad, jnp.nan, found)


def _zeta(s: Any, q: Any) -> Any:
    """Hurwitz' zeta by nine terms, and Euler's and Maclaurin's sum of the rest."""
    total = sum((jnp.power(q + k, -s) for k in range(9)), jnp.zeros_like(q))
    far = q + 9
    last = jnp.power(far, -s)
    total = total + last * far / (s - 1) + 0.5 * last
    factor = s / far * last
    for place, each in enumerate(_BERNOULLI):
        total = total + each * factor
        factor = factor * (s + 2 * place + 1) * (s + 2 * place + 2) / far**2
    pole = jnp.where((s % 2) == 0, jnp.inf, jnp.nan)
    total = jnp.where((q <= 0) & (q == jnp.floor(q)), pole, total)
    return jnp.where(s == 1, jnp.inf, jnp.where(s < 1, jnp.nan, total))


def _polygamma(order: Any, x: Any) -> Any:
    sign = jnp.where(order % 2 == 1, 1.0, -1.0)
    found = sign * jnp.exp(lax.lgamma(order + 1)) * _zeta(jnp.maximum(order, 1) + 1, x)
    found = jnp.where(order == 0, lax.digamma(x), found)
    return jnp.where((order < 0) | (order != jnp.floor(order)), jnp.nan, found)


FUNCTIONS: dict[str, Callable] = {
    "bessel_i0e": _bessel_i0e,
    "bessel_i1e": _bessel_i1e,
    "erfc": _erfc,
    "atan2": _atan2,
    "igamma": lambda a, x: _gamma_parts(a, x)[0],
    "igammac": lambda a, x: _gamma_parts(a, x)[1],
    "regularized_incomplete_beta": _beta,
    "zeta": _zeta,
    "polygamma": _polygamma,
}
