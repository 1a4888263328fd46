"""Functions of `jax`, `jax.numpy` and `jax.lax` that accept symbolic sizes.

They have the arguments of jax's functions, and call these unless a size is symbolic.

Example:
    >>> import jax
    >>> from pax_export.export import symbolic_numpy
    >>> (n,) = jax.export.symbolic_shape("n")
    >>> struct = jax.ShapeDtypeStruct((n,), "float32")
    >>> jax.eval_shape(lambda x: symbolic_numpy.linspace(0, 1, x.shape[0]), struct).shape
    (n,)
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.tree_util import tree_flatten, tree_leaves, tree_map, tree_unflatten

from pax_export._foundations.types import Array, ArrayLike, DTypeLike, PyTree, Size
from pax_export.export.portable.any_size import differentiable


def _with_fallback(first: Callable, fallback: Callable) -> Callable:
    """Calls jax's `first`; if it refuses a symbolic size, calls `fallback` instead."""

    @functools.wraps(first)
    def function(*args: Any, **kwargs: Any) -> Any:
        try:
            return first(*args, **kwargs)
        except Exception as error:  # of jax, for a symbolic size or a wrong call: `fallback` tells
            if not _is_symbolic(args, kwargs):
                raise
            try:
                result = fallback(*args, **kwargs)
            except TypeError:  # it has fewer parameters
                raise error from None
            if result is NotImplemented:
                raise
            return result

    function.__module__ = __name__
    return function


def _is_symbolic(*arguments: PyTree) -> bool:
    """Returns whether an argument, or a size of one, is symbolic."""
    is_one = jax.export.is_symbolic_dim
    leaves = tree_leaves(arguments)
    return any(is_one(e) or any(map(is_one, getattr(e, "shape", ()))) for e in leaves)


# --- numbers in a row ---------------------------------------------------------


def _linspace(
    start: ArrayLike, stop: ArrayLike, num: Size = 50, endpoint: bool = True, retstep: bool = False,
    dtype: DTypeLike | None = None, axis: int = 0,
) -> Any:  # fmt: skip
    wanted = dtype or jnp.result_type(float, start, stop)
    working = jnp.result_type(float, wanted)
    start, stop = jnp.broadcast_arrays(jnp.asarray(start, working), jnp.asarray(stop, working))
    indices = jnp.arange(num).reshape((-1,) + (1,) * start.ndim)
    steps = jnp.asarray(num - 1 if endpoint else num, working)
    share = indices.astype(working) / jnp.maximum(steps, 1)
    row = start * (1 - share) + stop * share
    if endpoint:  # exactly, but for one number alone, which is the first
        row = jnp.where((indices == num - 1) & (indices > 0), stop, row)
    if jnp.issubdtype(wanted, jnp.integer):
        row = jnp.floor(row)
    row = jnp.moveaxis(row, 0, axis).astype(wanted)
    step = jnp.where(steps > 0, (stop - start) / jnp.maximum(steps, 1), jnp.nan)
    return (row, step) if retstep else row


def _logspace(
    start: ArrayLike, stop: ArrayLike, num: Size = 50, endpoint: bool = True,
    base: ArrayLike = 10.0, dtype: DTypeLike | None = None, axis: int = 0,
) -> Any:  # fmt: skip
    row = jnp.power(base, _linspace(start, stop, num, endpoint, axis=axis))
    return row if dtype is None else row.astype(dtype)


def _arange(
    start: Size | float,
    stop: Size | float | None = None,
    step: Size | float = 1,
    dtype: DTypeLike | None = None,
) -> Any:
    """Handles whole numbers that are fractions of symbols."""
    numbers = (0, start, step) if stop is None else (start, stop, step)
    whole: list[Any] = [int(x) if isinstance(x, float) and x.is_integer() else x for x in numbers]
    if not all(isinstance(x, int) or jax.export.is_symbolic_dim(x) for x in whole):
        return NotImplemented
    first, last, by = whole
    return jnp.arange(first, last, by).astype(dtype or float)


