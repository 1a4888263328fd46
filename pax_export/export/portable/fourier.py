"""Fourier transforms along symbolic sizes.

XLA requires a static transform length. For a symbolic one, the defining sums are computed, a block
of frequencies at a time, as products with cosines and sines. The cost is quadratic in the length,
with memory for one block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import numpy as jnp

#: The number of frequencies computed at a time.
_BLOCK = 64
#: Frequency indices are multiplied in steps of this many bits, to stay within 32 bits.
_STEP, _STEPS = 8, 3
_FORWARD, _BACKWARD = -1, 1


def fourier_sums(operand: Any, *, fft_type: Any, fft_lengths: Sequence[Any], **_: object) -> Any:
    """Computes `jax.lax.fft`, axis by axis."""
    *outer, last = range(operand.ndim - len(fft_lengths), operand.ndim)
    kind = fft_type.name
    if kind == "IRFFT":
        for axis, length in zip(outer, fft_lengths):
            operand = _along(operand, axis, length, _BACKWARD)
        return _real_back(operand, fft_lengths[-1])
    direction = _BACKWARD if kind == "IFFT" else _FORWARD
    frequencies = fft_lengths[-1] // 2 + 1 if kind == "RFFT" else fft_lengths[-1]
    operand = _along(operand, last, fft_lengths[-1], direction, frequencies)
    for axis, length in zip(outer, fft_lengths):
        operand = _along(operand, axis, length, direction)
    return operand


def _along(operand: Any, axis: int, length: Any, direction: int, frequencies: Any = None) -> Any:
    """The first frequencies of the transform along one axis, of real or complex numbers."""
    frequencies = length if frequencies is None else frequencies
    operand = jnp.moveaxis(operand, axis, -1)
    if not isinstance(length, int):
        found = _sums(operand, length, frequencies, direction)
    elif jnp.iscomplexobj(operand):
        found = jax.lax.fft(operand, "ifft" if direction == _BACKWARD else "fft", (length,))
    else:
        found = jax.lax.fft(operand, "rfft", (length,))
    return jnp.moveaxis(found, -1, axis)


def _sums(operand: Any, length: Any, frequencies: Any, direction: int) -> Any:
    real, imaginary = operand.real, operand.imag
    is_complex = jnp.iscomplexobj(operand)
    size = jnp.asarray(length).astype(real.dtype)

    def block(cosine: Any, sine: Any) -> Any:
        sine = direction * sine
        if not is_complex:
            return jax.lax.complex(_product(real, cosine), _product(real, sine))
        return jax.lax.complex(
            _product(real, cosine) - _product(imaginary, sine),
            _product(real, sine) + _product(imaginary, cosine),
        )

    found = _blocks(block, length, length, frequencies, real.dtype)
    return found / size.astype(found.dtype) if direction == _BACKWARD else found


def _real_back(operand: Any, length: Any) -> Any:
    """Returns real numbers from the half of their frequencies."""
    if isinstance(length, int):
        return jax.lax.fft(operand, "irfft", (length,))
    weights = _pairs(operand.shape[-1], length).astype(operand.real.dtype)
    real = operand.real * weights
    imaginary = jnp.where(weights == 1, 0, operand.imag * weights)

    def block(cosine: Any, sine: Any) -> Any:
        return _product(real, cosine) - _product(imaginary, sine)

    found = _blocks(block, operand.shape[-1], length, length, real.dtype)
    return found / jnp.asarray(length).astype(found.dtype)


def _pairs(frequencies: Any, length: Any) -> Any:
    """Returns the number of frequencies of a whole transform that each of a real one represents."""
    number = jnp.arange(frequencies)
    return jnp.where((number == 0) | (2 * number == length), 1, 2)


def _product(values: Any, wave: Any) -> Any:
    return jnp.matmul(values, wave, precision=jax.lax.Precision.HIGHEST)


def _blocks(block: Callable, summed: Any, length: Any, rows: Any, dtype: Any) -> Any:
    """Applies `block` to cosines and sines of all rows, block by block.

    They are those of ``2 pi j k / length``, for j below `summed` and k below `rows`.
    """
    unsigned = jnp.uint32
    size = jnp.asarray(length).astype(unsigned)
    inner = jnp.arange(summed, dtype=unsigned)[:, None]
    turn = (2 * math.pi / jnp.asarray(length).astype(dtype)).astype(dtype)

    @jax.checkpoint  # so that a gradient also needs memory for one block only
    def step(_: Any, number: Any) -> tuple[None, Any]:
        row = number.astype(unsigned) * _BLOCK + jnp.arange(_BLOCK, dtype=unsigned)
        rest = jnp.zeros((), unsigned)
        for place in reversed(range(_STEPS)):  # the product of both is larger than 32 bits
            digit = (row >> (_STEP * place)) & (2**_STEP - 1)
            rest = (rest * 2**_STEP + inner * digit) % size
        angle = rest.astype(dtype) * turn
        return None, block(jnp.cos(angle), jnp.sin(angle))

    _, found = jax.lax.scan(step, None, jnp.arange((rows + _BLOCK - 1) // _BLOCK))
    found = jnp.moveaxis(found, 0, -2)
    return found.reshape(*found.shape[:-2], -1)[..., :rows]
