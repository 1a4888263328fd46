"""The arrays to quantize, with their contracted axes; rounding to the nearest, or by GPTQ."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

from pax_export._foundations.types import Array, PyTree
from pax_export.core import (
    DeclaredArray,
    Module,
    declared_in,
    is_array,
    join_path,
    named_leaves,
    named_modules,
)
from pax_export.precision.quantized import GROUP, ArrayLike, Form, QuantizedArray, packed

#: Why an array is left.
NO_LAYER = "not a weight of a known layer"


class QuantizableArray(NamedTuple):
    """An array that can be quantized.

    Attributes:
        name: the path of the array.
        weight: the array.
        reduced: the contracted axes, counted from the last (-1); the others are channels.
        axis: the contracted axis of the groups.
        rank: the number of axes of one layer; axes before them are those of a scan.
        is_table: whether its rows are looked up.
    """

    name: str
    weight: Any
    reduced: tuple[int, ...]
    axis: int
    rank: int
    is_table: bool = False


def targets_of_layers(
    modules: list[tuple[str, Any]],
) -> Iterator[tuple[QuantizableArray, DeclaredArray]]:
    """The kernels and tables that layers in some modules declare."""
    seen = set()
    for path, module in modules:
        for below, layer in named_modules(module):
            if id(layer) in seen:
                continue
            seen.add(id(layer))
            for found in declared_in(layer).values():
                if found.declared.role in ("kernel", "table") and found.input_axes:
                    name = join_path(join_path(path, below) if below else path, found.name)
                    yield _target_of(name, found), found


def _target_of(name: str, found: DeclaredArray) -> QuantizableArray:
    is_table = found.declared.role == "table"
    # A row of a table is looked up: its elements share a scale.
    reduced = found.output_axes if is_table else found.input_axes
    inputs = found.axis("in") if "in" in found.axes and not is_table else reduced[-1]
    return QuantizableArray(name, found.array, reduced, inputs, len(found.axes), is_table)


def targets_of_tree(params: PyTree) -> Iterator[QuantizableArray]:
    """The arrays of a tree with two axes or more, as ``x @ array`` takes them."""
    is_leaf = lambda each: isinstance(each, ArrayLike)  # noqa: E731
    for path, leaf in jax.tree_util.tree_flatten_with_path(params, is_leaf=is_leaf)[0]:
        if is_leaf(leaf) or is_array(leaf):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            reduced = tuple(range(-len(leaf.shape), -1))
            yield QuantizableArray(name, leaf, reduced or (-1,), -2, len(leaf.shape))


def why_not(target: QuantizableArray) -> str:
    """Why an array cannot be quantized; empty if it can."""
    weight = target.weight
    if not is_array(weight):
        return f"{type(weight).__name__}, which is no array"
    if not jnp.issubdtype(weight.dtype, jnp.floating):
        return f"its dtype is {weight.dtype}"
    if len(weight.shape) < 2:
        return "a vector"
    if not target.reduced:
        return "no product of a call takes it"
    if not weight.size:
        return "it has no elements"
    if not _is_finite(weight):
        return "it has NaN or infinite elements"
    return ""


@jax.jit
def _is_finite(weight: Array) -> Any:
    return jnp.isfinite(weight).all()


def other_arrays(net: Module, done: set[str]) -> Iterator[tuple[str, str]]:
    """The arrays of a net that are not among those done, and why they are not."""
    for name, leaf in named_leaves(net):
        own = name.removesuffix(".weight")  # of a weight in quantization-aware training
        if not {name, own} & done and is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating):
            rank = len(leaf.shape)
            yield name, "a vector or a number" if rank < 2 else NO_LAYER


# --- rounding to the nearest numbers -------------------------------------------------------


class Levels(NamedTuple):
    """The quantization levels of an array divided by its scales.

    Attributes:
        least: the smallest level.
        most: the largest level.
        divisors: divisors of a group's range that are tried for its scale.  With 4 bits, a divisor
            below 7 represents the largest element, and one above 8 clips it with finer steps for
            the others.
        dtype: the dtype of the levels, before they are packed.
    """

    least: int
    most: int
    divisors: tuple[float, ...]
    dtype: str = "int8"


#: By `Form.scheme` and bits.
LEVELS = {
    ("symmetric", 8): Levels(-127, 127, (127.0,)),
    ("symmetric", 4): Levels(-8, 7, tuple(np.linspace(6.75, 9.25, 11))),
    ("asymmetric", 4): Levels(-8, 7, tuple(np.linspace(13.5, 18.5, 11))),
    ("float", 8): Levels(-448, 448, (448.0,), "float8_e4m3fn"),
}
#: Smaller float16 numbers are denormal and have fewer digits, so a scale there is inexact.
_SMALLEST_SCALE = 2.0**-14


def rounded(weight: Array, form: Form, reduced: tuple[int, ...]) -> QuantizedArray:
    """A weight in few bits.

    Args:
        weight: the array.
        form: the bits, the groups and their axis.
        reduced: without groups, the axes along which one scale serves, from the last (-1).
    """
    levels = LEVELS[form.scheme, form.bits]
    if form.group is None:
        axes = tuple(weight.ndim + axis for axis in reduced)
        integers, scales = _by_channel(weight, axes, levels)
        return QuantizedArray(integers, scales, form)
    integers, scales, zeros = _by_group(weight, form, levels)
    return QuantizedArray(integers, scales, form, None, zeros)


# Each function is one program of jax: operations one by one would be a dozen for each shape.
@functools.partial(jax.jit, static_argnums=1)
def fits_halves(weight: Array, form: Form) -> Any:
    """Whether the scales of groups have all digits of a float16, or their groups are zeros."""
    span, _ = _ranges(_grouped(weight, form.axis), weight.ndim + form.axis + 1, form.scheme)
    divisors = LEVELS[form.scheme, form.bits].divisors
    least = jnp.min(jnp.where(span > 0, span, jnp.inf)) / max(divisors)
    return (least >= _SMALLEST_SCALE) & (jnp.max(span) / min(divisors) < 65504)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _by_channel(weight: Array, reduced: tuple[int, ...], levels: Levels) -> tuple[Any, Any]:
    numbers = weight.astype(jnp.float32)
    largest = jnp.max(jnp.abs(numbers), reduced, keepdims=True)
    scales = jnp.where(largest > 0, largest / levels.most, 1.0)
    return _nearest(numbers / scales, levels).astype(levels.dtype), scales


def _nearest(numbers: Array, levels: Levels) -> Any:
    whole = jnp.rint(numbers) if levels.dtype == "int8" else numbers  # else the cast rounds
    return jnp.clip(whole, levels.least, levels.most)


def _ranges(numbers: Array, inner: int, scheme: str) -> tuple[Any, Any]:
    if scheme == "symmetric":
        largest = jnp.max(jnp.abs(numbers), inner, keepdims=True)
        return largest, jnp.zeros_like(largest)
    # Zero points are levels, so that ranges contain 0.
    high = jnp.maximum(jnp.max(numbers, inner, keepdims=True), 0)
    low = jnp.minimum(jnp.min(numbers, inner, keepdims=True), 0)
    return high - low, (high + low) / 2


@functools.partial(jax.jit, static_argnums=(1, 2))
def _by_group(weight: Array, form: Form, levels: Levels) -> Any:
    numbers = _grouped(weight.astype(jnp.float32), form.axis)
    inner = weight.ndim + form.axis + 1
    span, middle = _ranges(numbers, inner, form.scheme)
    has_zeros = form.scheme == "asymmetric"
    center = (levels.least + levels.most) / 2 if has_zeros else 0

    def tried(divisor: Array) -> tuple[Any, ...]:
        half = (span / divisor).astype(jnp.float16)
        scales = jnp.where(half > 0, half, jnp.float16(1))  # also of what is smaller than a half
        wide = scales.astype(jnp.float32)
        zeros = _nearest(center - middle / wide, levels)
        integers = _nearest(numbers / wide + zeros, levels)
        error = jnp.sum(((integers - zeros) * wide - numbers) ** 2, inner, keepdims=True)
        return integers.astype(jnp.int8), scales, zeros.astype(jnp.int8), error

    divisors = jnp.asarray(levels.divisors, jnp.float32)

    def better(number: ArrayLike, best: tuple[Array, ...]) -> Any:
        new = tried(divisors[number])
        chosen = new[-1] < best[-1]
        return tuple(jnp.where(chosen, a, b) for a, b in zip(new, best))

    integers, scales, zeros, _ = jax.lax.fori_loop(1, len(divisors), better, tried(divisors[0]))
    scales, zeros = (jnp.squeeze(each, inner) for each in (scales, zeros))
    integers = integers.reshape(weight.shape)
    stored = packed(integers, form.axis) if form.bits == 4 else integers
    return stored, scales, zeros if has_zeros else None


def _grouped(weight: Array, axis: int) -> Array:
    inner, shape = weight.ndim + axis, weight.shape
    return weight.reshape(*shape[:inner], -1, GROUP, *shape[inner + 1 :])


# --- GPTQ, Frantar et al. 2022, https://arxiv.org/abs/2210.17323 -----------------------------
# Rows are rounded one by one, and the error of each is distributed over the remaining ones, by
# the inverse of the sum of ``x xᵀ`` over the inputs.

#: This part of the mean of the diagonal is added to it, so that the matrix has an inverse.
_DAMPING = 0.01


class InputMoments:
    """The sum of ``x xᵀ`` over the inputs of products, by the numbers of these."""

    def __init__(self) -> None:
        self.sums: dict[int, np.ndarray] = {}

    def __call__(self, number: Array, x: Array) -> None:
        rows = np.asarray(x, np.float32)
        rows = rows.reshape(-1, rows.shape[-1])
        found = self.sums.get(int(number), 0.0)
        self.sums[int(number)] = found + (rows.T @ rows).astype(np.float64)


def is_matrix(target: QuantizableArray) -> bool:
    """Whether a weight multiplies the last axis of its inputs alone, as `Linear` and 1×1 do."""
    kernel = target.weight.shape[-len(target.reduced) - 1 : -2]
    return target.axis >= -2 and not target.is_table and all(size == 1 for size in kernel)


def rounded_by_inputs(
    target: QuantizableArray, array: QuantizedArray, sums: list[np.ndarray]
) -> QuantizedArray:
    """Returns a quantized weight whose integers compensate each other's errors."""
    form = array.form

    def turned(numbers: Array) -> np.ndarray:
        numbers = np.asarray(numbers)  # as [inputs, outputs], and back
        return numbers if form.axis == -2 else numbers.swapaxes(-1, -2)

    weight = turned(target.weight).astype(np.float64)
    matrices = weight.reshape(-1, *weight.shape[-2:])
    scales = turned(array.scales).reshape(len(matrices), -1, weight.shape[-1])
    results = [_one(*each, form._replace(axis=-2)) for each in zip(matrices, scales, sums)]
    integers, new, zeros = (np.stack(each) for each in zip(*results))
    integers = turned(integers.reshape(weight.shape)).astype(np.int8)
    stored = packed(integers, form.axis) if form.bits == 4 else integers
    new, zeros = (
        None if like is None else turned(each.reshape(turned(like).shape)).astype(like.dtype)
        for like, each in ((array.scales, new), (array.zeros, zeros))
    )
    stored, new, zeros = jax.device_put((stored, new, zeros))
    return array.replace(integers=stored, scales=new, zeros=zeros)