def _indices(
    dimensions: Sequence[Any], dtype: DTypeLike | None = None, sparse: bool = False
) -> Any:
    rows = [jnp.arange(size).astype(dtype or int) for size in dimensions]
    grids = jnp.meshgrid(*rows, indexing="ij", sparse=sparse)
    return tuple(grids) if sparse else jnp.stack(grids)


def _diag_indices(n: Size, ndim: int = 2) -> Any:
    return (jnp.arange(n),) * ndim


# --- windows ------------------------------------------------------------------


def _make_window(shape: Callable[..., Any]) -> Callable:
    """A window by its values at shares from 0 to 1; that of size 1 is one."""

    def window(M: Size, *more: Any, **named: Any) -> Any:
        steps = jnp.arange(M).astype(float)
        share = steps / jnp.maximum(jnp.asarray(M - 1, steps.dtype), 1)
        return jnp.where(jnp.asarray(M) > 1, shape(share, *more, **named), 1.0)

    return window


def _cosine_window(*parts: float) -> Callable:
    def shape(share: Array) -> Any:
        turns = (part * jnp.cos(2 * math.pi * k * share) for k, part in enumerate(parts))
        return sum(turns, jnp.zeros_like(share))

    return _make_window(shape)


def _kaiser(share: Array, beta: ArrayLike) -> Any:
    return jnp.i0(beta * jnp.sqrt(1 - (2 * share - 1) ** 2)) / jnp.i0(jnp.asarray(beta, float))


# --- looking up ---------------------------------------------------------------


def _searchsorted(
    a: ArrayLike,
    v: ArrayLike,
    side: str = "left",
    sorter: ArrayLike | None = None,
    method: str = "scan",
    dtype: DTypeLike | None = None,
) -> Any:
    """Bisects often enough for any size; NaN is the largest number."""
    a, v = jnp.asarray(a), jnp.asarray(v)
    kind = jnp.promote_types(a.dtype, v.dtype)
    a, v = a.astype(kind), v.astype(kind)
    if sorter is not None:
        a = a[jnp.asarray(sorter)]
    size = jnp.asarray(a.shape[0], jnp.int32)
    padded = jnp.concatenate([a, jnp.zeros(1, kind)])  # never empty

    def halve(_: Any, ends: tuple[Array, Array]) -> Any:
        low, high = ends
        middle = low + (high - low) // 2
        there = padded[middle]
        after = _is_less(there, v) if side == "left" else ~_is_less(v, there)
        after = after & (low < high)
        return jnp.where(after, middle + 1, low), jnp.where(after, high, middle)

    start = jnp.zeros(v.shape, jnp.int32), jnp.broadcast_to(size, v.shape)
    return lax.fori_loop(0, 32, halve, start)[0].astype(dtype or int)


def _interp(
    x: ArrayLike,
    xp: ArrayLike,
    fp: ArrayLike,
    left: ArrayLike | str | None = None,
    right: ArrayLike | str | None = None,
    period: ArrayLike | None = None,
) -> Any:
    if period is not None or isinstance(left, str) or isinstance(right, str):
        return NotImplemented
    kind = jnp.result_type(float, x, xp, fp)
    x, xp, fp = (jnp.asarray(each, kind) for each in (x, xp, fp))
    after = jnp.clip(_searchsorted(xp, x, side="right"), 1, xp.shape[0] - 1)
    before = after - 1
    run, rise = xp[after] - xp[before], fp[after] - fp[before]
    flat = jnp.abs(run) <= jnp.spacing(jnp.finfo(kind).eps)
    found = fp[before] + jnp.where(flat, 0, (x - xp[before]) / jnp.where(flat, 1, run) * rise)
    found = jnp.where(x < xp[0], fp[0] if left is None else left, found)
    return jnp.where(x > xp[-1], fp[-1] if right is None else right, found)


def _is_less(one: Array, other: Array) -> Any:
    if not jnp.issubdtype(one.dtype, jnp.floating):
        return one < other
    return (one < other) | (jnp.isnan(other) & ~jnp.isnan(one))


# --- edges, sums over neighbors, differences ---------------------------------


