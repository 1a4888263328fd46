"""Programs in the form that XLA runs best: without libraries or integers, and fast on CPUs.

jax's rules for real platforms call LAPACK and other libraries. For an unknown platform, jax uses
its general rules, which write products and loops, or calls that XLA expands; operations without
such a rule, or with one that returns numbers where no decomposition exists, become programs here.

XLA's CPU backend computes each number of a depthwise convolution separately, some 40 times slower
than the same sum of shifted arrays; the same holds for pools that propagate NaN. Both forms are
exported; the platform selects one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun

from pax_export._foundations.jax import run_inside, scan_operands
from pax_export._foundations.jaxpr import (
    bind_equation,
    called_program,
    has_own_derivative,
    is_literal,
    jaxpr_of,
)
from pax_export._foundations.types import Array, DTypeLike, Equation, HasShape, Size, TracedProgram
from pax_export.export.portable.decompositions import (
    NotDecomposedError,
    decomposed,
    third_party_implementation,
)
from pax_export.export.portable.program import evaluated, is_static, rewritten, traced
from pax_export.precision.quantized import Form, plain_dot, plain_pointwise

#: Operations that jax writes as calls without a guarantee of compatibility, by platform, where it
#: guarantees other platforms'.
_WITHOUT_GUARANTEE = {
    "cholesky_update": ("cuda",),
    "ormqr": ("cpu", "cuda", "rocm"),
    "symmetric_product": ("cuda",),
    "tridiagonal_solve": ("rocm",),
}
#: A platform to lower for that no machine has.
ANY_PLATFORM = "pax_export_any"
#: Decompositions that XLA itself writes out, where no library does it.
XLA_EXPANDS = frozenset(("Qr", "ProductOfElementaryHouseholderReflectors"))
_LACKS = frozenset(("eigh", "svd"))


def guaranteed(program: TracedProgram, platforms: Sequence[str]) -> Any:
    """Returns the program without calls that jax exports for these platforms only if told to.

    jax lowers an operation for all platforms of an export, in each branch of
    `jax.lax.platform_dependent` too, so one that lacks the guarantee decides for all.
    """

    def replacement(equation: Equation) -> Any:
        lacks = _WITHOUT_GUARANTEE.get(equation.primitive.name, ())
        is_third_party = third_party_implementation(equation) is not None
        if frozenset(platforms).isdisjoint(lacks) and not is_third_party:
            return None
        try:
            found = decomposed(equation)
        except NotDecomposedError:  # jax refuses it
            return None
        if not is_third_party:
            return found
        inside = rewritten(found, replacement)
        return None if inside is found else inside

    return rewritten(program, replacement)


def without_libraries(program: TracedProgram) -> Any:
    """Returns the program without operations that need a library on all platforms.

    Raises:
        NotDecomposedError: for symbolic sizes.
    """
    return rewritten(program, _without_library)


def _without_library(equation: Equation) -> Any:
    name = equation.primitive.name
    if name in _LACKS:
        return decomposed(equation)
    function = {"cholesky": _cholesky, "approx_top_k": _exact_top_k}.get(name)
    if function is None:
        return None

    return traced(lambda operand: function(operand, equation), equation.invars)


def _cholesky(matrix: Array, equation: Equation) -> Any:
    """NaN for a matrix that is not positive definite, which the general rule does not look at."""
    factor = equation.primitive.bind(matrix, **equation.params)
    right = (jnp.diagonal(factor, 0, -2, -1).real > 0).all(-1)
    return jnp.where(right[..., None, None], factor, jnp.nan)


def _exact_top_k(operand: Array, equation: Equation) -> tuple[Any, Any]:
    """Returns jax's result on CPUs: the exact top k, in order."""
    axis = equation.params["reduction_dimension"]
    sign = 1 if equation.params["is_max_k"] else -1
    count = equation.outvars[0].aval.shape[axis]
    values, indices = jax.lax.top_k(sign * jnp.moveaxis(operand, axis, -1), count)
    return jnp.moveaxis(sign * values, -1, axis), jnp.moveaxis(indices, -1, axis)


# --- Depthwise convolutions and pools in the form that XLA's CPU backend compiles to fast loops ---


#: More shifts than these take long to compile.
_MOST_SHIFTS = 128
_POOLS = frozenset({"reduce_window_max", "reduce_window_min"})
_FLOATS = frozenset({"bfloat16", "float16", "float32", "float64"})


def fast_on_cpus(program: TracedProgram) -> Any:
    """Returns the program with a second form of some operations, for CPUs."""
    return rewritten(program, _replacement)


def _replacement(equation: Equation) -> Any:
    name, function = equation.primitive.name, None
    if name == "conv_general_dilated":
        function = _depthwise(equation)
    elif name in _POOLS:
        function = _pool(equation)
    if function is None:
        return None

    def either(*operands: Array) -> Any:
        return lax.platform_dependent(*operands, cpu=function, default=unchanged)

    def unchanged(*operands: Array) -> Any:
        return [equation.primitive.bind(*operands, **equation.params)]

    return traced(either, equation.invars)


