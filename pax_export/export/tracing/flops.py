"""Counts the FLOPs of a traced program by module, as XLA's cost analysis does.

Transcendental functions are counted separately. Unlike XLA's, the body of a `scan` counts once per
iteration, and counts of symbolic sizes are formulas.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.export import is_symbolic_dim

from pax_export._foundations.jaxpr import inner_programs, jaxpr_of
from pax_export._foundations.types import Atom, Equation, Jaxpr, Size, TracedProgram
from pax_export.core import path_in
from pax_export.export.artifact import dimensions
from pax_export.export.portable.decompositions import NotDecomposedError, decomposed

_FREE = frozenset(
    "broadcast_in_dim reshape transpose squeeze slice dynamic_slice "
    "dynamic_update_slice concatenate pad rev gather iota copy device_put "
    "stop_gradient split bitcast_convert_type optimization_barrier random_wrap random_unwrap "
    "random_seed random_fold_in rng_bit_generator random_split unstack threefry2x32 "
    "sharding_constraint reshard name pvary axis_index create_token real imag conj empty "
    "dim_as_value symbolic_zeros platform_index iota_2x32_shape lu_pivots_to_permutation stack "
    "stage tie layout_constraint reduced_vary_cast".split()
)
_ONE = frozenset(
    "add sub mul div rem max min neg abs sign floor ceil round and or xor not eq ne lt le gt ge "
    "select_n clamp convert_element_type is_finite add_any square shift_left "
    "shift_right_logical shift_right_arithmetic nextafter population_count clz complex "
    "reduce_precision mulhi lt_to le_to eq_to".split()
)
_TRANSCENDENTAL = frozenset(
    "exp exp2 expm1 log log1p tanh logistic sin cos tan asin acos atan atan2 sinh cosh asinh acosh "
    "atanh sqrt rsqrt cbrt pow erf erfc erf_inv lgamma digamma igamma igammac log2 zeta polygamma "
    "igamma_grad_a random_gamma "
    "regularized_incomplete_beta bessel_i0e bessel_i1e".split()
)
_REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor reduce".split()
)
#: One step of argmax: two comparisons of values, two of indices, their combination, NaN.
_ARG_STEP = 9
#: Operations besides the exponential in functions composed of several.
_BESIDE = {"erf": 62, "erfc": 62, "logistic": 3}
_CUMULATIVE = frozenset("cumsum cumprod cummax cummin".split())
_WINDOWS = (
    "reduce_window_sum reduce_window_max reduce_window_min reduce_window select_and_gather_add"
).split()
_SCATTERS = frozenset(
    f"scatter{mark}{how}" for how in "add sub mul min max".split() for mark in "-_"
)


@dataclass
class Work:
    """FLOPs by module path, without those of submodules, and by dtype.

    Transcendentals are exponentials, logarithms, roots and similar functions. `uncounted` has
    unknown operations and unbounded loops, whose body counts once.
    """

    flops: dict[str, Any] = field(default_factory=lambda: defaultdict(int))
    transcendentals: dict[str, Any] = field(default_factory=lambda: defaultdict(int))
    dtypes: dict[str, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))
    uncounted: set[str] = field(default_factory=set)  # unknown operations, unbounded loops


def work_of(program: TracedProgram) -> Work:
    work = Work()
    _count_jaxpr(jaxpr_of(program), "", 1, work)
    return work


def _count_jaxpr(jaxpr: Jaxpr, around: str, times: Size, work: Work) -> None:
    for equation in jaxpr.eqns:
        path = path_in(equation, around)
        if not count_operation(equation, path, times, work):
            _count_inner(equation, path, times, work)


def count_operation(equation: Equation, path: str, times: Size, work: Work) -> bool:
    """Adds an operation without inner programs; returns False if its count is unknown."""
    name = equation.primitive.name
    rule = _RULES.get(name)
    if name in _FREE:
        return True
    if name in _TRANSCENDENTAL:
        count = times * _count_elements(equation.outvars)
        work.transcendentals[path] += count
        if name in _BESIDE:
            _add_work(work, path, _BESIDE[name] * count, equation)
    elif rule is not None:
        _add_work(work, path, times * rule(equation), equation)
    else:
        return False
    return True


def _add_work(work: Work, path: str, flops: Size, equation: Equation) -> None:
    work.flops[path] += flops
    dtypes = work.dtypes[path]
    dtype = str(next((v.aval.dtype for v in equation.invars if hasattr(v.aval, "dtype")), ""))
    dtypes[dtype] = dtypes.get(dtype, 0) + flops


def _count_inner(equation: Equation, path: str, times: Size, work: Work) -> None:
    name = equation.primitive.name
    programs = [jaxpr_of(inner) for inner in inner_programs(equation)]
    if not programs and (expanded := _decomposition(equation)) is not None:
        programs = [expanded]
    if not programs:
        work.uncounted.add(name)
    elif name == "custom_linear_solve":
        solve = equation.params["jaxprs"].solve
        _count_jaxpr(jaxpr_of(solve), path, times, work)
    elif name == "scan":
        _count_jaxpr(programs[0], path, times * equation.params["length"], work)
    elif name == "while":
        work.uncounted.add("while (its body counts once)")
        for program in programs:
            _count_jaxpr(program, path, times, work)
    elif name == "cond":
        _count_jaxpr(max(programs, key=_branch_size), path, times, work)
    else:  # a call, or a function with a custom derivative: the first program is executed
        _count_jaxpr(programs[0], path, times, work)


def _decomposition(equation: Equation) -> Any:
    """The program of an operation that has no count of its own, if there is one.

    One that needed constraints has sizes of another scope, which jax adds to no others.
    """
    try:
        program = decomposed(equation).jaxpr
    except (NotDecomposedError, KeyError):
        return None
    return program if _scopes(program.invars) <= _scopes(equation.invars) else None


def _scopes(atoms: Sequence[Atom]) -> set[int]:
    shapes = [getattr(each.aval, "shape", ()) for each in atoms]
    return {id(size.scope) for shape in shapes for size in shape if is_symbolic_dim(size)}


def _branch_size(jaxpr: Jaxpr) -> float:
    """Returns the work of a branch as a number, to find the largest."""
    work = Work()
    _count_jaxpr(jaxpr, "", 1, work)
    return count_value(total_work(work))


def plain_count(count: int) -> int | str:
    """A count as rows have it: a number, or a formula as text."""
    return int(count) if isinstance(count, (int, float)) else str(count)


def total_work(work: Work) -> Any:
    return sum(work.flops.values(), 0)


def count_value(count: int) -> float:
    """A count, and for a formula its value with 16 for each size."""
    if isinstance(count, (int, float)):
        return float(count)
    text = str(count)
    return float(dimensions.value(text, dict.fromkeys(dimensions.names(text), 16)))


def work_fields(work: Work) -> dict[str, Any]:
    """The work of all modules together, as fields of a row and of a report."""
    dtypes: dict[str, float] = defaultdict(float)
    for each in work.dtypes.values():
        for name, count in each.items():
            dtypes[name] += count_value(count)
    return {
        "flops": plain_count(total_work(work)),
        "transcendentals": plain_count(sum(work.transcendentals.values(), 0)),
        "computed_in": max(dtypes, key=lambda name: dtypes[name], default=""),
    }


# --- counts of single operations ----------------------------------------------------------


def _count_elements(variables: Iterable[Any]) -> Any:
    return sum(_product_of(variable.aval.shape) for variable in variables)


def _product_of(sizes: Iterable[Any]) -> Any:
    result: Any = 1
    for size in sizes:
        result = result * size
    return result


def _per_result(count: int) -> Callable[[Any], Any]:
    return lambda equation: count * _count_elements(equation.outvars)


def _reduction_work(equation: Equation) -> Any:
    outputs = len(equation.outvars)
    return _count_elements(equation.invars[:outputs]) - _count_elements(equation.outvars)


def _cumulative_work(equation: Equation) -> Any:
    """Counts as XLA does for a window over all earlier elements."""
    size = equation.invars[0].aval.shape[equation.params["axis"]]
    return _count_elements(equation.outvars) * (size - 1)


def _per_row(count: int, operand: int = 0) -> Callable[[Any], Any]:
    """Counts operations for each result and each member of the last axis of an operand."""
    return lambda equation: (
        count * _count_elements(equation.outvars) * equation.invars[operand].aval.shape[-1]
    )


def _quantized_dot(equation: Equation) -> Any:
    """The product and, once, the numbers of the matrix or of the kernel of a convolution."""
    axis = equation.params.get("channels", -1)
    inner, outer = (each[0].aval.shape[axis] for each in (equation.invars, equation.outvars))
    return 2 * _count_elements(equation.outvars) * inner + 2 * inner * outer


def _random_bits(equation: Equation) -> Any:
    """Threefry, as its loops count: pairs of numbers, and a key; other generators are free."""
    if "fry" not in str(equation.invars[0].aval.dtype):
        return 0
    count = _count_elements(equation.outvars)
    return 32 * (count + count % 2 if isinstance(count, int) else count) + 76


def _integer_power(equation: Equation) -> Any:
    power = abs(equation.params["y"])
    multiplications = max(power.bit_length() - 1 + power.bit_count() - 1, 0)
    return _count_elements(equation.outvars) * (multiplications + (equation.params["y"] < 0))


def _dot_work(equation: Equation) -> Any:
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return 2 * _count_elements(equation.outvars) * _product_of(shape[axis] for axis in contracted)


def _ragged_dot(equation: Equation) -> Any:
    """Each number of the left side times those of a row of the one matrix that its group has."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    shape = equation.invars[1].aval.shape
    shared = {*contracted, *batch, *numbers.rhs_group_dimensions}
    row = _product_of(size for axis, size in enumerate(shape) if axis not in shared)
    return 2 * _count_elements(equation.invars[:1]) * row