def _pad(
    array: ArrayLike, pad_width: Any, mode: str | Callable = "constant", **options: Any
) -> Any:
    """Modes that repeat elements, by their indices."""
    find = _REPEATED.get(mode)
    if find is None or options.get("reflect_type", "even") != "even":
        return NotImplemented
    array = jnp.asarray(array)
    for axis, (before, after) in enumerate(_pad_pairs(pad_width, array.ndim)):
        if (before, after) != (0, 0):
            size = array.shape[axis]
            indices = jnp.arange(-before, size + after)
            array = jnp.take(array, find(indices, jnp.asarray(size)), axis=axis, mode="clip")
    return array


def _pad_pairs(pad_width: Any, count: int) -> list[tuple[Any, Any]]:
    if not isinstance(pad_width, (tuple, list)):
        return [(pad_width, pad_width)] * count
    if all(not isinstance(each, (tuple, list)) for each in pad_width):
        both = pad_width if len(pad_width) == 2 else (pad_width[0], pad_width[0])
        return [(both[0], both[1])] * count
    pairs = [(each[0], each[-1]) for each in pad_width]
    return pairs * count if len(pairs) == 1 else pairs


def _reflected(indices: Array, size: Array) -> Any:
    around = indices % jnp.maximum(2 * (size - 1), 1)
    return jnp.where(around < size, around, 2 * (size - 1) - around)


def _mirrored(indices: Array, size: Array) -> Any:
    around = indices % (2 * size)
    return jnp.where(around < size, around, 2 * size - 1 - around)


_REPEATED: dict[Any, Callable] = {
    "reflect": _reflected,
    "symmetric": _mirrored,
    "wrap": lambda indices, size: indices % size,
}


def _scan(
    f: Callable,
    init: PyTree,
    xs: PyTree = None,
    length: Any = None,
    *more: Any,
    **options: Any,
) -> Any:
    """A scan of symbolic `length`, which is that of its inputs, or of numbers without inputs."""
    leaves = tree_leaves(xs)
    if not jax.export.is_symbolic_dim(length) or any(x.shape[:1] != (length,) for x in leaves):
        return NotImplemented
    if leaves:
        return _SCAN(f, init, xs, None, *more, **options)
    return _SCAN(lambda carry, _: f(carry, xs), init, jnp.arange(length), None, *more, **options)


_SCAN, _PAD = lax.scan, jnp.pad


def _make_convolution(turned: bool) -> Callable:
    def convolve(
        a: Array, v: Array, mode: str = "full", *, precision: lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
    ) -> Any:  # fmt: skip
        a, v = jnp.asarray(a), jnp.asarray(v)
        swapped = isinstance(a.shape[0], int) and not isinstance(v.shape[0], int)
        if swapped:
            a, v = v, a
        size = v.shape[0]
        if not isinstance(size, int) or a.ndim != 1 or v.ndim != 1 or not size:
            return NotImplemented
        if mode != "full" and not a.shape[0] >= size:  # or the constraints of its size are used
            return NotImplemented
        if not turned and swapped:  # correlated with a longer operand
            return jnp.flip(_slide_kernel(jnp.conj(a), v, mode, precision, preferred_element_type))
        kernel = jnp.flip(v) if turned else jnp.conj(v)
        return _slide_kernel(a, kernel, mode, precision, preferred_element_type)

    return convolve