def _pool(equation: Equation) -> Callable[..., list[Array]] | None:
    """A pool with a small window of real numbers; None for any other."""
    result, window = equation.outvars[0].aval, equation.params["window_dimensions"]
    if jnp.issubdtype(result.dtype, jnp.complexfloating) or not _is_small_window(window):
        return None
    sizes = zip(equation.invars[0].aval.shape, result.shape)
    # The other axes are not shifted.  jax compares sliced sizes, and symbolic ones
    # have no order, mostly.
    if not is_static([each for pair, width in zip(sizes, window) for each in pair if width > 1]):
        return None
    return jaxpr_as_fun(decomposed(equation))


def _is_small_window(sizes: Sequence[Any]) -> bool:
    return is_static(sizes) and math.prod(sizes) <= _MOST_SHIFTS


def _depthwise(equation: Equation) -> Callable[..., list[Array]] | None:
    """Returns a convolution whose features have separate kernels; None for others."""
    params, (x, kernel) = equation.params, equation.invars
    specs, groups = params["dimension_numbers"], params["feature_group_count"]
    sizes = [kernel.aval.shape[axis] for axis in specs.rhs_spec[2:]]
    (result,) = equation.outvars
    if params["batch_group_count"] != 1 or result.aval.dtype.name not in _FLOATS:
        return None
    if not isinstance(groups, int) or groups == 1 or not _is_small_window(sizes):
        return None
    if groups != x.aval.shape[specs.lhs_spec[1]] or not sizes:
        return None
    counts = [result.aval.shape[axis] for axis in specs.out_spec[2:]]
    if not is_static((*counts, *(x.aval.shape[axis] for axis in specs.lhs_spec[2:]))):
        return None
    return partial(_sum_of_shifts, equation.params, result.aval.dtype, counts)


def _sum_of_shifts(
    params: Mapping[str, Any], dtype: DTypeLike, counts: Sequence[Size], x: Array, kernel: Array
) -> list[Array]:
    lhs, rhs, out = params["dimension_numbers"]
    features, space = lhs[1], lhs[2:]
    edges: list[Any] = [(0, 0, 0)] * x.ndim
    for axis, (low, high), gap in zip(space, params["padding"], params["lhs_dilation"]):
        edges[axis] = low, high, gap - 1
    x = lax.pad(x, jnp.zeros((), x.dtype), edges)
    wide = jnp.promote_types(dtype, jnp.float32)
    x, kernel = x.astype(wide), kernel.astype(wide)
    several = kernel.shape[rhs[0]] // params["feature_group_count"]
    x = jnp.repeat(x, several, features) if several > 1 else x
    kernel = jnp.transpose(kernel, (*rhs[2:], *rhs[:2]))[..., 0]
    steps, sums = params["window_strides"], 0
    for position in itertools.product(*map(range, kernel.shape[:-1])):
        starts, stops, strides = [0] * x.ndim, list(x.shape), [1] * x.ndim
        apart = zip(space, position, params["rhs_dilation"], counts, steps)
        for axis, number, gap, count, step in apart:
            starts[axis], strides[axis] = number * gap, step
            stops[axis] = number * gap + (count - 1) * step + 1
        scale = lax.broadcast_in_dim(kernel[position], (1,) * features + kernel.shape[-1:]
                                     + (1,) * (x.ndim - 1 - features), (features,))  # fmt: skip
        sums = sums + lax.slice(x, starts, stops, strides) * scale
    order = [lhs[out.index(axis)] for axis in range(x.ndim)]
    return [jnp.transpose(sums, order).astype(dtype)]


# --- Dequantizes weights once, when an export is loaded: for runtimes without integer products ---


#: Operations on quantized weights -> their form on dequantized ones; the weight is last
#: operand: its integers are at this place, and after them scales and zero points.
_WITH_NUMBERS: Mapping[str, tuple[int, Callable[..., Any]]] = {
    "dequantize": (0, lambda weight, **form: weight),
    "quantized_dot": (1, lambda x, weight, contracted, **form: plain_dot(x, weight, contracted)),
    "pointwise_convolution": (
        1,
        lambda x, weight, channels, **form: plain_pointwise(x, weight, channels),
    ),
    "quantized_rows": (1, lambda index, weight, **form: weight[index]),
}
_Places = Sequence[int | None]


class StoredIntegers(NamedTuple):
    """A quantized weight among the operands of a program: the indices of its arrays.

    Attributes:
        integers: the index of the integers.
        scales: the indices of the scales and the optional zero points.
        form: the format.
    """

    integers: int
    scales: tuple[int, ...]
    form: Form


