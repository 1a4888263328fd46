"""Products, convolutions and pools with features last, linear algebra and Fourier transforms.

Complex matrices come as their parts, which are joined around a kernel. Kernels that fail for a
matrix fail for all of a batch; so they are not given those of which jax returns NaN.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from jax.lax import ConvDimensionNumbers, DotDimensionNumbers, FftType

from pax_export._foundations.types import DTypeLike, Equation, Size
from pax_export.export.formats.saved_model.operations.graph import NodeBuilder, Output, rule
from pax_export.export.portable import kept
from pax_export.export.portable.decompositions.convolutions import is_plain_convolution
from pax_export.export.portable.decompositions.reductions import is_plain_window
from pax_export.export.portable.sizes import is_number


@rule("dot_general")
def dot_general(
    builder: NodeBuilder, x: Output, y: Output, *, dimension_numbers: DotDimensionNumbers,
    **_: object,
) -> Output:  # fmt: skip
    (result,), ((x_sum, y_sum), (x_batch, y_batch)) = builder.results, dimension_numbers
    kind = _carrier(result.dtype)
    x, y = builder.cast(x, kind), builder.cast(y, kind)
    x_free = [axis for axis in range(x.rank) if axis not in (*x_sum, *x_batch)]
    y_free = [axis for axis in range(y.rank) if axis not in (*y_sum, *y_batch)]
    left, x_turned = _matrix(builder, x, x_batch, x_free, x_sum)
    right, y_turned = _matrix(builder, y, y_batch, y_sum, y_free)
    if not x_batch:
        product = builder("MatMul", left, right, transpose_a=x_turned, transpose_b=y_turned)
    else:
        product = builder("BatchMatMulV2", left, right, adj_x=x_turned, adj_y=y_turned)
    rows, columns = ([of.shape[axis] for axis in free] for of, free in ((x, x_free), (y, y_free)))
    batch = [x.shape[axis] for axis in x_batch]
    product = builder.shaped(product, [*batch, math.prod(rows), math.prod(columns)])
    product = builder.reshape(product, result.shape)
    if result.dtype == np.bool_:  # whether any pair is true in both
        return builder("NotEqual", product, np.array(0, kind))
    return builder.cast(product, result.dtype)


def _carrier(dtype: DTypeLike) -> np.dtype:
    """The dtype in which numbers are multiplied: half precision and small integers in 32 bits."""
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        return np.dtype(np.int64 if dtype.itemsize == 8 else np.int32)
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def _matrix(
    builder: NodeBuilder, x: Output, batch: Sequence[int], rows: Sequence[int], columns: Sequence
) -> tuple[Output, bool]:
    """An operand as matrices, and whether they are transposed, which needs no copy."""
    order = [*batch, *rows, *columns]
    turned = [*batch, *columns, *rows]
    is_turned = order != sorted(order) and turned == sorted(turned)
    moved = builder.transpose(x, turned if is_turned else order)
    groups = (columns, rows) if is_turned else (rows, columns)
    sizes = [math.prod(x.shape[axis] for axis in group) for group in groups]
    return builder.reshape(moved, [*(x.shape[axis] for axis in batch), *sizes]), is_turned


# --- convolutions -----------------------------------------------------------


def _is_convolution(equation: Equation) -> bool:
    params = equation.params
    numbers = [end for pair in params["padding"] for end in pair]
    axes, groups = len(params["padding"]), params["feature_group_count"]
    if not is_plain_convolution(equation) or axes > 3:
        return False
    if axes == 3:  # which has a kernel for plain ones only
        plain = set(params["rhs_dilation"]) == {1} and all(map(is_number, numbers))
        return plain and groups == 1
    return True


@rule("conv_general_dilated", when=_is_convolution)
def conv_general_dilated(
    builder: NodeBuilder, x: Output, kernel: Output, *, window_strides: Sequence[int],
    padding: Sequence[tuple[Size, Size]], rhs_dilation: Sequence[int],
    dimension_numbers: ConvDimensionNumbers, feature_group_count: int, **_: object,
) -> Output:  # fmt: skip
    lhs, rhs, out = dimension_numbers
    (result,) = builder.results
    operands = builder.cast(x, np.float32), builder.cast(kernel, np.float32)
    left = builder.transpose(operands[0], [lhs[0], *lhs[2:], lhs[1]])
    right = builder.transpose(operands[1], [*rhs[2:], rhs[1], rhs[0]])
    window = _Window(list(window_strides), list(rhs_dilation), list(padding))
    if len(padding) == 1:  # as a row of an image
        left = builder.reshape(left, [left.shape[0], 1, *left.shape[1:]])
        right = builder.reshape(right, [1, *right.shape])
        window = _Window([1, *window.strides], [1, *window.gaps], [(0, 0), *window.padding])
    output = _convolved(builder, left, right, window, int(feature_group_count))
    order = [out[0], *out[2:], out[1]]
    if len(padding) == 1:
        output = builder("Squeeze", output, squeeze_dims=[1])
    output = builder.shaped(output, [result.shape[axis] for axis in order])
    return builder.cast(builder.turned_back(output, order), result.dtype)


@dataclasses.dataclass(frozen=True)
class _Window:
    strides: list[int]
    gaps: list[int]
    padding: list[tuple[Any, Any]]

    def over(self, x: Output, taps: Sequence[int]) -> dict[str, Any]:
        """The attributes, with padding that is that of "SAME" as such, the fastest one."""
        attributes = {"strides": [1, *self.strides, 1], "dilations": [1, *self.gaps, 1]}
        each = zip(x.shape[1:-1], taps, self.strides, self.gaps, self.padding)
        if all(_is_same(*axis) for axis in each):
            return attributes | {"padding": b"SAME"}
        ends = [int(end) for pair in self.padding for end in pair]
        if not any(ends):
            return attributes | {"padding": b"VALID"}
        return attributes | {"padding": b"EXPLICIT", "explicit_paddings": [0, 0, *ends, 0, 0]}


def _is_same(size: Size, taps: int, step: int, gap: int, ends: tuple[Any, Any]) -> bool:
    if not all(map(is_number, ends)):
        return True
    total = (taps - 1) * gap
    if step > 1:
        if not is_number(size):
            return False
        total = max((-(-size // step) - 1) * step + total + 1 - size, 0)
    return tuple(ends) == (total // 2, total - total // 2)


def _convolved(
    builder: NodeBuilder, x: Output, kernel: Output, window: _Window, groups: int
) -> Output:
    *taps, deep, wide = kernel.shape
    options = window.over(x, taps)
    is_plain = len(taps) == 2 and (groups == 1 or deep != 1 or len(set(window.strides)) != 1)
    if not is_plain and options["padding"] == b"EXPLICIT":
        # Others have no such padding; TensorFlow aborts if it fuses depthwise ones with it.
        ends = np.array([(0, 0), *window.padding, (0, 0)], np.int32)
        x, options = builder("PadV2", x, ends, builder.like(0, x)), options | {"padding": b"VALID"}
        del options["explicit_paddings"]
    if len(taps) == 3:
        return builder("Conv3D", x, kernel, **options)
    if is_plain:
        return builder("Conv2D", x, kernel, **options)
    kernel = builder.reshape(kernel, [*taps, groups, wide // groups])
    return builder("DepthwiseConv2dNative", x, kernel, **options)


# --- pools ------------------------------------------------------------------


def _is_pool(equation: Equation) -> bool:
    """Whether windows are those of a pool of images, with features last."""
    params, rank = equation.params, equation.invars[0].aval.ndim
    widths, steps = params["window_dimensions"], params["window_strides"]
    if rank != 4 or any(each != 1 for each in (widths[0], widths[3], steps[0], steps[3])):
        return False
    return is_plain_window(equation)


@rule("reduce_window_max", when=_is_pool)
def max_pool(builder: NodeBuilder, x: Output, **window: Any) -> Output:
    """NaN if an element is, which the operator passes over."""
    largest = _pooled(builder, "MaxPool", x, window, -np.inf)
    is_bad = builder.cast(builder.shaped(builder("IsNan", x), x.shape), x.dtype)
    bad = _pooled(builder, "MaxPool", is_bad, window, 0)
    flagged = builder("Greater", bad, builder.like(0, x))
    return builder("SelectV2", flagged, builder.like(np.nan, x), largest)


@rule("reduce_window_sum", when=_is_pool)
def sum_pool(builder: NodeBuilder, x: Output, **window: Any) -> Output:
    mean = _pooled(builder, "AvgPool", x, window, 0)
    return builder("Mul", mean, builder.like(math.prod(window["window_dimensions"]), x))


def _pooled(
    builder: NodeBuilder, operator: str, x: Output, window: Mapping[str, Any], edge: float
) -> Output:
    edges, attributes = window["padding"], {"padding": b"VALID"}
    if not all(is_number(end) for pair in edges for end in pair):
        attributes = {"padding": b"SAME"}
    elif any(map(any, edges)):
        x = builder("PadV2", x, np.array(edges, np.int32), builder.like(edge, x))
    sizes = {"ksize": window["window_dimensions"], "strides": window["window_strides"]}
    attributes |= {name: list(map(int, each)) for name, each in sizes.items()}
    return builder(operator, x, **attributes)


# --- linear algebra ---------------------------------------------------------

_DTYPES = ("float32", "float64", "complex64", "complex128")


def _has_kernel(equation: Equation) -> bool:
    x, (_, params) = equation.invars[0].aval, kept.operation(equation)
    if x.dtype.name not in _DTYPES or params.get("pivoting"):
        return False
    whole = (0, min(x.shape[-2:])) if params.get("subset_by_index") else None
    return params.get("subset_by_index") == whole


def _kernel(name: str, arity: int = 1) -> Callable[[Callable], Callable]:
    """Registers a rule for real operands, and as ``complex_…`` for the parts of complex ones."""

    def register(function: Callable) -> Callable:
        def on_parts(builder: NodeBuilder, *parts: Output, **params: Any) -> list[Output]:
            operands = list(parts)
            if len(parts) > arity:
                operands = [_joined(builder, *parts[at : at + 2]) for at in range(0, len(parts), 2)]
            outputs = function(builder, *operands, **params)
            several = outputs if isinstance(outputs, list) else [outputs]
            return [part for each in several for part in _parts(builder, each)]

        rule(name, when=_has_kernel)(function)
        rule(f"complex_{name}", when=_has_kernel)(on_parts)
        return function

    return register


def _joined(builder: NodeBuilder, real: Output, imag: Output) -> Output:
    dtype = np.result_type(real.dtype, np.complex64)
    return builder.shaped(builder("Complex", real, imag, Tout=dtype), real.shape)


def _parts(builder: NodeBuilder, x: Output) -> list[Output]:
    if x.dtype.kind != "c":
        return [x]
    return [builder(each, x, Tout=np.finfo(x.dtype).dtype) for each in ("Real", "Imag")]


def _nan(like: Output) -> np.ndarray:
    return np.asarray(complex(np.nan, np.nan) if like.dtype.kind == "c" else np.nan, like.dtype)


def _lower(builder: NodeBuilder, x: Output) -> Output:
    return builder("MatrixBandPart", x, -1, 0)


def _adjoint(builder: NodeBuilder, x: Output) -> Output:
    x = builder.shaped(builder("Conj", x), x.shape) if x.dtype.kind == "c" else x
    return _transposed(builder, x)


def _of_finite(builder: NodeBuilder, x: Output, factorize: Callable) -> list[Output]:
    """Returns real values and vectors, of `factorize`; NaN for matrices that are not finite."""
    size = builder("ComplexAbs", x, Tout=np.finfo(x.dtype).dtype) if x.dtype.kind == "c" else x
    finite = builder("All", builder("IsFinite", size), [-2, -1], keep_dims=True)
    flags = builder("Squeeze", finite, squeeze_dims=[-1])
    safe = builder("SelectV2", finite, x, builder.like(0, x))
    values, *vectors = factorize(builder.shaped(safe, x.shape))
    values = _parts(builder, values)[0]
    pairs = [(flags, values), *((finite, each) for each in vectors)]
    return [builder("SelectV2", flag, each, _nan(each)) for flag, each in pairs]


@_kernel("cholesky")
def cholesky(builder: NodeBuilder, x: Output, **_: object) -> Output:
    """Above the diagonal, the kernel leaves numbers where the matrix is not positive definite."""
    return _lower(builder, builder("Cholesky", x))


@_kernel("qr")
def qr(builder: NodeBuilder, x: Output, *, full_matrices: bool, **_: object) -> list[Output]:
    return builder("Qr", x, full_matrices=bool(full_matrices))


@_kernel("svd")
def svd(
    builder: NodeBuilder, x: Output, *, full_matrices: bool, compute_uv: bool, **_: object
) -> list[Output]:
    attributes = {"full_matrices": bool(full_matrices), "compute_uv": bool(compute_uv)}

    def factorize(x: Output) -> list[Output]:
        values, left, right = builder("Svd", x, **attributes)
        right = _adjoint(builder, builder.shaped(right, x.shape))
        return [values, left, right] if compute_uv else [values]

    return _of_finite(builder, x, factorize)


@_kernel("eigh")
def eigh(builder: NodeBuilder, x: Output, *, lower: bool, **_: object) -> list[Output]:
    half = _lower(builder, x if lower else _adjoint(builder, x))
    factorize = partial(builder, "SelfAdjointEigV2", compute_v=True)
    values, vectors = _of_finite(builder, builder.shaped(half, x.shape), factorize)
    return [vectors, values]


@_kernel("triangular_solve", arity=2)
def triangular_solve(
    builder: NodeBuilder, a: Output, b: Output, *, left_side: bool, lower: bool, transpose_a: bool,
    conjugate_a: bool, unit_diagonal: bool, **_: object,
) -> Output:  # fmt: skip
    if unit_diagonal:
        ones = builder("OnesLike", builder("MatrixDiagPart", a))
        a = builder.shaped(builder("MatrixSetDiag", a, ones), a.shape)
    # x a = b is a' x' = b'
    turned = transpose_a == left_side
    if a.dtype.kind == "c" and conjugate_a != turned:
        a = builder("Conj", a)
    if not left_side:
        b = _transposed(builder, b)
    solution = builder("MatrixTriangularSolve", a, b, lower=bool(lower), adjoint=bool(turned))
    return solution if left_side else _transposed(builder, builder.shaped(solution, b.shape))


def _transposed(builder: NodeBuilder, x: Output) -> Output:
    return builder.transpose(x, [*range(x.rank - 2), x.rank - 1, x.rank - 2])


#: Fourier transforms by the number of axes.
_AXES = {1: "", 2: "2D", 3: "3D"}


@rule("complex_fft")
def fft(
    builder: NodeBuilder, x: Output, *imag: Output, fft_type: FftType, fft_lengths: Sequence[Size]
) -> list[Output]:
    kind = f"{fft_type.name}{_AXES[len(fft_lengths)]}"
    x = _joined(builder, x, *imag) if imag else x
    if "RFFT" not in kind:
        return _parts(builder, builder(kind, x))
    sizes = builder.sizes.shape(fft_lengths)
    if kind.startswith("IRFFT"):
        return [builder(kind, x, sizes, Treal=np.finfo(x.dtype).dtype)]
    dtype = np.result_type(x.dtype, np.complex64)
    return _parts(builder, builder(kind, x, sizes, Tcomplex=dtype))
