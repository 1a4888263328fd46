"""Operations on complex numbers, as functions of real and imaginary parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pax_export._foundations.types import Array, DTypeLike, Equation
from pax_export.export.portable.sizes import trace


class ComplexPair(NamedTuple):
    """Complex numbers as two arrays of one shape."""

    real: Any
    imag: Any


#: By the name of the primitive: ``function(*operands, **parameters)``.  Operands and results are
#: arrays, or pairs if they are complex.
COMPLEX: dict[str, Callable[..., Any]] = {}


def half_dtype(dtype: DTypeLike) -> Any:
    """The dtype of the parts of a complex dtype; None for any other."""
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return None
    return jnp.finfo(dtype).dtype


def on_pairs(equation: Equation, structs: Sequence[Any]) -> Any:
    """Traces an operation on complex numbers as a function of pairs.

    Each complex operand and result of the traced program is two arrays, the real part first.
    """
    function = COMPLEX[equation.primitive.name]
    halves = [half_dtype(atom.aval.dtype) for atom in equation.invars]

    def run(*parts: Array, accuracy: object = None, **parameters: Any) -> Any:
        left = iter(parts)
        operands = [ComplexPair(next(left), next(left)) if half else next(left) for half in halves]
        return jax.tree.leaves(function(*operands, **parameters))

    return trace(run, structs, equation.params)


def on_complex(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        COMPLEX.update(dict.fromkeys(names, function))
        return function

    return register


def _pair(x: ComplexPair | jax.Array) -> ComplexPair:
    return x if isinstance(x, ComplexPair) else ComplexPair(x, jnp.zeros_like(x))


# --- parts and arithmetic -----------------------------------------------------


@on_complex("conj")
def _conj(x: ComplexPair | jax.Array, **_: object) -> ComplexPair:
    x = _pair(x)
    return ComplexPair(x.real, -x.imag)


def _swapped(x: ComplexPair) -> ComplexPair:
    return ComplexPair(x.imag, x.real)


@on_complex("mul")
def multiply(x: ComplexPair, y: ComplexPair, **_: object) -> ComplexPair:
    """Returns the products of two pairs."""
    return ComplexPair(x.real * y.real - x.imag * y.imag, x.real * y.imag + x.imag * y.real)


@on_complex("div")
def _div(x: ComplexPair, y: ComplexPair) -> ComplexPair:
    """Multiplies by the conjugate, with the divisor scaled against over- and underflow."""
    size = jnp.maximum(jnp.abs(y.real), jnp.abs(y.imag))
    factor = 1 / jnp.where(size > 0, size, 1)
    parts = [jnp.where(jnp.isinf(part), jnp.sign(part), part * factor) for part in y]
    small = ComplexPair(jnp.where(size == 0, 1, parts[0]), parts[1])
    norm = small.real * small.real + small.imag * small.imag
    top = multiply(x, _conj(small))
    return ComplexPair(top.real / norm / size, top.imag / norm / size)


@on_complex("abs")
def _abs(x: ComplexPair) -> Any:
    """Scales by the larger part, because its square might overflow."""
    one, other = jnp.abs(x.real), jnp.abs(x.imag)
    large, small = jnp.maximum(one, other), jnp.minimum(one, other)
    ratio = small / jnp.where(large == 0, 1, large)
    return jnp.where(jnp.isinf(large), large, large * jnp.sqrt(1 + ratio * ratio))


@on_complex("sign")
def _sign(x: ComplexPair) -> ComplexPair:
    size = _abs(x)
    size = jnp.where(size == 0, 1, size)
    return ComplexPair(x.real / size, x.imag / size)


@on_complex("convert_element_type")
def _convert(x: ComplexPair | jax.Array, *, new_dtype: DTypeLike, **_: object) -> Any:
    half = half_dtype(new_dtype)
    if half is None:  # the imaginary part is dropped, as jax does
        return x.real.astype(new_dtype)
    if not isinstance(x, ComplexPair):
        x = x.astype(half)
    x = _pair(x)
    return ComplexPair(x.real.astype(half), x.imag.astype(half))


@on_complex("dot_general")
def _dot_general(
    x: ComplexPair | jax.Array,
    y: ComplexPair | jax.Array,
    *,
    dimension_numbers: lax.DotDimensionNumbers,
    **_: object,
) -> ComplexPair:
    def times(left: Array, right: Array) -> Any:
        return lax.dot_general(left, right, dimension_numbers)

    if not isinstance(x, ComplexPair):
        return ComplexPair(times(x, y.real), times(x, y.imag))
    if not isinstance(y, ComplexPair):
        return ComplexPair(times(x.real, y), times(x.imag, y))
    real = times(x.real, y.real) - times(x.imag, y.imag)
    return ComplexPair(real, times(x.real, y.imag) + times(x.imag, y.real))


# --- functions ----------------------------------------------------------------


@on_complex("exp")
def _exp(x: ComplexPair) -> ComplexPair:
    size = jnp.exp(x.real)
    return ComplexPair(size * jnp.cos(x.imag), _times(size, jnp.sin(x.imag)))


def _times(size: Array, share: Array) -> Any:
    """A product that is 0 where the share is, however large the size."""
    return jnp.where(share == 0, share, size * share)


@on_complex("log")
def _log(x: ComplexPair) -> ComplexPair:
    return ComplexPair(jnp.log(_abs(x)), lax.atan2(x.imag, x.real))


@on_complex("log1p")
def _log1p(x: ComplexPair) -> ComplexPair:
    moved = ComplexPair(1 + x.real, x.imag)
    near = 0.5 * jnp.log1p(x.real * (2 + x.real) + x.imag * x.imag)
    size = jnp.where(_abs(x) < 0.5, near, jnp.log(_abs(moved)))
    return ComplexPair(size, lax.atan2(moved.imag, moved.real))


@on_complex("sqrt")
def _sqrt(x: ComplexPair) -> ComplexPair:
    """The larger part by a root, the other one by a quotient that loses no digits."""
    root = jnp.sqrt(0.5 * _abs(x) + 0.5 * jnp.abs(x.real))
    rest = x.imag / (2 * jnp.where(root == 0, 1, root))
    left = x.real < 0
    signed = jnp.where(x.imag < 0, -root, root)
    return ComplexPair(jnp.where(left, jnp.abs(rest), root), jnp.where(left, signed, rest))


def _hyperbolic(one: Callable[[Any], Any], other: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda x: ComplexPair(
        one(x.real) * jnp.cos(x.imag), _times(other(x.real), jnp.sin(x.imag))
    )


_sinh = on_complex("sinh")(_hyperbolic(jnp.sinh, jnp.cosh))
_cosh = on_complex("cosh")(_hyperbolic(jnp.cosh, jnp.sinh))


@on_complex("tanh")
def _tanh(x: ComplexPair) -> ComplexPair:
    """Uses tangents, which are bounded where the hyperbolic sine is not."""
    one, other = jnp.tanh(x.real), jnp.tan(x.imag)
    return _div(ComplexPair(one, other), ComplexPair(jnp.ones_like(one), one * other))


@on_complex("expm1")
def _expm1(x: ComplexPair) -> ComplexPair:
    """Without the 1 that the real part would lose digits to."""
    less = 2 * jnp.sin(x.imag * 0.5) ** 2
    real = jnp.expm1(x.real) * jnp.cos(x.imag) - less
    return ComplexPair(real, _times(jnp.exp(x.real), jnp.sin(x.imag)))


def _roots_around(x: ComplexPair) -> tuple[ComplexPair, ComplexPair]:
    """The roots of 1 - x and 1 + x, on the side of the cuts on which jax has them."""
    less = _conj(_sqrt(ComplexPair(1 - x.real, x.imag)))
    return less, _sqrt(ComplexPair(1 + x.real, x.imag))


@on_complex("asin")
def _asin(x: ComplexPair) -> ComplexPair:
    """Kahan, "Branch cuts for complex elementary functions"; so are the next two."""
    less, more = _roots_around(x)
    imag = jnp.arcsinh(multiply(_conj(less), more).imag)
    return ComplexPair(lax.atan2(x.real, multiply(less, more).real), imag)


@on_complex("acos")
def _acos(x: ComplexPair) -> ComplexPair:
    less, more = _roots_around(x)
    imag = jnp.arcsinh(multiply(_conj(more), less).imag)
    return ComplexPair(2 * lax.atan2(less.real, more.real), imag)


@on_complex("acosh")
def _acosh(x: ComplexPair) -> ComplexPair:
    less, more = (_sqrt(ComplexPair(x.real + step, x.imag)) for step in (-1, 1))
    real = jnp.arcsinh(multiply(_conj(less), more).real)
    return ComplexPair(real, 2 * lax.atan2(less.imag, more.real))


@on_complex("atanh")
def _atanh(x: ComplexPair) -> ComplexPair:
    squared = x.imag * x.imag
    size = jnp.abs(x.real)
    real = 0.25 * jnp.log1p(4 * size / ((1 - size) ** 2 + squared))
    turned = lax.atan2(2 * x.imag, (1 - size) * (1 + size) - squared)
    return ComplexPair(jnp.sign(x.real) * real, 0.5 * turned)


@on_complex("sort")
def _sort(
    *operands: ComplexPair | jax.Array, dimension: int, num_keys: int, is_stable: bool
) -> Any:
    """Sorts by the real part, then by the imaginary one."""
    keys, rest = (jax.tree.leaves(each) for each in (operands[:num_keys], operands[num_keys:]))
    return lax.sort((*keys, *rest), dimension, is_stable, len(keys))


@on_complex("iota")
def _iota(*, dtype: DTypeLike, shape: Sequence[Any], dimension: int, **_: object) -> ComplexPair:
    return _pair(lax.broadcasted_iota(half_dtype(dtype), shape, dimension))


def _inverse(x: ComplexPair) -> ComplexPair:
    return _div(ComplexPair(jnp.ones_like(x.real), jnp.zeros_like(x.imag)), x)


@on_complex("logistic")
def _logistic(x: ComplexPair) -> ComplexPair:
    """By the exponential that is not above 1."""
    below = x.real < 0
    sign = jnp.where(below, 1, -1)
    share = _exp(ComplexPair(sign * x.real, sign * x.imag))
    other = _inverse(ComplexPair(1 + share.real, share.imag))
    return ComplexPair(*map(partial(jnp.where, below), multiply(share, other), other))


COMPLEX.update(
    {
        "complex": lambda x, y: ComplexPair(*jnp.broadcast_arrays(x, y)),
        "real": lambda x: x.real,
        "imag": lambda x: x.imag,
        "eq": lambda x, y: (x.real == y.real) & (x.imag == y.imag),
        "ne": lambda x, y: ~((x.real == y.real) & (x.imag == y.imag)),
        "is_finite": lambda x: jnp.isfinite(x.real) & jnp.isfinite(x.imag),
        "rsqrt": lambda x: _inverse(_sqrt(x)),
        "pow": lambda x, y: _exp(multiply(_log(_pair(x)), _pair(y))),
        "sin": lambda x: _swapped(_sinh(_swapped(x))),
        "tan": lambda x: _swapped(_tanh(_swapped(x))),
        "asinh": lambda x: _swapped(_asin(_swapped(x))),
        "atan": lambda x: _swapped(_atanh(_swapped(x))),
        "cos": lambda x: _conj(_cosh(_swapped(x))),
    }
)
