"""max_pool and avg_pool."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pax_export._foundations.check import checked_choice, checked_integer
from pax_export._foundations.errors import InvalidArgumentError
from pax_export._foundations.types import Array, DTypeLike

Window = int | Sequence[int]
Padding = str | Sequence[Sequence[int]]


def max_pool(
    value: Array,
    window_shape: Window,
    strides: Window,
    padding: Padding,
    channel_axis: int | None = -1,
) -> jax.Array:
    """Takes the largest element of each window.

    Args:
        value: an array whose first axis is the batch.
        window_shape: the size of the window along each axis, e.g. ``(2, 2, 1)``; missing axes at
            the front are 1.  A single integer is for all axes but the first and
            ``channel_axis``; other than 1 it is deprecated.
        strides: the step of the window along each axis, in the same form.
        padding: ``"SAME"``, ``"VALID"``, or a list with a pair ``(before, after)`` for each axis,
            e.g. ``[(0, 1), (0, 1), (0, 0)]``; missing axes at the front are not padded.
        channel_axis: the axis that a single integer leaves alone, or None.

    Returns:
        An array of the same rank and dtype.

    Raises:
        InvalidArgumentError: (a ValueError and an AssertionError) an unknown
            padding, an axis out of range, or a sequence longer than the rank.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> pax.max_pool(jnp.ones((2, 8, 8, 3)), (2, 2, 1), (2, 2, 1), "SAME").shape
        (2, 4, 4, 3)
    """
    x = jnp.asarray(value)
    window, steps, pads = _window_geometry(
        "max_pool", x, window_shape, strides, padding, channel_axis
    )
    return jax.lax.reduce_window(x, _least_element(x.dtype), jax.lax.max, window, steps, pads)


def avg_pool(
    value: Array,
    window_shape: Window,
    strides: Window,
    padding: Padding,
    channel_axis: int | None = -1,
) -> jax.Array:
    """Takes the mean of each window; padded elements do not count.

    Args:
        value: an array whose first axis is the batch.
        window_shape: the size of the window along each axis; see `max_pool`.
        strides: the step of the window along each axis, in the same form.
        padding: ``"SAME"``, ``"VALID"``, or a list with a pair ``(before, after)`` for each axis,
            e.g. ``[(0, 1), (0, 1), (0, 0)]``; missing axes at the front are not padded.
        channel_axis: the axis that a single integer leaves alone, or None.

    Returns:
        An array of the same rank; float for integers.

    Raises:
        InvalidArgumentError: (a ValueError and an AssertionError) an unknown
            padding, an axis out of range, or a sequence longer than the rank.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> pax.avg_pool(jnp.ones((2, 8, 8, 3)), (2, 2, 1), (2, 2, 1), "VALID").shape
        (2, 4, 4, 3)
    """
    x = jnp.asarray(value)
    window, steps, pads = _window_geometry(
        "avg_pool", x, window_shape, strides, padding, channel_axis
    )
    dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.dtype("float32")
    x = x.astype(jnp.promote_types(dtype, jnp.float32))  # sums of halves overflow
    total = _sum_of_windows(x, window, steps, pads)
    if padding == "VALID":
        return (total / math.prod(window)).astype(dtype)
    # How many elements of a window are real depends on the pooled axes alone.
    shape = [1 if size == 1 else x.shape[axis] for axis, size in enumerate(window)]
    ones_steps = tuple([1 if size == 1 else step for size, step in zip(window, steps)])
    counts = _sum_of_windows(jnp.ones(shape, x.dtype), window, ones_steps, pads)
    return (total / counts).astype(dtype)


def _sum_of_windows(
    x: jax.Array, window: Sequence[int], steps: Sequence[int], pads: Sequence[tuple[int, int]]
) -> jax.Array:
    return jax.lax.reduce_window(x, np.zeros((), x.dtype), jax.lax.add, window, steps, pads)


def _least_element(dtype: DTypeLike) -> np.ndarray:
    """The element that every other is at least as large as."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.asarray(-np.inf, dtype)
    return np.asarray(False if jnp.issubdtype(dtype, jnp.bool_) else jnp.iinfo(dtype).min, dtype)


def _window_geometry(
    where: str,
    x: jax.Array,
    window_shape: Window,
    strides: Window,
    padding: Padding,
    channel_axis: int | None,
) -> tuple[tuple[int, ...], tuple[int, ...], list[tuple[int, int]]]:
    """Window, strides and padding of each axis; axes that are not pooled may be symbolic."""
    if channel_axis is not None and not -x.ndim <= operator.index(channel_axis) < x.ndim:
        raise InvalidArgumentError(
            "The channel axis is out of range.",
            where=f"{where}.channel_axis",
            got=f"{channel_axis} for shape {x.shape}",
            write="an axis of the input, or None if there are no channels",
        )
    fixed = {0} if channel_axis is None else {0, channel_axis % x.ndim}
    window = _each_axis(window_shape, x, fixed, f"{where}.window_shape")
    steps = _each_axis(strides, x, fixed, f"{where}.strides")
    if not isinstance(padding, str):
        return window, steps, _padding_pairs(padding, x, window, f"{where}.padding")
    checked_choice(padding, ("SAME", "VALID"), f"{where}.padding")
    pads = []
    for size, width, step in zip(x.shape, window, steps):
        if width == 1 == step or padding == "VALID":
            pads.append((0, 0))
        else:
            pads += jax.lax.padtype_to_pads((size,), (width,), (step,), padding)
    return window, steps, pads


def _padding_pairs(
    padding: Sequence[Sequence[int]], x: jax.Array, window: tuple[int, ...], where: str
) -> list[tuple[int, int]]:
    """A pair for each axis; less than a window each, so that every window has a real element."""
    try:
        pairs = [(operator.index(before), operator.index(after)) for before, after in padding]
    except (TypeError, ValueError):
        pairs = None
    if pairs is not None and len(pairs) <= x.ndim:
        pairs = [(0, 0)] * (x.ndim - len(pairs)) + pairs
        if all(0 <= size < width for pair, width in zip(pairs, window) for size in pair):
            return pairs
    raise InvalidArgumentError(
        "The padding of a pool needs a pair (before, after) for each axis, "
        "each less than the window there.",
        where=where,
        got=f"{padding!r} for shape {x.shape} and windows {window}",
        write=f"'SAME', 'VALID' or {[(0, width - 1) for width in window[1:]]}",
    )


def _each_axis(sizes: Window, x: jax.Array, fixed: set[int], where: str) -> tuple[int, ...]:
    if not isinstance(sizes, Sequence):
        size = checked_integer(sizes, where, least=1)
        each = tuple([1 if axis in fixed else size for axis in range(x.ndim)])
        if size != 1:
            warnings.warn(
                f"A single integer for {where} is deprecated, because it leaves to the "
                f"rank which axes it means; write {each[1:]}.",
                DeprecationWarning,
                stacklevel=4,
            )
        return each
    if len(sizes) > x.ndim:
        raise InvalidArgumentError(
            "The window has more sizes than the input has axes.",
            where=where,
            got=f"{tuple(sizes)} for shape {x.shape}",
            write=f"at most {x.ndim} integers",
        )
    missing = (1,) * (x.ndim - len(sizes))
    return missing + tuple([checked_integer(size, where, least=1) for size in sizes])
