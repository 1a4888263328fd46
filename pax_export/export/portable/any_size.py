"""Replaces operations that jax lowers or differentiates for static sizes, or other than 0, only.

Each becomes a program of operations that jax supports for any size. `lowerable` prepares programs
for lowering, `differentiable` for `jax.vjp` and `jax.jvp`, whose result is then made lowerable.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.lax import linalg

from pax_export._foundations.jax import find_sparse, is_key, scan_operands
from pax_export._foundations.types import Array, Equation, Size, TracedProgram
from pax_export.export.portable.decompositions import greatest, least
from pax_export.export.portable.decompositions.linear_algebra import (
    cholesky_update,
    ormqr,
    tridiagonal_solve,
)
from pax_export.export.portable.decompositions.reductions import by_loop, reduce_prod
from pax_export.export.portable.fourier import fourier_sums
from pax_export.export.portable.program import is_static, rewritten, traced
from pax_export.export.portable.sizes import trace

#: Primitive name -> a function from an equation to a function of its operands,
#: or None where jax needs none.
Functions = dict[str, Callable[[Any], Callable[..., Any] | None]]


def lowerable(program: TracedProgram) -> Any:
    """Replaces operations with symbolic sizes, or sizes of 0, that jax cannot lower."""
    return rewritten(program, partial(_replacement, _LOWERED))


def differentiable(program: TracedProgram) -> Any:
    """Replaces operations with symbolic sizes that jax cannot differentiate."""
    return rewritten(program, partial(_replacement, _DIFFERENTIATED))


def _replacement(functions: Functions, equation: Equation) -> Any:
    if (sparse := find_sparse(equation)) is not None:  # jax may call libraries of devices
        operands = [atom.aval for atom in equation.invars]
        return trace(sparse, operands, equation.params, several=True)
    choose = functions.get(equation.primitive.name)
    function = choose(equation) if choose is not None else None
    return None if function is None else traced(function, equation.invars)


def _is_symbolic(*sizes: Size) -> bool:
    return not is_static(sizes)


# --- loops and Fourier transforms ----------------------------------------------


def _scan(equation: Equation) -> Callable[..., Any] | None:
    """Scans the elements one by one, with one more to skip if there may be none.

    jax checks whether there are any steps, and how many remain after unrolling.
    """
    params = equation.params
    length, reverse, jaxpr = (params[name] for name in ("length", "reverse", "jaxpr"))
    if isinstance(length, int) or (params["unroll"] == 1 and _is_one_at_least(length)):
        return None
    body = jaxpr_as_fun(jaxpr)

    def scan(*operands: Array) -> list[Any]:
        constants, start, rows = scan_operands(params, operands)
        spare = 0 if _is_one_at_least(length) else 1  # jax takes nothing of what may be empty
        kinds = [(each.shape, each.dtype) for each in jaxpr.out_avals[len(start) :]]
        if spare:
            rows = [jnp.concatenate([each, _zeros(1, *each.shape[1:])(each.dtype)])
                    for each in rows]  # fmt: skip

        def run(carry: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
            found = body(*constants, *carry, *row)
            return found[: len(start)], found[len(start) :]

        def skip(carry: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
            return carry, [_zeros(*shape)(dtype) for shape, dtype in kinds]

        def step(carry: list[Any], numbered: Any) -> tuple[list[Any], list[Any]]:
            number, row = numbered
            if not spare:
                return run(carry, row)
            return lax.cond(number < length, run, skip, carry, row)

        numbers = jnp.arange(length + spare)
        carry, found = lax.scan(step, start, (numbers, rows), reverse=reverse)
        return [*carry, *(each[:length] if spare else each for each in found)]

    return scan


def _zeros(*shape: Size) -> Callable[[Any], Any]:
    return lambda dtype: lax.empty(shape, dtype) if is_key(dtype) else lax.full(shape, 0, dtype)


def _is_one_at_least(length: Size) -> bool:
    try:
        return bool(length >= 1)
    except Exception:  # of a class without a public name; then it may be 0
        return False


def _accumulation(equation: Equation) -> Callable[..., Any] | None:
    """Accumulates one more element, if there may be none; jax checks whether there are any."""
    axis, reverse = equation.params["axis"], equation.params["reverse"]
    shape = equation.invars[0].aval.shape
    if is_static(shape) or _is_one_at_least(shape[axis]):
        return None
    widths = [(0, 0, 0)] * len(shape)
    widths[axis] = (1, 0, 0) if reverse else (0, 1, 0)
    outside = [(-low, -high, 0) for low, high, _ in widths]

    def accumulate(x: Array) -> Any:
        found = equation.primitive.bind(lax.pad(x, _zeros()(x.dtype), widths), **equation.params)
        return lax.pad(found, _zeros()(found.dtype), outside)

    return accumulate


# --- convolutions and windows ----------------------------------------------------


def _groups(equation: Equation) -> Callable[..., Any] | None:
    """Convolves the groups one by one, if their number is symbolic.

    jax creates such groups for a kernel per example.
    """
    params = equation.params
    features, batches = params["feature_group_count"], params["batch_group_count"]
    if not _is_symbolic(features, batches):
        return None
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    count, axis = (features, lhs_spec[1]) if _is_symbolic(features) else (batches, lhs_spec[0])
    name = "feature_group_count" if count is features else "batch_group_count"
    alone = {**params, name: 1}

    def convolve(lhs: Array, rhs: Array) -> Any:
        pairs = _split_groups(lhs, axis, count), _split_groups(rhs, rhs_spec[0], count)
        found = lax.map(lambda pair: equation.primitive.bind(*pair, **alone), pairs)
        found, at = jnp.moveaxis(found, 0, out_spec[1]), out_spec[1]
        sizes = found.shape[at] * found.shape[at + 1], *found.shape[at + 2 :]
        return found.reshape(*found.shape[:at], *sizes)

    return convolve


def _split_groups(x: Array, axis: int, count: Size) -> Any:
    """The groups of an axis, as the first axis."""
    shape = (*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _convolution(equation: Equation) -> Callable[..., Any] | None:
    """Convolves only the part that windows cover, so that their positions are static.

    The padding of a gradient depends on the rest after the last window, and on whether there is
    one; if these are unknown, one more window is added, and its result dropped.
    """
    params = equation.params
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    padding, strides = params["padding"], params["window_strides"]
    lhs_sizes, rhs_sizes, out_sizes = (
        [atom.aval.shape[axis] for axis in spec[2:]]
        for atom, spec in zip((*equation.invars, *equation.outvars), (lhs_spec, rhs_spec, out_spec))
    )
    moves = any(step > 1 for step in strides) and _is_symbolic(*lhs_sizes, *rhs_sizes)
    if not (moves or any(_is_symbolic(*pair) for pair in padding)):
        return _groups(equation)
    widths: list[tuple[Any, Any, int]] = [(0, 0, 0)] * len(lhs_spec)
    stops = list(equation.outvars[0].aval.shape)
    more = False
    for number, axis in enumerate(lhs_spec[2:]):
        (low, high), gap = padding[number], params["lhs_dilation"][number]
        reach = (rhs_sizes[number] - 1) * params["rhs_dilation"][number] + 1
        spare = 0 if _is_one_at_least(out_sizes[number]) else 1
        more = more or bool(spare)
        covered = (out_sizes[number] + spare - 1) * strides[number] + reach
        rest = low + (lhs_sizes[number] - 1) * gap + 1 + high - covered
        widths[axis] = (low, high - rest, gap - 1)
    none = {"padding": ((0, 0),) * len(padding), "lhs_dilation": (1,) * len(padding)}

    def convolve(lhs: Array, rhs: Array) -> Any:
        lhs = lax.pad(lhs, jnp.zeros((), lhs.dtype), widths)
        found = equation.primitive.bind(lhs, rhs, **{**params, **none})
        return lax.slice(found, [0] * len(stops), stops) if more else found

    return convolve


def _window(neutral: Callable[[Any], Any]) -> Callable[[Any], Callable[..., Any] | None]:
    """Extremes of windows, with the padding before them."""

    def choose(equation: Equation) -> Callable[..., Any] | None:
        padding, params = equation.params["padding"], equation.params
        if not any(_is_symbolic(*pair) for pair in padding):
            return None
        edges = [(*pair, gap - 1) for pair, gap in zip(padding, params["base_dilation"])]
        none = {"padding": ((0, 0),) * len(edges), "base_dilation": (1,) * len(edges)}

        def reduce(x: Array) -> Any:
            x = lax.pad(x, neutral(x.dtype), edges)
            return equation.primitive.bind(x, **{**params, **none})

        return reduce

    return choose


def _of_window(equation: Equation) -> Callable[..., Any] | None:
    """Computes the gradient of window extrema."""
    padding, params = equation.params["padding"], equation.params
    if not any(_is_symbolic(*pair) for pair in padding):
        return None
    neutral = least if params["select_prim"].name == "ge" else greatest
    none = {**params, "padding": ((0, 0),) * len(padding)}

    def scatter(source: Any, x: Array) -> Any:
        wide = lax.pad(x, neutral(x.dtype), [(*pair, 0) for pair in padding])
        found = equation.primitive.bind(source, wide, **none)
        inside = [(-low, -high, 0) for low, high in padding]
        return lax.pad(found, jnp.zeros((), found.dtype), inside)

    return scatter


# --- derivatives -------------------------------------------------------------------


def _cumulative(combine: Callable[..., Any], neutral: Callable[[Any], Any]) -> Callable[..., Any]:
    def choose(equation: Equation) -> Callable[..., Any] | None:
        axis, reverse = equation.params["axis"], equation.params["reverse"]
        if not _is_symbolic(equation.invars[0].aval.shape[axis]):
            return None
        return lambda x: by_loop(x, axis, reverse, combine, neutral(x.dtype))

    return choose


def _triangular(equation: Equation) -> Callable[..., Any] | None:
    """Jax looks which of two sizes is larger; of a linear solve that is only a linear map.

    Its derivative is that of the product with the triangle.
    """
    if is_static((*equation.invars[0].aval.shape, *equation.invars[1].aval.shape)):
        return None
    params = equation.params
    left, lower, unit = (params[name] for name in ("left_side", "lower", "unit_diagonal"))
    turned, conjugate = params["transpose_a"], params["conjugate_a"]
    multiply = partial(jnp.matmul, precision=lax.Precision.HIGHEST)

    def solve_with(matrix: Array, transpose: bool) -> Callable[[Any, Any], Any]:
        options = {**params, "transpose_a": transpose, "conjugate_a": conjugate}
        return lambda _, b: linalg.triangular_solve(matrix, b, **options)

    def solve(matrix: Array, b: Array) -> Any:
        half = jnp.tril if lower else jnp.triu
        strict = half(matrix, (-1 if lower else 1) if unit else 0)
        strict = jnp.swapaxes(strict, -1, -2) if turned else strict
        strict = jnp.conj(strict) if conjugate else strict

        def product(x: Array) -> Any:
            found = multiply(strict, x) if left else multiply(x, strict)
            return found + x if unit else found

        return lax.custom_linear_solve(
            product, b, solve_with(matrix, turned), solve_with(matrix, not turned)
        )

    return solve


def _without_elements(function: Callable[..., Any]) -> Callable[[Any], Callable[..., Any] | None]:
    """For operations of which jax lowers the first element of an operand, if it has none."""
    return lambda equation: (
        partial(function, **equation.params)
        if any(0 in each.aval.shape for each in equation.invars)
        else None
    )


_LOWERED: Functions = {
    "scan": _scan,
    "ormqr": _without_elements(ormqr),
    "tridiagonal_solve": _without_elements(tridiagonal_solve),
    "fft": lambda equation: (
        partial(fourier_sums, **equation.params)
        if _is_symbolic(*equation.params["fft_lengths"])
        else None
    ),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _accumulation),
    "cholesky_update": lambda equation: (
        cholesky_update if _is_symbolic(*equation.invars[0].aval.shape) else None
    ),
    "conv_general_dilated": _groups,
    "select_and_scatter_add": _of_window,
}
_DIFFERENTIATED: Functions = {
    **_LOWERED,
    "conv_general_dilated": _convolution,
    "reduce_window_max": _window(least),
    "reduce_window_min": _window(greatest),
    # jax itself checks whether there are any elements left.
    "reduce_prod": lambda equation: (
        partial(reduce_prod, axes=equation.params["axes"])
        if _is_symbolic(*equation.invars[0].aval.shape)
        else None
    ),
    "cumprod": _cumulative(lax.mul, lambda dtype: jnp.ones((), dtype)),
    "cummax": _cumulative(lax.max, least),
    "cummin": _cumulative(lax.min, greatest),
    "cumlogsumexp": _cumulative(jnp.logaddexp, least),
    "triangular_solve": _triangular,
}
