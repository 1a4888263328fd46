"""Gradients of products over an axis, where the array has symbolic sizes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax import lax
from jax.interpreters import ad

_lock = threading.Lock()
_inside = 0  # how many threads and blocks are in `symbolic_products` now
_first: Any = None


@contextmanager
def symbolic_products() -> Iterator[None]:
    """Lets `jnp.prod` be differentiated in its block where some sizes are symbolic.

    jax's own rule multiplies halves of the axis, and puts all sizes of the array into
    one array of numpy for that, which takes no symbolic one, whichever axis it is of.
    """
    global _inside, _first
    with _lock:
        if not _inside:
            _first = ad.primitive_jvps[lax.reduce_prod_p]
            ad.primitive_jvps[lax.reduce_prod_p] = _rule
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                ad.primitive_jvps[lax.reduce_prod_p] = _first


def _rule(primals: Any, tangents: Any, *, axes: Sequence[int], **options: Any) -> Any:
    (values,) = primals
    if all(isinstance(size, int) for size in values.shape):
        return _first(primals, tangents, axes=axes, **options)

    def product(values: Any) -> Any:
        for axis in sorted(axes, reverse=True):
            along = _along_static if isinstance(values.shape[axis], int) else _along_symbolic
            values = along(values, axis)
        return values

    return jax.jvp(product, tuple(primals), tuple(tangents))


def _along_static(values: Any, axis: int) -> Any:
    """By halves, so that the gradient is as exact as the product."""
    size = values.shape[axis]
    if size == 0:
        shape = [each for place, each in enumerate(values.shape) if place != axis]
        return lax.full(shape, 1, values.dtype)
    while size > 1:
        half = size // 2
        rest = [lax.slice_in_dim(values, 2 * half, size, axis=axis)] if size % 2 else []
        pair = (lax.slice_in_dim(values, start, start + half, axis=axis) for start in (0, half))
        values = lax.concatenate([lax.mul(*pair), *rest], axis) if rest else lax.mul(*pair)
        size = half + size % 2
    return lax.squeeze(values, (axis,))


def _along_symbolic(values: Any, axis: int) -> Any:
    """One after the other: a loop is the only thing of a size that is not known."""
    ordered = jax.numpy.moveaxis(values, axis, 0)
    start = lax.full(ordered.shape[1:], 1, values.dtype)
    return lax.scan(lambda sofar, each: (sofar * each, None), start, ordered)[0]
