"""Error, gamma and Bessel functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pax_export._foundations.types import Array
from pax_export.export.portable.decompositions import decomposes
from pax_export.export.portable.decompositions.elementary import polynomial

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
#: The largest number of terms: enough for parameters of some thousand.
_MOST = 1000
#: Giles, "Approximating the erfinv function", of w = -log(1 - x*x): below 5 in w - 2.5.
_ERF_INV_CENTRAL = (
    *(1.50140941, 0.246640727, -0.00417768164, -0.00125372503, 0.00021858087),
    *(-4.39150654e-06, -3.5233877e-06, 3.43273939e-07, 2.81022636e-08),
)
#: Beyond that in sqrt(w) - 3.
_ERF_INV_TAIL = (
    *(2.83297682, 1.00167406, 0.00943887047, -0.0076224613, 0.00573950773),
    *(-0.00367342844, 0.00134934322, 0.000100950558, -0.000200214257),
)
#: Lanczos' series of the gamma function, with g = 7, after a constant that is nearly 1.
_LANCZOS_FIRST = 0.99999999999980993227684700473478
_LANCZOS = (
    *(676.520368121885098567009190444019, -1259.13921672240287047156078755283),
    *(771.3234287776530788486528258894, -176.61502916214059906584551354),
    *(12.507343278686904814458936853, -0.13857109526572011689554707),
    *(9.984369578019570859563e-6, 1.50563273514931155834e-7),
)
_SQRT_PI = math.sqrt(math.pi)


@decomposes("erf", single=True)
def erf(x: Array) -> Any:
    """Uses a series below 1, and the tail of `erfc` above."""
    if x.dtype == jnp.float64:
        far = jnp.sign(x) * (1 - _erfc_fraction(jnp.abs(x)))
        return jnp.where(jnp.abs(x) < _FAR, _erf_series(x), far)
    inside = jnp.clip(x, -1, 1)
    series = [(-1) ** n * 2 / _SQRT_PI / (math.factorial(n) * (2 * n + 1)) for n in range(11)]
    near = inside * polynomial(inside * inside, series)
    far = jnp.sign(x) * (1 - _erfc_tail(jnp.abs(x)))
    return jnp.where(jnp.abs(x) < 1, near, far)


#: In float64, erf is a series below this, and erfc a continued fraction beyond.
_FAR = 3.0


def _erf_series(x: Array) -> Any:
    """A series of positive terms."""
    inside = jnp.clip(x, -_FAR, _FAR)
    series = [2.0**n / math.prod(range(1, 2 * n + 2, 2)) for n in range(70)]
    return 2 / _SQRT_PI * inside * jnp.exp(-inside * inside) * polynomial(inside * inside, series)


def _erfc_fraction(size: Array) -> Any:
    """A continued fraction; smaller numbers count as `_FAR`."""
    away = jnp.clip(size, _FAR, 1e3)
    fraction = away
    for n in range(60, 0, -1):
        fraction = away + n / 2 / fraction
    return jnp.exp(-away * away) / fraction / _SQRT_PI


@decomposes("erfc", single=True)
def erfc(x: Array) -> Any:
    """As in jax, so that large arguments keep digits that 1 - erf would lose."""
    size = jnp.abs(x)
    if x.dtype == jnp.float64:
        tail = _erfc_fraction(size)
        return jnp.where(size < _FAR, 1 - _erf_series(x), jnp.where(x < 0, 2 - tail, tail))
    tail = _erfc_tail(size)
    return jnp.where(size < 1, 1 - lax.erf(x), jnp.where(x < 0, 2 - tail, tail))


def _erfc_tail(size: Array) -> Any:
    """The tail of erfc for numbers from 1 on; smaller ones count as 1."""
    away = jnp.maximum(size, 1)
    inverse = 1 / (away * away)
    near, far = (polynomial(inverse, each) for each in (_ERFC_NEAR, _ERFC_FAR))
    tail = jnp.exp(-away * away) / away * jnp.where(away < 2, near, far)
    # The tail of an infinite number would be 0 times infinity.
    return jnp.where(away > _ERFC_NONE, 0, tail)


@decomposes("erf_inv", single=True)
def erf_inv(x: Array) -> Any:
    w = -jnp.log((1 - x) * (1 + x))
    near = polynomial(w - 2.5, _ERF_INV_CENTRAL)
    far = polynomial(jnp.sqrt(jnp.maximum(w, 5)) - 3, _ERF_INV_TAIL)
    single = x * jnp.where(jnp.abs(x) == 1, jnp.inf, jnp.where(w < 5, near, far))
    if x.dtype != jnp.float64:
        return single
    found = single
    for _step in range(3):  # Newton's steps, in the tail of logarithms
        size, rest = jnp.abs(found), lax.erfc(jnp.abs(found))
        tail = rest * (jnp.log(1 - jnp.abs(x)) - jnp.log(rest))
        apart = jnp.where(size < 1, lax.erf(size) - jnp.abs(x), tail)
        found = jnp.sign(x) * (size - apart * _SQRT_PI / 2 * jnp.exp(size * size))
    return jnp.where(jnp.abs(x) == 1, single, found)


def _lanczos(z: Array) -> tuple[Any, Any]:
    """The series for a z of at least 0, and its derivative."""
    series, slope = jnp.full_like(z, _LANCZOS_FIRST), jnp.zeros_like(z)
    for index, each in enumerate(_LANCZOS, 1):
        term = each / (z + index)
        series, slope = series + term, slope - term / (z + index)
    return series, slope


@decomposes("lgamma", single=True)
def lgamma(x: Array) -> Any:
    """The logarithm of |gamma|; numbers below a half by reflection."""
    reflected = x < 0.5
    z = jnp.where(reflected, -x, x - 1)
    t = z + 7.5
    logarithm = math.log(7.5) + jnp.log1p(z / 7.5)
    found = (z + 0.5 - t / logarithm) * logarithm + jnp.log(_lanczos(z)[0])
    found = found + 0.5 * math.log(2 * math.pi)
    size = jnp.abs(x)
    part = size - jnp.floor(size)
    part = jnp.where(part > 0.5, 1 - part, part)
    sine = jnp.log(jnp.sin(math.pi * part))
    found = jnp.where(reflected, math.log(math.pi) - sine - found, found)
    # So is a whole number that is not above 0, as all far below are.
    pole = reflected & (part == 0)
    return jnp.where(pole | (size == jnp.inf), jnp.inf, found)


@decomposes("digamma", single=True)
def digamma(x: Array) -> Any:
    reflected = x < 0.5
    z = jnp.where(reflected, -x, x - 1)
    t = z + 7.5
    series, slope = _lanczos(z)
    logarithm = math.log(7.5) + jnp.log1p(z / 7.5)
    found = logarithm + slope / series - 7 / t
    part = x + jnp.abs(jnp.floor(x + 0.5))
    angle = math.pi * part
    found = jnp.where(reflected, found - math.pi * jnp.cos(angle) / jnp.sin(angle), found)
    pole = (x <= 0) & (x == jnp.floor(x))
    return jnp.where(pole, jnp.where(x == 0, -jnp.inf, jnp.nan), found)


def _bessel(near: Sequence[float], far: Sequence[float], odd: bool) -> Callable[..., Any]:
    def bessel(x: Array) -> Any:
        size = jnp.abs(x)
        inside, outside = jnp.minimum(size, 3.75), jnp.maximum(size, 3.75)
        value = polynomial((inside / 3.75) ** 2, near)
        value = (inside * value if odd else value) * jnp.exp(-inside)
        # A runtime may have no root of the largest numbers.
        tail = polynomial(3.75 / outside, far) / (4 * jnp.sqrt(outside * 0.0625))
        value = jnp.where(size > 3.75, tail, value)
        return value * jnp.sign(x) if odd else value

    return bessel


decomposes("bessel_i0e", single=True, double=False)(_bessel(_I0_NEAR, _I0_FAR, odd=False))
decomposes("bessel_i1e", single=True, double=False)(_bessel(_I1_NEAR, _I1_FAR, odd=True))


def _until_small(step: Callable[..., Any], start: tuple[Any, ...]) -> Any:
    """Runs ``step(number, state) -> (state, change)``; the first of a state is the result."""
    bit = float(jnp.finfo(jnp.float32).eps)

    def goes_on(carry: tuple[Array, ...]) -> Any:
        number, _, left = carry
        return left & (number < _MOST)

    def again(carry: tuple[Array, ...]) -> Any:
        number, state, _ = carry
        state, change = step(number, state)
        return number + 1, state, jnp.any(change > bit)

    first = jnp.float32(1), start, jnp.bool_(True)
    return lax.while_loop(goes_on, again, first)[1][0]


def _gamma_series(a: Array, x: Array) -> Any:
    """The lower part, without its factor, where x is less than a + 1."""

    def step(number: Array, state: tuple[Array, ...]) -> Any:
        total, term = state
        term = term * x / (a + number)
        return (total + term, term), jnp.abs(term) / total

    return _until_small(step, (jnp.ones_like(a), jnp.ones_like(a)))


def _fraction(first: Array, pair: Callable[..., Any]) -> Any:
    """A continued fraction by Lentz: 1 / (first + a1 / (b1 + a2 / (b2 + ...)))."""
    tiny = 1e-30

    def away(value: Array) -> Any:
        return jnp.where(jnp.abs(value) < tiny, tiny, value)

    def step(number: Array, state: tuple[Array, ...]) -> Any:
        found, c, d = state
        a, b = pair(number)
        d = 1 / away(a * d + b)
        c = away(b + a / c)
        return (found * c * d, c, d), jnp.abs(c * d - 1)

    d = 1 / away(first)
    return _until_small(step, (d, jnp.full_like(d, 1 / tiny), d))


def _gamma_fraction(a: Array, x: Array) -> Any:
    """The upper part, without its factor, where x is more than a + 1."""
    return _fraction(x + 1 - a, lambda n: (-n * (n - a), x + 1 - a + 2 * n))


def _gamma_parts(a: Array, x: Array) -> tuple[Any, Any]:
    bad = (x < 0) | (a < 0) | ((a == 0) & (x == 0)) | jnp.isnan(a) | jnp.isnan(x)
    none, whole = x == 0, (x == jnp.inf) | (a == 0)
    plain = bad | none | whole
    a, x = jnp.where(plain, 1.0, a), jnp.where(plain, 1.0, x)
    below = x < a + 1
    factor = jnp.exp(a * jnp.log(x) - x - lax.lgamma(a + 1))  # finite at 0, where 1 / a is not
    lower = factor * _gamma_series(a, jnp.where(below, x, 0.5 * a))
    upper = factor * a * _gamma_fraction(a, jnp.where(below, a + 2, x))
    lower = jnp.where(below, lower, 1 - upper)
    upper = jnp.where(below, 1 - lower, upper)
    lower = jnp.where(none, 0.0, jnp.where(whole, 1.0, lower))
    upper = jnp.where(none, 1.0, jnp.where(whole, 0.0, upper))
    return jnp.where(bad, jnp.nan, lower), jnp.where(bad, jnp.nan, upper)


@decomposes("regularized_incomplete_beta", single=True, double=False)
def regularized_incomplete_beta(a: Array, b: Array, x: Array) -> Any:
    bad = (a < 0) | (b < 0) | (x < 0) | (x > 1) | jnp.isnan(a) | jnp.isnan(b) | jnp.isnan(x)
    bad = bad | ((a == b) & ((a == 0) | (a == jnp.inf)))
    none = (x == 0) | ((x < 1) & ((b == 0) | (a == jnp.inf)))
    whole = (x == 1) | ((x > 0) & ((a == 0) | (b == jnp.inf)))
    plain = bad | none | whole
    a, b, x = (jnp.where(plain, each, value) for each, value in ((1.0, a), (1.0, b), (0.5, x)))
    turned = x > (a + 1) / (a + b + 2)
    one, two = jnp.where(turned, b, a), jnp.where(turned, a, b)
    at = jnp.where(turned, 1 - x, x)
    logarithm = lax.lgamma(a + b) - lax.lgamma(a) - lax.lgamma(b)
    factor = jnp.exp(logarithm + one * jnp.log(at) + two * jnp.log1p(-at)) / one

    def pair(number: Array) -> Any:
        m = jnp.floor(number / 2)
        even = m * (two - m) * at / ((one + 2 * m - 1) * (one + 2 * m))
        odd = -(one + m) * (one + two + m) * at / ((one + 2 * m) * (one + 2 * m + 1))
        return jnp.where(number % 2 == 0, even, odd), jnp.ones_like(at)

    found = factor * _fraction(jnp.ones_like(at), pair)
    found = jnp.where(turned, 1 - found, found)
    found = jnp.where(none, 0.0, jnp.where(whole, 1.0, found))
    return jnp.where(bad, jnp.nan, found)


@decomposes("zeta", single=True, double=False)
def zeta(s: Array, q: Array) -> Any:
    """Hurwitz' zeta by nine terms, and Euler's and Maclaurin's sum of the rest."""
    total = sum((jnp.power(q + k, -s) for k in range(9)), jnp.zeros_like(q))
    far = q + 9
    last = jnp.power(far, -s)
    total = total + last * far / (s - 1) + 0.5 * last
    factor = s / far * last
    for index, each in enumerate(_BERNOULLI):
        total = total + each * factor
        factor = factor * (s + 2 * index + 1) * (s + 2 * index + 2) / far**2
    pole = jnp.where((s % 2) == 0, jnp.inf, jnp.nan)
    total = jnp.where(s < 1, jnp.nan, total)
    total = jnp.where((q <= 0) & (q == jnp.floor(q)), pole, total)
    return jnp.where(s == 1, jnp.inf, total)


@decomposes("polygamma", single=True, double=False)
def polygamma(order: Array, x: Array) -> Any:
    sign = jnp.where(order % 2 == 1, 1.0, -1.0)
    found = sign * jnp.exp(lax.lgamma(order + 1)) * zeta(jnp.maximum(order, 1) + 1, x)
    found = jnp.where(order == 0, lax.digamma(x), found)
    return jnp.where((order < 0) | (order != jnp.floor(order)), jnp.nan, found)


@decomposes("igamma_grad_a", single=True, double=False)
def igamma_grad_a(a: Array, x: Array) -> Any:
    """The derivative of the series and the fraction, as far as they go."""
    slope = jax.jvp(lambda a: _gamma_parts(a, x)[0], (a,), (jnp.ones_like(a),))[1]
    return jnp.where((a <= 0) | (x < 0) | (x == jnp.inf) | jnp.isnan(a + x), jnp.nan, slope)


decomposes("igamma", single=True, double=False)(lambda a, x: _gamma_parts(a, x)[0])
decomposes("igammac", single=True, double=False)(lambda a, x: _gamma_parts(a, x)[1])
