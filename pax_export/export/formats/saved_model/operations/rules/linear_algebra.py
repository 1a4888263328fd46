"""Factorizations, triangular systems and Fourier transforms, by TensorFlow's kernels.

Complex matrices come as their parts, which are joined around a kernel. Kernels that fail for a
matrix fail for all of a batch; so they are not given those of which jax returns NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from jax.lax import FftType

from pax_export._foundations.types import Equation
from pax_export.export.formats.saved_model.operations.graph import NodeBuilder, Output, rule
from pax_export.export.portable import kept

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
    """Values, which are real, and vectors of matrices of finite numbers; NaN of others."""
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
    builder: NodeBuilder,
    a: Output,
    b: Output,
    *,
    left_side: bool,
    lower: bool,
    transpose_a: bool,
    conjugate_a: bool,
    unit_diagonal: bool,
    **_: object,
) -> Output:
    is_complex = a.dtype.kind == "c"
    if unit_diagonal:
        ones = builder("OnesLike", builder("MatrixDiagPart", a))
        a = builder.shaped(builder("MatrixSetDiag", a, ones), a.shape)
    # x a = b is a' x' = b'
    turned = transpose_a == left_side
    if is_complex and conjugate_a != turned:
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
    builder: NodeBuilder,
    x: Output,
    *imag: Output,
    fft_type: FftType,
    fft_lengths: Sequence[Any],
) -> Any:
    kind = f"{fft_type.name}{_AXES[len(fft_lengths)]}"
    x = _joined(builder, x, *imag) if imag else x
    if kind.startswith("RFFT"):
        dtype = np.result_type(x.dtype, np.complex64)
        return _parts(builder, builder(kind, x, builder.sizes.shape(fft_lengths), Tcomplex=dtype))
    if kind.startswith("IRFFT"):
        dtype = np.finfo(x.dtype).dtype
        return builder(kind, x, builder.sizes.shape(fft_lengths), Treal=dtype)
    return _parts(builder, builder(kind, x))
