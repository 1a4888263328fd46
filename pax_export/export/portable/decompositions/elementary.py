"""Powers, exponentials, logarithms, trigonometric and hyperbolic functions; bits of numbers.

Series are used where the plain formula would lose digits; float64 has more terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core.primitives import random_gamma_p

from pax_export._foundations.types import Array, DTypeLike, Equation
from pax_export.export.portable.decompositions import NotDecomposedError, decomposes


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
def integer_pow(x: Array, *, y: int) -> Any:
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
def expm1(x: Array) -> Any:
    count = _terms(x, 9, 18)
    near = x * polynomial(x, [1 / math.factorial(n) for n in range(1, count + 1)])
    half = jnp.exp(x * 0.5)  # which a runtime has where the whole is nearly infinite
    return jnp.where(jnp.abs(x) < 0.5, near, half * half - 1)


@decomposes("log1p", single=True)
def log1p(x: Array) -> Any:
    """Near 0 by the series of the inverse hyperbolic tangent."""
    close = jnp.abs(x) < 0.3
    part = jnp.where(close, x, 0)
    part = part / (1 + 0.5 * part)  # twice the argument, to keep digits of tiny numbers
    count = _terms(x, 7, 12)
    near = part * polynomial(part * part, [0.25**n / (2 * n + 1) for n in range(count)])
    return jnp.where(close, near, jnp.log(1 + x))


@decomposes("sinh", single=True)
def sinh(x: Array) -> Any:
    odd = range(1, 2 * _terms(x, 6, 10), 2)
    near = x * polynomial(x * x, [1 / math.factorial(n) for n in odd])
    # exp(x) may be infinite where its half is not.
    half, other = jnp.exp(x * 0.5), jnp.exp(x * -0.5)
    far = 0.5 * half * half - 0.5 * other * other
    return jnp.where(jnp.abs(x) < 1, near, far)


@decomposes("cosh", single=True)
def cosh(x: Array) -> Any:
    half = jnp.exp(jnp.abs(x) * 0.5)
    return 0.5 * half * half + 0.5 / half / half


#: Beyond this the square of a number plus 1 is its square.
_LARGE = 1e9


def _log_of_double(x: Array) -> Any:
    """For large numbers, because a runtime's logarithm of the largest may be infinite."""
    return jnp.log(x * 0.25) + math.log(8)


@decomposes("asinh", single=True)
def asinh(x: Array) -> Any:
    size = jnp.abs(x)
    bounded = jnp.minimum(size, _LARGE)
    squared = bounded * bounded
    near = jnp.log1p(bounded + squared / (1 + jnp.sqrt(squared + 1)))
    far = _log_of_double(size)
    return jnp.sign(x) * jnp.where(size > _LARGE, far, near)


@decomposes("acosh", single=True)
def acosh(x: Array) -> Any:
    above = jnp.minimum(x, _LARGE) - 1
    near = jnp.log1p(above + jnp.sqrt(above * (above + 2)))
    far = _log_of_double(x)
    return jnp.where(x < 1, jnp.nan, jnp.where(x > _LARGE, far, near))


@decomposes("atan2", single=True)
def atan2(y: Array, x: Array) -> Any:
    """Two zeros have no quotient, nor have two infinities; the signs of zeros choose the side."""
    rise, run = jnp.abs(y), jnp.abs(x)
    angle = lax.atan(jnp.where(rise == run, jnp.sign(rise), rise / run))
    angle = jnp.where(_is_negative(x), jnp.pi - angle, angle)
    return angle * jnp.where(_is_negative(y), -1, 1)


@decomposes("atan", single=True)
def atan(x: Array) -> Any:
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
decomposes("clamp")(lambda low, x, high: lax.min(lax.max(x, low), high))
decomposes("is_finite")(lambda x: jnp.abs(x) < jnp.inf)
decomposes("square", any_dtype=True)(lambda x: x * x)
decomposes("one_minus_square", any_dtype=True)(lambda x: (1 - x) * (1 + x))

for _name, _function in {
    "rsqrt": lambda x: 1 / jnp.sqrt(x),
    "cbrt": lambda x: jnp.sign(x) * jnp.power(jnp.abs(x), 1 / 3),
    "exp2": lambda x: lax.pow(jnp.full_like(x, 2), x),
    "log2": lambda x: jnp.log(x) * (1 / math.log(2)),
    "tan": lambda x: jnp.sin(x) / jnp.cos(x),
    "atanh": lambda x: 0.5 * jnp.log1p(2 * x / (1 - x)),
    "asin": lambda x: lax.atan2(x, jnp.sqrt((1 - x) * (1 + x))),
    "acos": lambda x: lax.atan2(jnp.sqrt((1 - x) * (1 + x)), x),
}.items():
    decomposes(_name, single=True, any_dtype=True)(_function)


# --- Bits of numbers, and random bits ---


def _unsigned(x: Array) -> Any:
    dtype = jnp.dtype(x.dtype)
    return x if dtype.kind == "u" else lax.bitcast_convert_type(x, f"u{dtype.name}")


def _repeated(byte: int, x: Array) -> Any:
    """Returns a number of x's dtype with equal bytes."""
    return jnp.array(int.from_bytes(bytes([byte]) * x.dtype.itemsize), x.dtype)


@decomposes("population_count")
def population_count(x: Array) -> Any:
    """Sums of neighboring bits, pairs and nibbles; then of bytes."""
    count = _unsigned(x)
    count = count - ((count >> 1) & _repeated(0x55, count))
    pairs = _repeated(0x33, count)
    count = (count & pairs) + ((count >> 2) & pairs)
    count = (count + (count >> 4)) & _repeated(0x0F, count)
    shift = 8
    while shift < 8 * x.dtype.itemsize:
        count = count + (count >> shift)
        shift *= 2
    return (count & jnp.array(0xFF, count.dtype) if shift > 8 else count).astype(x.dtype)