def dequantized_ahead(
    program: TracedProgram, indices: Collection[int]
) -> tuple[Any, tuple[StoredIntegers, ...]]:
    """Returns the program with dequantized weights, if nothing else reads the integers.

    Args:
        program: a closed jaxpr.
        indices: the operands that may be integers or scales: those that calls do not change.

    Returns:
        The program, and the weights that it now takes dequantized.  Tables with row lookups only
        stay integers.
    """
    variables = jaxpr_of(program).invars
    if all(variables[at].aval.dtype.itemsize > 1 for at in indices):
        return program, ()  # no integers: most exports need no walk
    found = _Readers()
    found.visit(program, [at if at in indices else None for at in range(len(variables))])
    weights = tuple(found.weights())
    if not weights:
        return program, ()
    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]
    for each in weights:
        structs[each.integers] = numbers_of(structs[each.integers], each.form)

    def run(*operands: Array) -> list[Any]:
        values: list[Any] = list(operands)
        for each in weights:
            values[each.integers] = _Numbers(values[each.integers], each.form)
        return _Replaced().run(program, values)

    return jax.make_jaxpr(run)(*structs), weights


class _Readers:
    """The readers of each operand, also in loops, branches and calls."""

    def __init__(self) -> None:
        self._read: dict[int, set[tuple[tuple[int | None, ...], Form]]] = {}
        self._multiplied: set[int] = set()
        self._otherwise: set[int | None] = set()

    def weights(self) -> Iterator[StoredIntegers]:
        for index in sorted(self._multiplied - self._otherwise):
            ((scales, form), *others) = self._read[index]
            known = tuple(each for each in scales if each is not None)
            if len(known) == len(scales) and not others:
                yield StoredIntegers(index, known, form)

    def visit(self, program: TracedProgram, operands: _Places) -> None:
        jaxpr = jaxpr_of(program)  # before jax 0.12 some are open
        known = dict(zip(jaxpr.invars, operands))
        for equation in jaxpr.eqns:
            indices = [None if is_literal(atom) else known.get(atom) for atom in equation.invars]
            if equation.primitive.name in _WITH_NUMBERS:
                at, _ = _WITH_NUMBERS[equation.primitive.name]
                self._otherwise.update(indices[:at])
                integers, *scales = indices[at:]
                if integers is not None:
                    form = Form(**{name: equation.params[name] for name in Form._fields})
                    self._read.setdefault(integers, set()).add((tuple(scales), form))
                    if equation.primitive.name != "quantized_rows":
                        self._multiplied.add(integers)
                continue
            inner = list(_inner_operands(equation))
            passed = {at for _, places in inner for at in places}
            self._otherwise.update(each for at, each in enumerate(indices) if at not in passed)
            for each, places in inner:
                self.visit(each, [None if at is None else indices[at] for at in places])
        self._otherwise.update(known.get(atom) for atom in jaxpr.outvars if not is_literal(atom))


def _inner_operands(equation: Equation) -> Iterator[tuple[Any, _Places]]:
    """Yields inner programs with the indices of their operands; None for changing ones."""
    name, params, count = equation.primitive.name, equation.params, len(equation.invars)
    if name == "scan":
        constants, carried, rows = scan_operands(params, range(count))
        yield params["jaxpr"], [*constants, *[None] * len(carried), *rows]
    elif name == "while":
        tested, both = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        carried = [None] * (count - both)
        yield params["cond_jaxpr"], [*range(tested), *carried]
        yield params["body_jaxpr"], [*range(tested, both), *carried]
    elif name == "cond":
        yield from ((branch, range(1, count)) for branch in params["branches"])
    elif called_program(equation) is not None and not has_own_derivative(equation):
        yield called_program(equation), range(count)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Numbers:
    """The numbers of a weight, where a program has its integers."""

    array: Any
    form: Form = field(metadata={"static": True})


class _Replaced:
    """Evaluates programs with `_Numbers` for some operands; a function that they call is one."""

    def __init__(self) -> None:
        self._functions: dict[int, tuple[Any, Any]] = {}  # by id; kept alive, so that ids stay

    def run(self, program: TracedProgram, operands: Sequence[Any]) -> list[Any]:
        return evaluated(program, operands, self._operate)

    def _operate(self, equation: Equation, operands: list[Any]) -> Sequence[Any]:
        at, rule = _WITH_NUMBERS.get(equation.primitive.name, (0, None))
        if rule is not None and isinstance(operands[at], _Numbers):
            return [rule(*operands[:at], operands[at].array, **equation.params)]
        if not any(isinstance(each, _Numbers) for each in operands):
            return bind_equation(equation, operands)
        results = run_inside(equation, operands, self.run)
        return self._called(called_program(equation))(*operands) if results is None else results

    def _called(self, program: TracedProgram) -> Any:
        if id(program) not in self._functions:
            function = jax.jit(lambda *operands: self.run(program, operands))
            self._functions[id(program)] = program, function
        return self._functions[id(program)][1]


def numbers_of(integers: HasShape, form: Form) -> jax.ShapeDtypeStruct:
    """Returns the struct of a dequantized weight with integers of this shape."""
    return jax.ShapeDtypeStruct(form.shape(integers.shape), np.dtype(form.dtype))