def _one(
    matrix: np.ndarray, scales: np.ndarray, moments: np.ndarray, form: Form
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns integers, scales and zero points of one matrix ``[inputs, outputs]``."""
    matrix, scales = matrix.copy(), scales.astype(np.float64)
    zeros = np.zeros_like(scales)
    size = len(matrix)
    damped = moments + np.eye(size) * max(_DAMPING * np.trace(moments) / size, 1e-12)
    # The upper factor of the inverse: its rows are how an error is spread.
    factor = scipy.linalg.cholesky(scipy.linalg.inv(damped))
    levels = LEVELS[form.scheme, form.bits]
    integers = np.empty_like(matrix)
    group = size if form.group is None else form.group
    for row in range(size):
        if form.group is not None and row % group == 0:
            rows = matrix[row : row + group].astype(np.float32)
            chosen = rounded(rows, form, (-2,))
            scales[row // group] = np.asarray(chosen.scales)[0]
            if chosen.zeros is not None:
                zeros[row // group] = np.asarray(chosen.zeros)[0]
        scale, zero = scales[row // group], zeros[row // group]
        integers[row] = np.clip(np.rint(matrix[row] / scale) + zero, levels.least, levels.most)
        error = (matrix[row] - (integers[row] - zero) * scale) / factor[row, row]
        matrix[row + 1 :] -= np.outer(factor[row, row + 1 :], error)
    return integers, scales, zeros