def _slide_kernel(
    a: jax.Array,
    kernel: jax.Array,
    mode: str,
    precision: lax.PrecisionLike,
    preferred: DTypeLike | None,
) -> Any:
    kind = jnp.result_type(a, kernel) if preferred else jnp.result_type(float, a, kernel)
    size = kernel.shape[0]
    pads = {"valid": (0, 0), "same": (size // 2, size - size // 2 - 1), "full": (size - 1,) * 2}
    rows = a.astype(kind)[None, None], kernel.astype(kind)[None, None]
    options: Any = {"precision": precision, "preferred_element_type": preferred}
    return lax.conv_general_dilated(*rows, (1,), [pads[mode]], **options)[0, 0]


def _gradient(f: ArrayLike, *spacing: ArrayLike, axis: int | Sequence[int] | None = None) -> Any:
    """For evenly spaced numbers."""
    f = jnp.asarray(f)
    axes = range(f.ndim) if axis is None else [axis] if isinstance(axis, int) else axis
    steps = list(spacing) * len(axes) if len(spacing) == 1 else list(spacing) or [1.0] * len(axes)
    if len(steps) != len(axes) or any(jnp.ndim(step) for step in steps):
        return NotImplemented
    found = [_slope_along(f, step, each) for step, each in zip(steps, axes)]
    return found[0] if len(found) == 1 else found


def _slope_along(f: Array, step: ArrayLike, axis: int) -> Any:
    f = jnp.moveaxis(f, axis, 0)
    f = f.astype(jnp.result_type(float, f))
    indices = jnp.arange(f.shape[0])
    after = jnp.concatenate([f[1:], f[-1:]])
    before = jnp.concatenate([f[:1], f[:-1]])
    at_end = (indices == 0) | (indices == indices.shape[0] - 1)
    apart = jnp.where(at_end, 1.0, 2.0).astype(f.dtype).reshape((-1,) + (1,) * (f.ndim - 1))
    return jnp.moveaxis((after - before) / (apart * step), 0, axis)


# --- along an axis --------------------------------------------------------------


def _associative_scan(fn: Callable, elems: Any, reverse: bool = False, axis: int = 0) -> Any:
    """Combines the elements one by one; `fn` gets elements with an axis of size 1."""
    elems = tree_map(jnp.asarray, elems)

    def step(before: Any, row: tuple[Array, Any]) -> tuple[Any, Any]:
        number, element = row
        element = tree_map(lambda one: jnp.expand_dims(one, axis), element)
        after = lax.cond(number > 0, lambda: fn(before, element), lambda: element)
        return after, tree_map(lambda one: jnp.squeeze(one, axis), after)

    rows = tree_map(lambda each: jnp.moveaxis(each, axis, 0), elems)
    numbers, begin = jnp.arange(tree_leaves(rows)[0].shape[0]), -1 if reverse else 0
    start = tree_map(lambda each: jnp.expand_dims(each[begin], axis), rows)
    inputs = (jnp.flip(numbers) if reverse else numbers), rows
    _, found = lax.scan(step, start, inputs, reverse=reverse)
    return tree_map(lambda each: jnp.moveaxis(each, 0, axis), found)


def _irfft(a: ArrayLike, n: Size | None = None, axis: int = -1, norm: str | None = None) -> Any:
    if norm is not None:
        return NotImplemented
    a = jnp.moveaxis(jnp.asarray(a), axis, -1)
    size = 2 * (a.shape[-1] - 1) if n is None else n
    wanted, available = size // 2 + 1, a.shape[-1]
    if wanted != available:  # it is unknown which is larger
        a = lax.pad(a, jnp.zeros((), a.dtype), [(0, 0, 0)] * (a.ndim - 1) + [(0, wanted, 0)])
        a = lax.slice(a, [0] * a.ndim, [*a.shape[:-1], wanted])
    return jnp.moveaxis(lax.fft(a, "irfft", (size,)), -1, axis)


# --- derivatives ------------------------------------------------------------------


def _make_derivative(transform: Callable) -> Callable:
    """Wraps a transform of jax, so that functions with symbolic sizes can be differentiated."""

    @functools.wraps(transform)
    def function(fun: Callable, *args: Any, **kwargs: Any) -> Any:
        return transform(for_any_size(fun), *args, **kwargs)

    function.__module__ = __name__
    function.__doc__ = f"As `jax.{transform.__name__}`, also along symbolic sizes."
    return function


def for_any_size(fun: Callable) -> Callable:
    """Wraps a function so that its program is rebuilt if it contains symbolic sizes."""

    @functools.wraps(fun)
    def function(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        positions = [position for position, leaf in enumerate(leaves) if _is_array(leaf)]

        def flat(*values: Array) -> Any:
            filled = list(leaves)
            for position, value in zip(positions, values):
                filled[position] = value
            positional, named = tree_unflatten(tree, filled)
            return fun(*positional, **named)

        values = [leaves[position] for position in positions]
        program, result = jax.make_jaxpr(flat, return_shape=True)(*values)
        rebuilt = differentiable(program)
        if rebuilt is program:
            return fun(*args, **kwargs)
        return tree_unflatten(tree_flatten(result)[1], jaxpr_as_fun(rebuilt)(*values))

    return function


def _is_array(value: PyTree) -> bool:
    return hasattr(value, "dtype") or isinstance(value, (int, float, complex))


linspace = _with_fallback(jnp.linspace, _linspace)
logspace = _with_fallback(jnp.logspace, _logspace)
arange = _with_fallback(jnp.arange, _arange)
indices = _with_fallback(jnp.indices, _indices)
diag_indices = _with_fallback(jnp.diag_indices, _diag_indices)
hanning = _with_fallback(jnp.hanning, _cosine_window(0.5, -0.5))
hamming = _with_fallback(jnp.hamming, _cosine_window(0.54, -0.46))
blackman = _with_fallback(jnp.blackman, _cosine_window(0.42, -0.5, 0.08))
bartlett = _with_fallback(jnp.bartlett, _make_window(lambda share: 1 - jnp.abs(2 * share - 1)))
kaiser = _with_fallback(jnp.kaiser, _make_window(_kaiser))
searchsorted = _with_fallback(jnp.searchsorted, _searchsorted)
interp = _with_fallback(jnp.interp, _interp)
pad = _with_fallback(_PAD, _pad)
scan = _with_fallback(_SCAN, _scan)
convolve = _with_fallback(jnp.convolve, _make_convolution(turned=True))
correlate = _with_fallback(jnp.correlate, _make_convolution(turned=False))
gradient = _with_fallback(jnp.gradient, _gradient)
associative_scan = _with_fallback(lax.associative_scan, _associative_scan)
irfft = _with_fallback(jnp.fft.irfft, _irfft)
grad = _make_derivative(jax.grad)
value_and_grad = _make_derivative(jax.value_and_grad)
vjp = _make_derivative(jax.vjp)
jvp = _make_derivative(jax.jvp)
jacfwd = _make_derivative(jax.jacfwd)
jacrev = _make_derivative(jax.jacrev)
hessian = _make_derivative(jax.hessian)

_here: ContextVar[bool] = ContextVar("pax_export_for_libraries", default=False)
_lock, _depth = threading.Lock(), 0


def _only_here(first: Callable, ours: Callable) -> Callable:
    """A function that is jax's `first` in all threads but in a block of `for_libraries`."""

    @functools.wraps(first)
    def function(*args: Any, **kwargs: Any) -> Any:
        return (ours if _here.get() else first)(*args, **kwargs)

    return function


_PAD_HERE, _SCAN_HERE = _only_here(_PAD, pad), _only_here(_SCAN, scan)


@contextlib.contextmanager
def for_libraries() -> Iterator[None]:
    """A block in which flax and haiku, which call `jax.numpy.pad` and `jax.lax.scan`, call ours.

    Both names in jax are replaced meanwhile, because jax asks for numbers before it binds a
    primitive; what other threads call is still jax's function.
    """

    def enter(step: int) -> None:
        global _depth
        with _lock:  # of exports in other threads
            _depth += step
            jnp.pad, lax.scan = (_PAD_HERE, _SCAN_HERE) if _depth else (_PAD, _SCAN)

    enter(1)
    token = _here.set(True)
    try:
        yield
    finally:
        _here.reset(token)
        enter(-1)


__all__ = [
    "arange",
    "associative_scan",
    "bartlett",
    "blackman",
    "convolve",
    "correlate",
    "diag_indices",
    "grad",
    "gradient",
    "hamming",
    "hanning",
    "hessian",
    "indices",
    "interp",
    "irfft",
    "jacfwd",
    "jacrev",
    "jvp",
    "kaiser",
    "linspace",
    "logspace",
    "pad",
    "scan",
    "searchsorted",
    "value_and_grad",
    "vjp",
]
