"""Fourier transforms, axis by axis, on real and imaginary parts.

One axis is transformed in two ways. `_by_matrices` is for runtimes: products with cosines and
sines, several of them for a long axis. `_by_xla` is for XLA, which has transforms of static
lengths; for a symbolic length it computes the defining sums, a block of frequencies at a time. The
cost is quadratic in the length, with memory for one block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from pax_export._foundations.types import Array, Size
from pax_export.export.portable.complex_numbers import ComplexPair, multiply, on_complex
from pax_export.export.portable.kept import call, fourier_matrix

#: Up to this length a transform is a product with one matrix; a longer one is split in two.
_LONGEST = 128
#: The maximum for a prime number of elements.
_LARGEST = 512
#: The number of frequencies of a block.
_BLOCK = 64
#: Frequency indices are multiplied in steps of this many bits, to stay within 32 bits.
_STEP, _STEPS = 8, 3
_FORWARD, _BACKWARD = -1.0, 1.0

#: ``along(x, length, frequencies, direction)`` returns the first frequencies along the last axis,
#: without a scale. The imaginary part of real numbers is None.
Along = Callable[[ComplexPair, Any, Any, float], ComplexPair]


@on_complex("fft")
def fourier_products(x: ComplexPair | jax.Array, **parameters: Any) -> Any:
    """Computes `jax.lax.fft` by products of matrices, on pairs."""
    pair = x if isinstance(x, ComplexPair) else ComplexPair(x, None)
    found = _transform(pair, _by_matrices, _times_matrix, **parameters)
    return found.real if found.imag is None else found


def fourier_sums(x: jax.Array, **parameters: Any) -> Any:
    """Computes `jax.lax.fft` along symbolic sizes, for XLA."""
    pair = ComplexPair(x.real, x.imag if jnp.iscomplexobj(x) else None)
    found = _transform(pair, _by_xla, _times_blocks, **parameters)
    return found.real if found.imag is None else lax.complex(*found)


def _transform(
    x: ComplexPair,
    along: Along,
    sums: Along,
    *,
    fft_type: Any,
    fft_lengths: Sequence[Any],
    **_: object,
) -> ComplexPair:
    *outer, last = range(x.real.ndim - len(fft_lengths), x.real.ndim)
    kind, length = fft_type.name, fft_lengths[-1]
    direction = _BACKWARD if kind.startswith("I") else _FORWARD

    def along_axis(x: ComplexPair, axis: int, length: Size, frequencies: Size) -> ComplexPair:
        moved = jax.tree.map(lambda part: jnp.moveaxis(part, axis, -1), x)
        found = along(moved, length, frequencies, direction)
        return jax.tree.map(lambda part: jnp.moveaxis(part, -1, axis), found)

    if kind != "IRFFT":
        x = along_axis(x, last, length, length // 2 + 1 if kind == "RFFT" else length)
    for axis, size in zip(outer, fft_lengths):
        x = along_axis(x, axis, size, size)
    if kind == "IRFFT":
        x = ComplexPair(_to_real(x, length, along, sums), None)
    if direction == _FORWARD:
        return x
    scale = 1 / jnp.asarray(math.prod(fft_lengths)).astype(x.real.dtype)
    return jax.tree.map(lambda part: part * scale, x)


def _to_real(x: ComplexPair, length: Size, along: Along, sums: Along) -> Any:
    """Returns real numbers from the half of their frequencies that is stored."""
    count = x.real.shape[-1]
    if isinstance(length, int) and length > _LARGEST:  # the other half are conjugates
        rest = (jnp.flip(part[..., 1 : length - count + 1], -1) for part in x)
        parts = zip(x, (next(rest), -next(rest)))
        whole = ComplexPair(*(jnp.concatenate(each, -1) for each in parts))
        return along(whole, length, length, _BACKWARD).real
    numpy: Any = np if isinstance(length, int) else jnp
    numbers = numpy.arange(count)
    is_end = (numbers == 0) | (2 * numbers == length)  # which no other frequency is conjugate to
    one, none = (numpy.where(is_end, each, 2).astype(x.real.dtype) for each in (1, 0))
    return sums(ComplexPair(x.real * one, x.imag * none), length, length, _BACKWARD).real


def _product(x: ComplexPair, cosine: Array, sine: Array) -> ComplexPair:
    def times(values: Array, wave: Array) -> Any:
        return jnp.matmul(values, wave, precision=lax.Precision.HIGHEST)

    real, imag = times(x.real, cosine), times(x.real, sine)
    if x.imag is None:
        return ComplexPair(real, imag)
    return ComplexPair(real - times(x.imag, sine), imag + times(x.imag, cosine))


def _forwards(x: ComplexPair, direction: float, function: Callable[..., Any]) -> ComplexPair:
    """Applies a transform forwards; the other one is that of conjugates."""
    if direction == _FORWARD:
        return function(x)
    found = function(ComplexPair(x.real, -x.imag))
    return ComplexPair(found.real, -found.imag)


# --- for runtimes ---------------------------------------------------------------


def _by_matrices(x: ComplexPair, length: Size, frequencies: Size, direction: float) -> ComplexPair:
    if not isinstance(length, int):
        found = _forwards(x, direction, _by_runtime)
    elif (two := _factor(length)) > 1:
        found = _split(x, length, two, direction)
    elif length > _LARGEST:
        found = _chirped(x, length, direction)
    else:
        return _times_matrix(x, length, frequencies, direction)
    if frequencies is length:
        return found
    return jax.tree.map(lambda part: lax.slice_in_dim(part, 0, frequencies, axis=-1), found)


def _times_matrix(x: ComplexPair, length: Size, frequencies: Size, direction: float) -> ComplexPair:
    cosine, sine = fourier_matrix(x.real.shape[-1], frequencies, length, x.real.dtype)
    return _product(x, cosine, direction * sine)


def _by_runtime(x: ComplexPair) -> ComplexPair:
    imag = jnp.zeros_like(x.real) if x.imag is None else x.imag
    found = call("dft", jnp.stack([x.real, imag], -1))
    return ComplexPair(found[..., 0], found[..., 1])


def _factor(length: int) -> int:
    """The factor of a length next to its root, if it is long and has one."""
    if length <= _LONGEST:
        return 1
    return max(each for each in range(1, math.isqrt(length) + 1) if length % each == 0)


def _split(x: ComplexPair, length: int, two: int, direction: float) -> ComplexPair:
    """Transforms columns, multiplies by twiddle factors, transforms rows (Cooley and Tukey)."""
    one = length // two

    def swapped(x: ComplexPair) -> ComplexPair:
        return jax.tree.map(lambda part: jnp.swapaxes(part, -1, -2), x)

    table = jax.tree.map(lambda part: part.reshape(*part.shape[:-1], one, two), x)
    found = _by_matrices(swapped(table), one, one, direction)
    cosine, sine = fourier_matrix(two, one, length, x.real.dtype)
    found = multiply(found, ComplexPair(cosine, direction * sine))
    found = swapped(_by_matrices(swapped(found), two, two, direction))
    return jax.tree.map(lambda part: part.reshape(*part.shape[:-2], length), found)


def _chirped(x: ComplexPair, length: int, direction: float) -> ComplexPair:
    """A transform of a large prime length by those of a power of two, as Bluestein does it."""
    size = 1 << (2 * length - 1).bit_length()
    numbers = np.arange(length)
    chirp = np.exp(direction * 1j * np.pi * (numbers * numbers % (2 * length)) / length)
    kernel = np.zeros(size, complex)
    kernel[:length] = chirp.conj()
    kernel[size - length + 1 :] = chirp.conj()[:0:-1]
    of_x, of_kernel = (_constant(each, x.real) for each in (chirp, np.fft.fft(kernel) / size))
    wide = [(0, 0)] * (x.real.ndim - 1) + [(0, size - length)]
    turned = jax.tree.map(lambda part: x.real * part, of_x) if x.imag is None else multiply(x, of_x)
    padded = jax.tree.map(lambda part: jnp.pad(part, wide), turned)
    found = multiply(_by_matrices(padded, size, size, _FORWARD), of_kernel)
    found = _by_matrices(found, size, size, _BACKWARD)
    return multiply(jax.tree.map(lambda part: part[..., :length], found), of_x)


def _constant(values: np.ndarray, like: Array) -> ComplexPair:
    return ComplexPair(np.real(values).astype(like.dtype), np.imag(values).astype(like.dtype))


# --- for XLA --------------------------------------------------------------------


def _by_xla(x: ComplexPair, length: Size, frequencies: Size, direction: float) -> ComplexPair:
    def by_xla(x: ComplexPair) -> ComplexPair:
        kind, array = ("rfft", x.real) if x.imag is None else ("fft", lax.complex(*x))
        found = lax.fft(array, kind, (length,))
        return ComplexPair(found.real, found.imag)

    if isinstance(length, int):
        return _forwards(x, direction, by_xla)
    return _times_blocks(x, length, frequencies, direction)


def _times_blocks(x: ComplexPair, length: Size, frequencies: Size, direction: float) -> ComplexPair:
    unsigned, dtype = jnp.uint32, x.real.dtype
    size = jnp.asarray(length).astype(unsigned)
    inner = jnp.arange(x.real.shape[-1], dtype=unsigned)[:, None]
    turn = (2 * math.pi / jnp.asarray(length).astype(dtype)).astype(dtype)

    @jax.checkpoint  # so that a gradient also needs memory for one block only
    def step(_: Any, number: Array) -> tuple[None, ComplexPair]:
        row = number.astype(unsigned) * _BLOCK + jnp.arange(_BLOCK, dtype=unsigned)
        rest = jnp.zeros((), unsigned)
        for position in reversed(range(_STEPS)):  # the product of both is larger than 32 bits
            digit = (row >> (_STEP * position)) & (2**_STEP - 1)
            rest = (rest * 2**_STEP + inner * digit) % size
        angle = rest.astype(dtype) * turn
        return None, _product(x, jnp.cos(angle), direction * jnp.sin(angle))

    def joined(blocks: Array) -> Any:
        found = jnp.moveaxis(blocks, 0, -2)
        return found.reshape(*found.shape[:-2], -1)[..., :frequencies]

    _, found = lax.scan(step, None, jnp.arange((frequencies + _BLOCK - 1) // _BLOCK))
    return jax.tree.map(joined, found)
