"""Operations on complex numbers, as functions of real and imaginary parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pax_export.export.portable.kept import call, fourier_matrix
from pax_export.export.portable.sizes import trace


class ComplexPair(NamedTuple):
    """Complex numbers as two arrays of one shape."""

    real: Any
    imag: Any


#: By the name of the primitive: ``function(*operands, **parameters)``.  Operands and results are
#: arrays, or pairs if they are complex.
COMPLEX: dict[str, Callable[..., Any]] = {}


def half_dtype(dtype: Any) -> Any:
    """The dtype of the parts of a complex dtype; None for any other."""
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return None
    return jnp.finfo(dtype).dtype


def on_pairs(equation: Any) -> Any:
    """Traces an operation on complex numbers as a function of pairs.

    Each complex operand and result of the traced program is two arrays, the real part first.
    """
    function = COMPLEX[equation.primitive.name]
    operands = [atom.aval for atom in equation.invars]
    halves = [half_dtype(each.dtype) for each in operands]
    structs = [
        jax.ShapeDtypeStruct(each.shape, half or each.dtype)
        for each, half in zip(operands, halves)
        for _ in range(2 if half else 1)
    ]

    def run(*parts: Any, **parameters: Any) -> Any:
        left = iter(parts)
        given = [ComplexPair(next(left), next(left)) if half else next(left) for half in halves]
        return jax.tree.leaves(function(*given, **parameters))

    return trace(run, structs, equation.params)


def _of_complex(*names: str) -> Callable[[Callable], Callable]:
    def register(function: Callable) -> Callable:
        COMPLEX.update(dict.fromkeys(names, function))
        return function

    return register


def _pair(x: Any) -> ComplexPair:
    return x if isinstance(x, ComplexPair) else ComplexPair(x, jnp.zeros_like(x))


def _scaled(x: ComplexPair, factor: Any) -> ComplexPair:
    return ComplexPair(x.real * factor, x.imag * factor)


# --- parts and arithmetic -----------------------------------------------------


@_of_complex("complex")
def _complex(x: Any, y: Any, **_: object) -> ComplexPair:
    return ComplexPair(*jnp.broadcast_arrays(x, y))


@_of_complex("real")
def _real(x: ComplexPair, **_: object) -> Any:
    return x.real


@_of_complex("imag")
def _imag(x: ComplexPair, **_: object) -> Any:
    return x.imag


@_of_complex("conj")
def _conj(x: Any, **_: object) -> ComplexPair:
    x = _pair(x)
    return ComplexPair(x.real, -x.imag)


@_of_complex("neg")
def _neg(x: ComplexPair, **_: object) -> ComplexPair:
    return ComplexPair(-x.real, -x.imag)


@_of_complex("add", "add_any")
def _add(x: ComplexPair, y: ComplexPair, **_: object) -> ComplexPair:
    return ComplexPair(x.real + y.real, x.imag + y.imag)


@_of_complex("sub")
def _sub(x: ComplexPair, y: ComplexPair, **_: object) -> ComplexPair:
    return ComplexPair(x.real - y.real, x.imag - y.imag)


@_of_complex("mul")
def _mul(x: ComplexPair, y: ComplexPair, **_: object) -> ComplexPair:
    return ComplexPair(x.real * y.real - x.imag * y.imag, x.real * y.imag + x.imag * y.real)


@_of_complex("div")
def _div(x: ComplexPair, y: ComplexPair, **_: object) -> ComplexPair:
    """Multiplies by the conjugate, with the divisor scaled against over- and underflow."""
    size = jnp.maximum(jnp.abs(y.real), jnp.abs(y.imag))
    size = jnp.where(size > 0, size, 1)
    small = _scaled(y, 1 / size)
    norm = small.real * small.real + small.imag * small.imag
    top = _mul(x, _conj(small))
    return ComplexPair(top.real / norm / size, top.imag / norm / size)


@_of_complex("abs")
def _abs(x: ComplexPair, **_: object) -> Any:
    """Scales by the larger part, because its square might overflow."""
    one, other = jnp.abs(x.real), jnp.abs(x.imag)
    large, small = jnp.maximum(one, other), jnp.minimum(one, other)
    ratio = small / jnp.where(large == 0, 1, large)
    return jnp.where(jnp.isinf(large), large, large * jnp.sqrt(1 + ratio * ratio))


@_of_complex("sign")
def _sign(x: ComplexPair, **_: object) -> ComplexPair:
    size = _abs(x)
    size = jnp.where(size == 0, 1, size)
    return ComplexPair(x.real / size, x.imag / size)


@_of_complex("eq")
def _eq(x: ComplexPair, y: ComplexPair, **_: object) -> Any:
    return (x.real == y.real) & (x.imag == y.imag)


@_of_complex("ne")
def _ne(x: ComplexPair, y: ComplexPair, **_: object) -> Any:
    return ~_eq(x, y)


@_of_complex("is_finite")
def _is_finite(x: ComplexPair, **_: object) -> Any:
    return jnp.isfinite(x.real) & jnp.isfinite(x.imag)


@_of_complex("convert_element_type")
def _convert(x: Any, *, new_dtype: Any, **_: object) -> Any:
    half = half_dtype(new_dtype)
    if half is None:  # the imaginary part is dropped, as jax does
        return x.real.astype(new_dtype)
    if not isinstance(x, ComplexPair):
        x = x.astype(half)
    x = _pair(x)
    return ComplexPair(x.real.astype(half), x.imag.astype(half))


@_of_complex("dot_general")
def _dot_general(x: Any, y: Any, *, dimension_numbers: Any, **_: object) -> ComplexPair:
    def times(left: Any, right: Any) -> Any:
        return lax.dot_general(left, right, dimension_numbers)

    if not isinstance(x, ComplexPair):
        return ComplexPair(times(x, y.real), times(x, y.imag))
    if not isinstance(y, ComplexPair):
        return ComplexPair(times(x.real, y), times(x.imag, y))
    real = times(x.real, y.real) - times(x.imag, y.imag)
    return ComplexPair(real, times(x.real, y.imag) + times(x.imag, y.real))


# --- functions ----------------------------------------------------------------


@_of_complex("exp")
def _exp(x: ComplexPair, **_: object) -> ComplexPair:
    size = jnp.exp(x.real)
    return ComplexPair(size * jnp.cos(x.imag), _times(size, jnp.sin(x.imag)))


def _times(size: Any, share: Any) -> Any:
    """A product that is 0 where the share is, however large the size."""
    return jnp.where(share == 0, share, size * share)


@_of_complex("log")
def _log(x: ComplexPair, **_: object) -> ComplexPair:
    return ComplexPair(jnp.log(_abs(x)), lax.atan2(x.imag, x.real))


@_of_complex("log1p")
def _log1p(x: ComplexPair, **_: object) -> ComplexPair:
    moved = ComplexPair(1 + x.real, x.imag)
    near = 0.5 * jnp.log1p(x.real * (2 + x.real) + x.imag * x.imag)
    size = jnp.where(_abs(x) < 0.5, near, jnp.log(_abs(moved)))
    return ComplexPair(size, lax.atan2(moved.imag, moved.real))


@_of_complex("sqrt")
def _sqrt(x: ComplexPair, **_: object) -> ComplexPair:
    """The larger part by a root, the other one by a quotient that loses no digits."""
    root = jnp.sqrt(0.5 * _abs(x) + 0.5 * jnp.abs(x.real))
    rest = x.imag / (2 * jnp.where(root == 0, 1, root))
    left = x.real < 0
    signed = jnp.where(x.imag < 0, -root, root)
    return ComplexPair(jnp.where(left, jnp.abs(rest), root), jnp.where(left, signed, rest))


@_of_complex("rsqrt")
def _rsqrt(x: ComplexPair, **_: object) -> ComplexPair:
    root = _sqrt(x)
    return _div(ComplexPair(jnp.ones_like(root.real), jnp.zeros_like(root.imag)), root)


@_of_complex("pow")
def _pow(x: Any, y: Any, **_: object) -> ComplexPair:
    return _exp(_mul(_log(_pair(x)), _pair(y)))


@_of_complex("sin")
def _sin(x: ComplexPair, **_: object) -> ComplexPair:
    return ComplexPair(
        _times(jnp.cosh(x.imag), jnp.sin(x.real)), jnp.cos(x.real) * jnp.sinh(x.imag)
    )


@_of_complex("cos")
def _cos(x: ComplexPair, **_: object) -> ComplexPair:
    return ComplexPair(
        jnp.cos(x.real) * jnp.cosh(x.imag), -_times(jnp.sinh(x.imag), jnp.sin(x.real))
    )


@_of_complex("sinh")
def _sinh(x: ComplexPair, **_: object) -> ComplexPair:
    return ComplexPair(
        jnp.sinh(x.real) * jnp.cos(x.imag), _times(jnp.cosh(x.real), jnp.sin(x.imag))
    )


@_of_complex("cosh")
def _cosh(x: ComplexPair, **_: object) -> ComplexPair:
    return ComplexPair(
        jnp.cosh(x.real) * jnp.cos(x.imag), _times(jnp.sinh(x.real), jnp.sin(x.imag))
    )


@_of_complex("tanh")
def _tanh(x: ComplexPair, **_: object) -> ComplexPair:
    """Uses tangents, which are bounded where the hyperbolic sine is not."""
    one, other = jnp.tanh(x.real), jnp.tan(x.imag)
    return _div(ComplexPair(one, other), ComplexPair(jnp.ones_like(one), one * other))


# --- Fourier transforms -------------------------------------------------------

#: Up to this length a transform is a product with one matrix; a longer one is split in two.
_LONGEST = 128
#: The maximum for a prime number of elements.
_LARGEST = 512
_FORWARD, _BACKWARD = -1.0, 1.0


@_of_complex("fft")
def _fft(x: Any, *, fft_type: Any, fft_lengths: Sequence[Any], **_: object) -> Any:
    """Multiplies by matrices of cosines and sines, axis by axis."""
    kind = str(getattr(fft_type, "name", fft_type)).rsplit(".", 1)[-1].upper()
    found = _pair(x)
    *outer, last = range(found.real.ndim - len(fft_lengths), found.real.ndim)
    direction = _BACKWARD if kind.startswith("I") else _FORWARD
    if kind != "IRFFT":
        found = _along(found, last, direction)
    if kind == "RFFT":
        kept = fft_lengths[-1] // 2 + 1
        found = ComplexPair(*(lax.slice_in_dim(each, 0, kept, axis=last) for each in found))
    for axis in outer:
        found = _along(found, axis, direction)
    if kind == "IRFFT":
        found = _to_real(found, fft_lengths[-1])
    if direction == _FORWARD:
        return found
    dtype = jax.tree.leaves(found)[0].dtype
    scale = 1 / jnp.asarray(math.prod(fft_lengths)).astype(dtype)
    return jax.tree.map(lambda part: part * scale, found)


def _to_real(x: ComplexPair, length: Any) -> Any:
    """Real numbers, from the half of their frequencies that is stored."""
    count = x.real.shape[-1]
    numbers = jnp.arange(count)
    is_end = (numbers == 0) | (2 * numbers == length)
    x = _scaled(x, jnp.where(is_end, 1, 2).astype(x.real.dtype))
    cosine, sine = fourier_matrix(count, length, length, x.real.dtype)
    return x.real @ cosine - x.imag @ sine


def _along(x: ComplexPair, axis: int, direction: float) -> ComplexPair:
    moved = ComplexPair(*(jnp.moveaxis(each, axis, -1) for each in x))
    found = _transform(moved, direction)
    return ComplexPair(*(jnp.moveaxis(each, -1, axis) for each in found))


def _transform(x: ComplexPair, direction: float) -> ComplexPair:
    """Along the last axis, without a scale."""
    length = x.real.shape[-1]
    if not isinstance(length, int):
        # Runtimes have the transform forwards; the other one is that of conjugates.
        found = call("dft", jnp.stack([x.real, -direction * x.imag], -1))
        return ComplexPair(found[..., 0], -direction * found[..., 1])
    two = _factor(length)
    if two == 1 and length > _LARGEST:
        return _chirped(x, direction)
    if two == 1:
        cosine, sine = fourier_matrix(length, length, length, x.real.dtype)
        return _product(x, cosine, direction * sine)
    # Columns, then twiddle factors, then rows, as in Cooley and Tukey.
    one = length // two
    columns = ComplexPair(*(_swapped(each, one, two) for each in x))
    found = _transform(columns, direction)
    cosine, sine = fourier_matrix(two, one, length, x.real.dtype)
    found = _mul(found, ComplexPair(cosine, direction * sine))
    rows = ComplexPair(*(jnp.swapaxes(each, -1, -2) for each in found))
    found = _transform(rows, direction)
    turned = (jnp.swapaxes(each, -1, -2) for each in found)
    return ComplexPair(*(each.reshape(*each.shape[:-2], length) for each in turned))


def _chirped(x: ComplexPair, direction: float) -> ComplexPair:
    """A transform of a large prime length by those of a power of two, as Bluestein does it."""
    length = x.real.shape[-1]
    size = 1 << (2 * length - 1).bit_length()
    numbers = np.arange(length)
    chirp = np.exp(direction * 1j * np.pi * (numbers * numbers % (2 * length)) / length)
    kernel = np.zeros(size, complex)
    kernel[:length] = chirp.conj()
    kernel[size - length + 1 :] = chirp.conj()[:0:-1]
    of_x, of_kernel = (_constant(each, x.real) for each in (chirp, np.fft.fft(kernel) / size))
    wide = [(0, 0)] * (x.real.ndim - 1) + [(0, size - length)]
    padded = ComplexPair(*(jnp.pad(each, wide) for each in _mul(x, of_x)))
    found = _transform(_mul(_transform(padded, _FORWARD), of_kernel), _BACKWARD)
    return _mul(ComplexPair(*(each[..., :length] for each in found)), of_x)


def _constant(values: np.ndarray, like: Any) -> ComplexPair:
    return ComplexPair(np.real(values).astype(like.dtype), np.imag(values).astype(like.dtype))


def _swapped(x: Any, one: int, two: int) -> Any:
    """Every `two`-th element in a row: [..., two, one]."""
    return jnp.swapaxes(x.reshape(*x.shape[:-1], one, two), -1, -2)


def _factor(length: Any) -> int:
    """The factor of a length next to its root, if it is long and has one."""
    if length <= _LONGEST:
        return 1
    return max(each for each in range(1, math.isqrt(length) + 1) if length % each == 0)


def _product(x: ComplexPair, cosine: Any, sine: Any) -> ComplexPair:
    return ComplexPair(x.real @ cosine - x.imag @ sine, x.real @ sine + x.imag @ cosine)
