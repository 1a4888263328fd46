"""Products, convolutions, pools, linear algebra, and layers that torch has whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pax_export.export.formats.torch.rules.arrays import filled_around
from pax_export.export.formats.torch.values import TorchValue, carrier, is_number, rule
from pax_export.export.portable import NotInTargetError
from pax_export.export.portable.decompositions.convolutions import is_plain_convolution
from pax_export.export.portable.decompositions.reductions import is_plain_window

if TYPE_CHECKING:
    from jax.lax import ConvDimensionNumbers, DotDimensionNumbers

    from pax_export._foundations.types import Equation, Size
    from pax_export.export.formats.torch.graph import TorchGraph
    from pax_export.export.formats.torch.values import Node

    Padding: TypeAlias = Sequence[tuple[Size, Size]]


@rule("dot_general")
def dot_general(
    builder: TorchGraph, x: TorchValue, y: TorchValue, *, dimension_numbers: DotDimensionNumbers,
    **_: object,
) -> Any:  # fmt: skip
    (result,) = builder.results
    kind = carrier(result.dtype)
    # Of float16 torch has no batched product on every processor.
    wide = "float32" if kind in ("bool", "float16") else kind
    product = _product(builder, x, y, dimension_numbers, result.shape, wide)
    if kind == "bool":
        return builder("ne", product, 0)
    return product if wide == kind else builder.cast_to(product, kind)


def _product(
    builder: TorchGraph, x: TorchValue, y: TorchValue, dimension_numbers: DotDimensionNumbers,
    shape: Sequence[Size], kind: str,
) -> Any:  # fmt: skip
    (x_sum, y_sum), (x_batch, y_batch) = dimension_numbers
    x_free = [axis for axis in range(x.rank) if axis not in (*x_sum, *x_batch)]
    y_free = [axis for axis in range(y.rank) if axis not in (*y_sum, *y_batch)]
    left = builder.transpose_axes(builder.cast_to(x, kind), [*x_batch, *x_free, *x_sum])
    right = builder.transpose_axes(builder.cast_to(y, kind), [*y_batch, *y_sum, *y_free])
    batch, inner = ([x.shape[axis] for axis in axes] for axes in (x_batch, x_sum))
    rows, columns = ([v.shape[a] for a in free] for v, free in ((x, x_free), (y, y_free)))
    lines, depth = (each[0] if len(each) == 1 else math.prod(each) for each in (rows, inner))
    # Without a batch, row axes need no reshape.
    flat = len(rows) == 1 or (bool(rows) and not batch)
    if len(inner) != 1 or not flat:
        left = builder.reshape_to(left, [*batch, *(rows if flat else [lines]), depth])
    if len(inner) != 1 or len(columns) != 1:
        right = builder.reshape_to(right, [*batch, depth, math.prod(columns)])
    # Not `matmul`, in which torch.export distinguishes batches of one.
    if not batch:
        if len(rows) > 1:
            left = builder.reshape_to(left, [lines, depth])
        dot = builder("mm", left, right)
        return dot if len(rows) == len(columns) == 1 else builder.reshape_to(dot, shape)
    if len(batch) > 1:
        outer = math.prod(batch)
        left = builder.reshape_to(left, [outer, lines, depth])
        right = builder.reshape_to(right, [outer, depth, math.prod(columns)])
    dot = builder("bmm", left, right)
    return dot if len(batch) == len(rows) == len(columns) == 1 else builder.reshape_to(dot, shape)


# --- convolutions -----------------------------------------------------------


def _is_convolution(equation: Equation) -> bool:
    params, kernel = equation.params, equation.invars[1].aval
    taps = [kernel.shape[axis] for axis in params["dimension_numbers"].rhs_spec]
    if not 1 <= len(taps) - 2 <= 3:
        return False
    if equation.outvars[0].aval.dtype == np.float64:
        ends = (*taps, *(end for pair in params["padding"] for end in pair))
        if not all(map(is_number, ends)) or params["batch_group_count"] != 1:
            return False
        if min(end for pair in params["padding"] for end in pair) >= 0:
            if all(each == 1 for each in params["lhs_dilation"]):
                return True
    if is_plain_convolution(equation):
        return True
    if "float" not in carrier(equation.outvars[0].aval.dtype):
        return False
    numbers = (*taps, params["feature_group_count"], params["batch_group_count"])
    if params["batch_group_count"] != 1 or not all(map(is_number, numbers)):
        return False
    names = "window_strides padding lhs_dilation rhs_dilation".split()
    return _transposed(taps[2:], *(params[name] for name in names)) is not None


@rule("conv_general_dilated", when=_is_convolution)
def conv_general_dilated(
    builder: TorchGraph, x: TorchValue, kernel: TorchValue, *, window_strides: Sequence[int],
    padding: Padding, lhs_dilation: Sequence[int], rhs_dilation: Sequence[int],
    dimension_numbers: ConvDimensionNumbers, feature_group_count: int, **_: object,
) -> Any:  # fmt: skip
    x_spec, kernel_spec, out_spec = dimension_numbers
    kind = carrier(builder.results[0].dtype)
    left = builder.transpose_axes(builder.cast_to(x, kind), x_spec)
    right = builder.transpose_axes(builder.cast_to(kernel, kind), kernel_spec)
    taps, groups = [kernel.shape[axis] for axis in kernel_spec], int(feature_group_count)
    steps, gaps = ([int(each) for each in axes] for axes in (window_strides, rhs_dilation))
    name = f"nn.functional.conv{{}}{len(taps) - 2}d"
    ends = _transposed(taps[2:], window_strides, padding, lhs_dilation, rhs_dilation)
    if ends is not None:
        right = _transposed_kernel(builder, right, taps, groups)
        steps = [int(each) for each in lhs_dilation]
        output = builder(name.format("_transpose"), left, right, None, steps, *ends, groups, gaps)
    else:
        pads = [0] * len(padding)
        if all(is_number(low) and is_number(high) and low == high for low, high in padding):
            pads = [int(low) for low, _ in padding]
        else:
            left = filled_around(builder, left, [(0, 0), (0, 0), *padding], 0.0)
        output = builder(name.format(""), left, right, None, steps, pads, gaps, groups)
    return builder.transpose_axes(output, [int(axis) for axis in np.argsort(out_spec)])


def _transposed(
    widths: Sequence[Size], strides: Sequence[int], padding: Padding, gaps: Sequence[int],
    dilations: Sequence[int],
) -> tuple[list[int], list[int]] | None:  # fmt: skip
    """The padding of a transposed convolution and of its result; None if it is not one."""
    numbers = (*widths, *(side for pair in padding for side in pair))
    if not all(map(is_number, numbers)):
        return None
    if all(gap == 1 for gap in gaps) or any(step != 1 for step in strides):
        return None
    reach = [gap * (width - 1) for gap, width in zip(dilations, widths)]
    low = [int(each - pair[0]) for each, pair in zip(reach, padding)]
    more = [int(pair[1] - pair[0]) for pair in padding]
    if any(each < 0 for each in low):
        return None
    # torch pads both ends alike, and adds less than a step at one.
    most = (max(gap, dilation) for gap, dilation in zip(gaps, dilations))
    if any(not 0 <= each < limit for each, limit in zip(more, most)):
        return None
    return low, more


def _transposed_kernel(builder: TorchGraph, kernel: Node, taps: Sequence[int], groups: int) -> Any:
    """The kernel of a transposed convolution: backwards, with input features first."""
    outside, inside, *space = map(int, taps)
    axes = list(range(2, len(taps)))
    kernel = builder("flip", kernel, axes)
    if groups == 1:
        return builder.transpose_axes(kernel, [1, 0, *axes])
    apart = builder.reshape_to(kernel, [groups, outside // groups, inside, *space])
    beside = builder.transpose_axes(apart, [0, 2, 1, *(axis + 1 for axis in axes)])
    return builder.reshape_to(beside, [groups * inside, outside // groups, *space])


# --- pools ------------------------------------------------------------------


def _moving_axes(params: Mapping[str, Any]) -> list[int]:
    """The axes along which windows move."""
    windows = (params[f"window_{name}"] for name in ("dimensions", "strides"))
    still = [(1, 1, (0, 0))] * len(params["padding"])
    return [at for at, each in enumerate(zip(*windows, params["padding"])) if each != still[at]]


def _is_pool(equation: Equation) -> bool:
    return is_plain_window(equation) and 1 <= len(_moving_axes(equation.params)) <= 3


def _pool(
    builder: TorchGraph, kind: str, x: Node, shape: Sequence[Size], filling: float,
    window: Mapping[str, Any],
) -> Any:  # fmt: skip
    """A pool over any axes: they go to the end, after two others."""
    moving, padding = _moving_axes(window), window["padding"]
    others = [axis for axis in range(len(shape)) if axis not in moving]
    order = [*others, *moving]
    pooled_shape = [builder.results[0].shape[axis] for axis in order]
    node = builder.transpose_axes(filled_around(builder, x, padding, filling), order)
    # torch.export fixes sizes in pools along one axis: they are along two.
    more = [1] if len(moving) == 1 else []
    is_whole = len(others) == 2 and not more
    if not is_whole:
        padded = [shape[axis] + sum(padding[axis]) for axis in moving]
        count = math.prod(shape[axis] for axis in others)
        node = builder.reshape_to(node, [count, 1, *more, *padded])
    sizes = ([*more, *(int(window[name][axis]) for axis in moving)]
             for name in ("window_dimensions", "window_strides"))  # fmt: skip
    node = builder(f"nn.functional.{kind}_pool{len(moving) + len(more)}d", node, *sizes)
    node = node if is_whole else builder.reshape_to(node, pooled_shape)
    return builder.transpose_axes(node, [int(axis) for axis in np.argsort(order)])


@rule("reduce_window_sum", when=_is_pool)
def sum_pool(builder: TorchGraph, x: TorchValue, **window: Any) -> Any:
    averages = _pool(builder, "avg", builder.node_of(x), x.shape, 0.0, window)
    return builder("mul", averages, math.prod(map(int, window["window_dimensions"])))


@rule("reduce_window_max", when=_is_pool)
def max_pool(builder: TorchGraph, x: TorchValue, **window: Any) -> Any:
    return _pool(builder, "max", builder.node_of(x), x.shape, -math.inf, window)


@rule("reduce_window_min", when=_is_pool)
def min_pool(builder: TorchGraph, x: TorchValue, **window: Any) -> Any:
    node = builder("neg", builder.node_of(x))
    return builder("neg", _pool(builder, "max", node, x.shape, -math.inf, window))


# --- linear algebra ---------------------------------------------------------


def _is_real(equation: Equation) -> bool:
    return equation.outvars[0].aval.dtype in (np.float32, np.float64)


@rule("cholesky", when=_is_real)
def write_cholesky(builder: TorchGraph, x: TorchValue, **_: object) -> Any:
    found = builder("linalg.cholesky_ex", builder.node_of(x))
    # jax has NaN for a matrix that is not positive, of which torch leaves a part.
    bad = builder("ne", builder.take_item(found, 1), 0)
    bad = builder.add_axes(bad, [x.rank - 2, x.rank - 1])
    return builder("where", bad, float("nan"), builder.take_item(found, 0))


@rule("triangular_solve", when=_is_real)
def triangular_solve(
    builder: TorchGraph, a: TorchValue, b: TorchValue, *, left_side: bool, lower: bool,
    transpose_a: bool, conjugate_a: bool, unit_diagonal: bool, **_: object,
) -> Any:  # fmt: skip
    matrix, upper = builder.node_of(a), not lower
    if transpose_a:
        matrix, upper = builder.add_method_call("transpose", matrix, -1, -2), lower
    return builder(
        "linalg.solve_triangular", matrix, builder.node_of(b), upper=upper, left=left_side,
        unitriangular=unit_diagonal,
    )  # fmt: skip


@rule("lu", when=_is_real)
def write_lu(builder: TorchGraph, x: TorchValue) -> Any:
    found = builder("linalg.lu_factor_ex", builder.node_of(x))
    both, pivots = builder.take_items(found, 2)
    # The row of which column is 1 in a matrix of exchanges.
    moves = builder.take_item(builder("lu_unpack", both, pivots, unpack_data=False), 0)
    return [both, builder("sub", pivots, 1), builder.cast_to(builder("argmax", moves, -2), "int32")]


@rule("eigh", when=_is_real)
def write_eigh(
    builder: TorchGraph, x: TorchValue, *, lower: bool,
    subset_by_index: tuple[int, int] | None = None, **_: object,
) -> Any:  # fmt: skip
    if subset_by_index not in (None, (0, x.shape[-1])):
        raise NotInTargetError("of some eigenvalues")
    found = builder("linalg.eigh", builder.node_of(x), UPLO="L" if lower else "U")
    return [builder.take_item(found, 1), builder.take_item(found, 0)]


@rule("svd", when=_is_real)
def write_svd(
    builder: TorchGraph, x: TorchValue, *, full_matrices: bool, compute_uv: bool,
    subset_by_index: tuple[int, int] | None = None, **_: object,
) -> Any:  # fmt: skip
    if subset_by_index not in (None, (0, min(x.shape[-2:]))):
        raise NotInTargetError("of some singular values")
    if not compute_uv:
        return builder("linalg.svdvals", builder.node_of(x))
    found = builder("linalg.svd", builder.node_of(x), full_matrices=full_matrices)
    u, s, v = builder.take_items(found, 3)
    return [s, u, v]


@rule("qr", when=_is_real)
def write_qr(
    builder: TorchGraph, x: TorchValue, *, full_matrices: bool, pivoting: bool = False, **_: object
) -> Any:
    if pivoting:
        raise NotInTargetError("with pivoting")
    mode = "complete" if full_matrices else "reduced"
    return builder.take_items(builder("linalg.qr", builder.node_of(x), mode), 2)


# --- layers that torch has whole --------------------------------------------


@rule("gelu")
def write_gelu(builder: TorchGraph, x: TorchValue, *, approximate: bool) -> Any:
    kind = "tanh" if approximate else "none"
    return builder("nn.functional.gelu", builder.node_of(x), approximate=kind)


rule("softmax")(lambda builder, x, *, axis: builder("softmax", builder.node_of(x), axis))
rule("log_softmax")(lambda builder, x, *, axis: builder("log_softmax", builder.node_of(x), axis))
rule("mean")(
    lambda builder, x, *, axes, keepdims: builder(
        "mean", builder.node_of(x), list(map(int, axes)), keepdims
    )
)


@rule("attention")
def write_attention(
    builder: TorchGraph, query: TorchValue, key: TorchValue, value: TorchValue, *bias: TorchValue,
    scale: float,
) -> Any:  # fmt: skip
    nodes = [builder.node_of(each) for each in (query, key, value)]
    mask = [builder.node_of(each) if each.thin is None or each.bare else each.thin for each in bias]
    output = builder("nn.functional.scaled_dot_product_attention", *nodes, *mask, scale=scale)
    output = builder.transpose_axes(output, [0, 2, 1, 3])
    if builder.live:
        return output
    # ExecuTorch puts other calls here, whose result has another order in memory, and views fail.
    return builder("clone", output, memory_format=builder.dtype_of("contiguous_format"))


@rule("layer_norm")
def layer_norm(
    builder: TorchGraph, x: TorchValue, *vectors: TorchValue, epsilon: float, scaled: bool,
    shifted: bool,
) -> Any:  # fmt: skip
    scale = builder.node_of(vectors[0]) if scaled else None
    shift = builder.node_of(vectors[-1]) if shifted else None
    if any(each.rank != 1 for each in vectors):
        return None
    size = [builder.sizes.of(x.shape[-1])]
    return builder("nn.functional.layer_norm", builder.node_of(x), size, scale, shift, epsilon)


@rule("rms_norm")
def rms_norm(builder: TorchGraph, x: TorchValue, *scale: TorchValue, epsilon: float) -> Any:
    if any(each.rank != 1 for each in scale):
        return None
    size = [builder.sizes.of(x.shape[-1])]
    weight = builder.node_of(scale[0]) if scale else None
    return builder("nn.functional.rms_norm", builder.node_of(x), size, weight, epsilon)


@rule("dft")
def write_dft(builder: TorchGraph, x: TorchValue) -> Any:
    pairs = builder("view_as_complex", builder.add_method_call("contiguous", builder.node_of(x)))
    return builder("view_as_real", builder("fft.fft", pairs, dim=-1))


def _gates(builder: TorchGraph, array: Node, order: Sequence[int]) -> Any:
    """The blocks of rows of a weight in another order."""
    parts = builder("chunk", array, len(order), 0)
    return builder("cat", [builder.take_item(parts, index) for index in order], 0)


def _recurrent(function: str, order: Sequence[int]) -> Callable:
    """A rule for torch's own loop: gates in its order, no batch axis first, one layer."""

    def write_loop(
        builder: TorchGraph, x: TorchValue, w: TorchValue, r: TorchValue, b: TorchValue,
        *states: TorchValue, reverse: bool, reset_after: bool = True, activation: str = "tanh",
    ) -> Any:  # fmt: skip
        # torch resets after the product, and its exporter fixes whether a batch is of one.
        if not reset_after or not (builder.live or is_number(states[0].shape[0])):
            return None
        weights = [builder("select", builder.node_of(each), 0, 0) for each in (w, r, b)]
        params = [*weights[:2], *builder.take_items(builder("chunk", weights[2], 2, 0), 2)]
        if len(order) > 1:
            params = [_gates(builder, each, order) for each in params]
        node = builder.node_of(x)
        node = builder("flip", node, [0]) if reverse else node
        starts = [builder("unsqueeze", builder.node_of(each), 0) for each in states]
        name = f"rnn_{activation}" if function == "rnn" else function
        state = starts if function == "lstm" else starts[0]
        found = builder(name, node, state, params, True, 1, 0.0, False, False, False)
        outputs = builder.take_item(found, 0)
        outputs = builder("flip", outputs, [0]) if reverse else outputs
        last = [builder.take_item(found, index + 1) for index in range(len(states))]
        return [outputs, *(builder("select", each, 0, 0) for each in last)]

    return write_loop


# Ours are input, output, forget, cell; torch's input, forget, cell, output.
rule("lstm")(_recurrent("lstm", (0, 2, 3, 1)))
# Ours are update, reset, new; torch's reset, update, new.
rule("gru")(_recurrent("gru", (1, 0, 2)))
rule("rnn")(_recurrent("rnn", (0,)))