def _convolution_work(equation: Equation) -> Any:
    numbers = equation.params["dimension_numbers"]
    image, kernel = (variable.aval.shape for variable in equation.invars)
    output = equation.outvars[0].aval.shape
    positions: Any = 1
    for axis in range(len(numbers.lhs_spec) - 2):
        positions *= _valid_positions(
            image[numbers.lhs_spec[2 + axis]],
            kernel[numbers.rhs_spec[2 + axis]],
            output[numbers.out_spec[2 + axis]],
            equation.params["window_strides"][axis],
            equation.params["padding"][axis],
            equation.params["lhs_dilation"][axis],
            equation.params["rhs_dilation"][axis],
        )
    inputs = kernel[numbers.rhs_spec[1]]  # per group
    batch = image[numbers.lhs_spec[0]]
    batch = batch // equation.params["batch_group_count"]
    return 2 * positions * inputs * output[numbers.out_spec[1]] * batch


def _valid_positions(
    size: Size,
    kernel: Size,
    output: Size,
    stride: int,
    padding: Sequence[Size],
    spread: int,
    dilation: int,
) -> Any:
    """Counts the pairs of kernel and image elements along one axis, without padding."""
    if not all(isinstance(each, int) for each in (size, kernel, output, *padding)):
        return output * kernel  # of a symbolic size all count, those on padding too
    extent = (size - 1) * spread + 1
    starts = range(0, output * stride, stride)
    count = 0
    for offset in range(0, kernel * dilation, dilation):
        first = offset - padding[0]
        if spread == 1:
            low = max(0, -(first // stride))  # the first start at which the place is not negative
            high = min(output, (extent - 1 - first) // stride + 1)
            count += max(0, high - low)
        else:
            positions = (start + first for start in starts)
            count += sum(
                0 <= position < extent and position % spread == 0 for position in positions
            )
    return count


def _window_work(equation: Equation) -> Any:
    window = _product_of(equation.params["window_dimensions"])
    return _count_elements(equation.outvars) * (window - 1)


def _sort_work(equation: Equation) -> Any:
    size = _product_of(equation.invars[0].aval.shape)
    return size * max(1, math.ceil(math.log2(size))) if isinstance(size, int) and size else size


def _cubic_work(factor: float) -> Callable[[Any], Any]:
    """Counts a factorization of `[..., n, n]`: a fraction of n operations per element."""

    def rule(equation: Equation) -> Any:
        *_, size = equation.invars[0].aval.shape
        work = _count_elements(equation.invars[:1]) * size
        return int(work * factor) if isinstance(work, int) else work

    return rule


def _fft_work(equation: Equation) -> Any:
    length = _product_of(equation.params["fft_lengths"])
    rounds = math.ceil(math.log2(length)) if isinstance(length, int) and length > 1 else 1
    return 5 * rounds * _count_elements(equation.invars)


_RULES: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(_ONE, _per_result(1)),
    **dict.fromkeys(_REDUCTIONS, _reduction_work),
    **dict.fromkeys(_CUMULATIVE, _cumulative_work),
    **dict.fromkeys(_SCATTERS, lambda equation: _count_elements(equation.invars[2:3])),
    **dict.fromkeys(("scatter", "bound_outputs"), _per_result(0)),
    **dict.fromkeys(("argmax", "argmin"), lambda each: _ARG_STEP * _reduction_work(each)),
    "cumlogsumexp": lambda equation: 8 * _cumulative_work(equation),
    "random_bits": _random_bits,
    "integer_pow": _integer_power,
    "dot_general": _dot_work,
    "dequantize": _per_result(2),
    **dict.fromkeys(("narrow_dot", "symmetric_product"), _per_row(2)),
    **dict.fromkeys(("quantized_dot", "pointwise_convolution"), _quantized_dot),
    "quantized_rows": _per_result(2),
    # A division, a rounding and a product of each element.
    **dict.fromkeys(("round_inputs", "round_rows", "one_minus_square"), _per_result(3)),
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution_work,
    **dict.fromkeys(_WINDOWS, _window_work),
    "select_and_scatter_add": lambda equation: 2 * _count_elements(equation.invars[1:2]),
    **dict.fromkeys(("sort", "top_k", "approx_top_k"), _sort_work),
    "cholesky": _cubic_work(1 / 3),
    "lu": _cubic_work(2 / 3),
    **dict.fromkeys(("qr", "geqrf", "householder_product"), _cubic_work(4 / 3)),
    "ormqr": _per_row(4, operand=1),
    "eigh": _cubic_work(9),
    "svd": _cubic_work(20),
    "triangular_solve": _per_row(1),
    "cholesky_update": _per_result(6),
    "tridiagonal_solve": _per_result(8),
    "polynomial": lambda equation: _per_result(2 * (len(equation.invars) - 2))(equation),
    "fft": _fft_work,
}