@decomposes("clz")
def clz(x: Array) -> Any:
    """The bits that are not set when all below the highest one are."""
    filled, shift = _unsigned(x), 1
    while shift < 8 * x.dtype.itemsize:
        filled = filled | (filled >> shift)
        shift *= 2
    return population_count(~filled).astype(x.dtype)


@decomposes("mulhi")
def mulhi(x: Array, y: Array) -> Any:
    """The upper half of a product, by products of the halves of both."""
    half = 4 * x.dtype.itemsize
    one, other = _unsigned(x), _unsigned(y)
    low = jnp.array((1 << half) - 1, one.dtype)
    x_low, x_high, y_low, y_high = one & low, one >> half, other & low, other >> half
    cross = x_high * y_low + ((x_low * y_low) >> half)
    carry = x_low * y_high + (cross & low)
    high = x_high * y_high + (cross >> half) + (carry >> half)
    if jnp.dtype(x.dtype).kind == "u":
        return high
    high = lax.bitcast_convert_type(high, x.dtype)
    return high - jnp.where(x < 0, y, 0) - jnp.where(y < 0, x, 0)


@decomposes("nextafter")
def nextafter(x: Array, y: Array) -> Any:
    """The bits of a number without its sign are a whole number in the order of sizes."""
    dtype = jnp.dtype(x.dtype)
    whole = f"int{8 * dtype.itemsize}"
    bits = lax.bitcast_convert_type(x, whole)
    target = lax.bitcast_convert_type(y, whole)
    sign = jnp.array(jnp.iinfo(whole).min, whole)
    away = (jnp.abs(x) < jnp.abs(y)) & ((bits < 0) == (target < 0))
    moved = bits + jnp.where(away, 1, -1).astype(whole)
    smallest = (target & sign) | jnp.array(1, whole)
    moved = jnp.where(x == 0, smallest, moved)
    found = lax.bitcast_convert_type(moved, dtype)
    found = jnp.where(x == y, y, found)
    return jnp.where(jnp.isnan(x) | jnp.isnan(y), jnp.nan, found).astype(dtype)


@decomposes("bitcast_convert_type")
def bitcast_convert_type(x: Array, *, new_dtype: DTypeLike) -> Any:
    """Converts half precision by the bits of float32, which have the same layout."""
    new = jnp.dtype(new_dtype)
    if x.dtype == new:
        return x
    if "bfloat16" in (x.dtype, new) and x.dtype.itemsize == new.itemsize:
        if new != jnp.bfloat16:
            wide = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
            return lax.bitcast_convert_type((wide >> 16).astype(jnp.uint16), new)
        wide = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
        return lax.bitcast_convert_type(wide, jnp.float32).astype(new)
    if "float16" in (x.dtype, new) and x.dtype.itemsize == new.itemsize:
        if new != jnp.float16:
            return lax.bitcast_convert_type(_bits_of_half(x.astype(jnp.float32)), new)
        return _half_of_bits(lax.bitcast_convert_type(x, jnp.uint16)).astype(new)
    raise NotDecomposedError(f"from {x.dtype} to {new}")


def _bits_of_half(x: Array) -> Any:
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign, exponent = (bits >> 16) & 0x8000, (bits >> 23) & 0xFF
    normal = (((exponent - 112) << 10) & 0x7C00) | ((bits >> 13) & 0x3FF)
    small = (jnp.abs(x) * 2.0**24).astype(jnp.uint32)  # below 2**-14
    size = jnp.where(exponent < 113, small, normal)
    size = jnp.where(jnp.isinf(x), 0x7C00, jnp.where(jnp.isnan(x), 0x7E00, size))
    return (sign | size.astype(jnp.uint32)).astype(jnp.uint16)


def _half_of_bits(x: Array) -> Any:
    wide = x.astype(jnp.uint32)
    sign, exponent, fraction = (wide & 0x8000) << 16, (wide >> 10) & 0x1F, wide & 0x3FF
    normal = ((exponent + 112) << 23) | (fraction << 13)
    special = jnp.uint32(0x7F800000) | (fraction << 13)
    bits = sign | jnp.where(exponent == 0x1F, special, normal)
    small = fraction.astype(jnp.float32) * 2.0**-24
    small = jnp.where(sign == 0, small, -small)
    return jnp.where(exponent == 0, small, lax.bitcast_convert_type(bits, jnp.float32))


# --- random bits ------------------------------------------------------------


_TURNS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


@decomposes("threefry2x32")
def threefry2x32(first: Array, second: Array, one: Array, two: Array) -> tuple[Any, Any]:
    """Twenty rounds of sums and rotations of 32 bits."""
    keys = (first, second, first ^ second ^ jnp.uint32(_PARITY))
    one, two = one + keys[0], two + keys[1]
    for turn in range(5):
        for turns in _TURNS[turn % 2]:
            one = one + two
            two = one ^ ((two << turns) | (two >> (32 - turns)))
        one = one + keys[(turn + 1) % 3]
        two = two + keys[(turn + 2) % 3] + jnp.uint32(turn + 1)
    return one, two


@decomposes("iota_2x32_shape")
def iota_2x32_shape(*, shape: Sequence[Any]) -> tuple[Any, Any]:
    """The index of each element in two words; the upper one is 0 below 2**32."""
    low = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    return jnp.zeros_like(low), low


@decomposes("random_gamma")
def random_gamma(keys: Array, shapes: Array, *, log_space: bool) -> Any:
    """Samples as jax does, by rejection; its operations on keys are replaced in turn."""
    return random_gamma_p.impl(keys, shapes, log_space=log_space)
