"""Convolutions and padding, in forms that targets support."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pax_export._foundations.types import Array, DTypeLike, Equation, Size
from pax_export.export.portable.decompositions import NotDecomposedError, decomposes
from pax_export.export.portable.program import is_static
from pax_export.export.portable.sizes import is_number, same_size


def is_plain_pad(equation: Equation) -> bool:
    """Whether elements are only added at the ends; how many may be symbolic."""
    config = equation.params["padding_config"]
    return all(inner == 0 and not _is_negative(low, high) for low, high, inner in config)


def _is_negative(*sizes: Size) -> bool:
    return any(is_number(size) and size < 0 for size in sizes)


@decomposes("pad", any_dtype=True)
def pad(x: Array, value: Array, *, padding_config: Sequence[tuple[Any, Any, Any]]) -> Any:
    """Pads with a row after each element but the last, without negative padding at the ends."""
    for axis, (_, _, inner) in enumerate(padding_config):
        size, edges = x.shape[axis], [(0, 0, 0)] * (x.ndim + 1)
        if inner == 0 or same_size(size, 0):
            continue
        edges[axis + 1] = (0, inner, 0)
        wide = lax.pad(lax.expand_dims(x, (axis + 1,)), value, edges)
        x = wide.reshape(*x.shape[:axis], size * (inner + 1), *x.shape[axis + 1 :])
        x = lax.slice(
            x, [0] * x.ndim, [*x.shape[:axis], x.shape[axis] - inner, *x.shape[axis + 1 :]]
        )
    cut = [[-n if _is_negative(n) else 0 for n in ends] for *ends, _ in padding_config]
    if any(map(any, cut)):
        starts, stops = [low for low, _ in cut], [n - high for n, (_, high) in zip(x.shape, cut)]
        x = lax.slice(x, starts, stops)
    edges: Any = [(*(0 if _is_negative(n) else n for n in ends), 0) for *ends, _ in padding_config]
    return lax.pad(x, value, edges)


def is_padded_as_same(equation: Equation) -> bool:
    """Whether the padding of a convolution or pool is ``"SAME"``, which runtimes have for any size.

    They do not have it for dilated windows.
    """
    params, (x, *others) = equation.params, equation.invars
    if others:
        lhs, rhs, _ = params["dimension_numbers"]
        sizes = [x.aval.shape[axis] for axis in lhs[2:]]
        taps = [others[0].aval.shape[axis] for axis in rhs[2:]]
        gaps = params["lhs_dilation"], params["rhs_dilation"]
    else:
        sizes, taps = x.aval.shape, params["window_dimensions"]
        gaps = params["base_dilation"], params["window_dilation"]
    if not is_static(taps) or any(each != 1 for gap in gaps for each in gap):
        return False
    same = lax.padtype_to_pads(sizes, taps, params["window_strides"], "SAME")
    return all(tuple(one) == tuple(other) for one, other in zip(same, params["padding"]))


def is_plain_convolution(equation: Equation) -> bool:
    """Returns whether runtimes support a convolution: float32 or less, over at most three axes.

    Kernels and groups have static sizes, there are no batch groups, and padding is neither between
    elements nor negative; symbolic padding is ``"SAME"``.
    """
    params, kernel, (result,) = equation.params, equation.invars[1], equation.outvars
    taps = [kernel.aval.shape[axis] for axis in params["dimension_numbers"].rhs_spec]
    ends = [end for pair in params["padding"] for end in pair]
    numbers = (*taps, params["feature_group_count"], params["batch_group_count"])
    if not ends or (not is_static(ends) and not is_padded_as_same(equation)):
        return False
    if not is_static(numbers) or len(taps) > 5 or params["batch_group_count"] != 1:
        return False
    if result.aval.dtype.name not in ("float32", "float16", "bfloat16"):
        return False
    return not _is_negative(*ends) and all(each == 1 for each in params["lhs_dilation"])


@decomposes("conv_general_dilated", any_dtype=True)
def convolve(x: jax.Array, kernel: jax.Array, **params: Any) -> Any:
    """Convolves in a simpler form; the simplest form is a product per kernel position."""
    lhs, rhs, out = params["dimension_numbers"]
    padding, gaps, examples = (
        params[name] for name in ("padding", "lhs_dilation", "batch_group_count")
    )
    apart = params["rhs_dilation"] if len(padding) == 3 else ()  # which not all targets have
    ends = {str(end) for pair in padding for end in pair}
    if ends <= {"0"} and {*gaps, *apart} <= {1} and str(examples) == "1":
        y = _by_products(lax.transpose(x, lhs), lax.transpose(kernel, rhs), **params)
        return lax.transpose(y, [int(axis) for axis in np.argsort(out)])
    edges = [(*pair, gap - 1) for pair, gap in zip(padding, gaps)]
    x = _padded(x, dict(zip(lhs[2:], edges)))
    kernel = _padded(kernel, {axis: (0, 0, gap - 1) for axis, gap in zip(rhs[2:], apart)})
    groups = params["feature_group_count"]
    if str(examples) != "1":  # groups of examples become groups of features
        batch, features = lhs[:2]
        sizes = x.shape[batch] // examples, examples * x.shape[features]
        shape = [*x.shape[:batch], examples, sizes[0], *x.shape[batch + 1 :]]
        feature_axis = features + (features > batch)
        moved = jnp.moveaxis(x.reshape(shape), batch, feature_axis - (feature_axis > batch))
        shape = [dict(zip(lhs, sizes)).get(axis, size) for axis, size in enumerate(x.shape)]
        x, groups = moved.reshape(shape), examples
    return lax.conv_general_dilated(
        x,
        kernel,
        params["window_strides"],
        [(0, 0)] * len(padding),
        rhs_dilation=(1,) * len(apart) if apart else params["rhs_dilation"],
        dimension_numbers=params["dimension_numbers"],
        feature_group_count=groups,
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )


def _padded(x: Array, edges: Mapping[int, tuple[Any, Any, int]]) -> Any:
    config = [edges.get(axis, (0, 0, 0)) for axis in range(x.ndim)]
    return lax.pad(x, jnp.zeros((), x.dtype), config)


def _by_products(
    x: Array,
    kernel: Array,
    *,
    window_strides: Sequence[int],
    rhs_dilation: Sequence[int],
    feature_group_count: Any,
    preferred_element_type: DTypeLike | None,
    **_: object,
) -> Any:
    wide, deep, *taps = kernel.shape
    if not is_static(taps):
        raise NotDecomposedError("with a kernel of symbolic size")
    groups = feature_group_count
    dtype = preferred_element_type or jnp.result_type(x, kernel)
    exact = jnp.float32 if dtype in (jnp.float16, jnp.bfloat16) else dtype
    steps = list(zip(window_strides, rhs_dilation))
    space = [
        (size - (tap - 1) * gap - 1) // step + 1
        for size, tap, (step, gap) in zip(x.shape[2:], taps, steps)
    ]
    weights = kernel.reshape(groups, wide // groups, deep, *taps)
    total: Any = 0
    for position in np.ndindex(*taps):
        starts = [at * gap for at, (_, gap) in zip(position, steps)]
        stops = [at + (n - 1) * step + 1 for at, n, (step, _) in zip(starts, space, steps)]
        part = lax.slice(x, [0, 0, *starts], [*x.shape[:2], *stops], [1, 1, *window_strides])
        rows = part.reshape(x.shape[0], groups, deep, math.prod(space))
        numbers = (((2,), (2,)), ((1,), (0,)))
        weight = weights[(..., *position)]
        total = total + lax.dot_general(rows, weight, numbers, preferred_element_type=exact)
    y = lax.transpose(total, [1, 0, 3, 2]).astype(dtype)
    return y.reshape(x.shape[0], wide, *space)
