"""What the operations of ONNX give, and how much work they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pax_export._wire import ONNX_DTYPES
from pax_export.inspection import _file_counts as counts
from pax_export.inspection import _file_shapes as shapes
from pax_export.inspection._file_counts import Pieces, shape_of
from pax_export.inspection._file_graph import Fact
from pax_export.inspection._file_shapes import ARITHMETIC, Call, Shape, Unknown
from pax_export.inspection._file_work import Language, Loop, Rule

# --- shapes -------------------------------------------------------------------------------


def _axes(call: Call, place: int = 1) -> list[int] | None:
    """Axes are an operand, or an attribute in older models."""
    return call.list(place) if call.has(place) else call.attribute("axes")


def _shape_part(call: Call) -> Any:
    sizes = call.shape(0)
    return sizes[call.attribute("start", 0) : call.attribute("end", len(sizes))]


def _sliced(call: Call) -> list[Any]:
    rank = len(call.shape(0))
    starts, ends = call.list(1), call.list(2)
    axes = call.list(3) if call.has(3) else range(len(starts))
    steps = call.list(4) if call.has(4) else [1] * len(starts)
    found: list[Any] = [(None, None, 1)] * rank
    for axis, *part in zip(axes, starts, ends, steps):
        found[shapes.axis_of(axis, rank)] = part
    return found


def _slice(call: Call) -> list[Shape]:
    rows = zip(call.shape(0), _sliced(call))
    return [tuple(shapes.cut(size, *part) for size, part in rows)]


def _slice_value(call: Call) -> np.ndarray:
    return call.value(0)[tuple(slice(*part) for part in _sliced(call))]


def _reduce(call: Call) -> list[Shape]:
    axes = _axes(call)
    keep = bool(call.attribute("keepdims", 1))
    if not axes and call.attribute("noop_with_empty_axes", 0):
        return [call.shape(0)]
    return [shapes.reduced(call.shape(0), axes or None, keep)]


def _argument(call: Call) -> list[Shape]:
    axis, keep = call.attribute("axis", 0), bool(call.attribute("keepdims", 1))
    return [shapes.reduced(call.shape(0), [axis], keep)]


def _reshape(call: Call) -> list[Shape]:
    keeps = not call.attribute("allowzero", 0)
    return [shapes.reshaped(call.shape(0), call.list(1), keeps)]


def _transpose(call: Call) -> list[Shape]:
    shape = call.shape(0)
    return [tuple(shape[axis] for axis in call.attribute("perm", range(len(shape))[::-1]))]


def _pad(call: Call) -> list[Shape]:
    shape = call.shape(0)
    widths = call.list(1)
    axes = call.list(3) if call.has(3) else list(range(len(shape)))
    pairs = [(0, 0)] * len(shape)
    for n, axis in enumerate(axes):
        pairs[shapes.axis_of(axis, len(shape))] = widths[n], widths[n + len(axes)]
    return [shapes.padded(shape, pairs)]


def _top(call: Call) -> list[Shape]:
    shape = list(call.shape(0))
    shape[call.attribute("axis", -1)] = call.list(1)[0]
    return [tuple(shape)] * 2


def _split(call: Call) -> list[Shape]:
    shape, count = call.shape(0), len(call.operation.results)
    axis = shapes.axis_of(call.attribute("axis", 0), len(shape))
    sizes = call.list(1) if call.has(1) else [-(-shape[axis] // count)] * count
    return [(*shape[:axis], size, *shape[axis + 1 :]) for size in sizes]


def _gemm(call: Call) -> list[Shape]:
    left, right = call.shape(0), call.shape(1)
    rows = left[1 if call.attribute("transA", 0) else 0]
    return [(rows, right[0 if call.attribute("transB", 0) else 1])]


def _fourier(call: Call) -> list[Shape]:
    shape = list(call.shape(0))
    shape[-1] = 2
    axis = call.one(2) if call.has(2) else call.attribute("axis", 1 if len(call) < 3 else -2)
    if call.has(1):
        shape[axis] = call.list(1)[0]
    if call.attribute("onesided", 0):
        shape[axis] = shape[axis] // 2 + 1
    return [tuple(shape)]


def _einsum_sizes(call: Call) -> tuple[dict[str, Any], str]:
    """The size of each letter, and the letters of the result."""
    taken, _, given = str(call.attribute("equation", "")).replace(" ", "").partition("->")
    letters = taken.split(",")
    if not given or "." in taken or len(letters) != len(call):
        raise Unknown
    sizes: dict[str, Any] = {}
    for place, each in enumerate(letters):
        sizes.update(zip(each, call.shape(place)))
    return sizes, given


def _einsum(call: Call) -> list[Shape]:
    sizes, given = _einsum_sizes(call)
    return [tuple(sizes[each] for each in given)]


# --- windows ------------------------------------------------------------------------------


def _windows(call: Call, widths: Sequence[int]) -> tuple[list[int], list[int], list[Any]]:
    """The strides, the dilations, and the padding before and behind."""
    count = len(widths)
    strides = call.attribute("strides", [1] * count)
    dilations = call.attribute("dilations", [1] * count)
    flat = call.attribute("pads", [0] * (2 * count))
    pads: list[Any] = list(zip(flat[:count], flat[count:]))
    way = call.attribute("auto_pad", "NOTSET")
    if way.startswith("SAME"):
        pads = []
        for size, width, stride, dilation in zip(call.shape(0)[2:], widths, strides, dilations):
            around = (-(-size // stride) - 1) * stride + (width - 1) * dilation + 1 - size
            low = max(around, 0) // 2
            pads.append((low, max(around, 0) - low))
    return strides, dilations, pads


def _over_windows(call: Call, widths: Sequence[int]) -> tuple[Any, ...]:
    strides, dilations, pads = _windows(call, widths)
    more = 1 if call.attribute("ceil_mode", 0) else 0
    sizes = []
    for size, width, stride, dilation, pair in zip(
        call.shape(0)[2:], widths, strides, dilations, pads
    ):
        sizes.append(shapes.window(size, width, stride, dilation, sum(pair) + more * (stride - 1)))
    return tuple(sizes)


def _conv(call: Call) -> list[Shape]:
    kernel = call.shape(1)
    return [(call.shape(0)[0], kernel[0], *_over_windows(call, kernel[2:]))]


def _conv_count(call: Call, results: Sequence[Fact]) -> Pieces:
    kernel, out = call.shape(1), shape_of(results)
    strides, dilations, pads = _windows(call, kernel[2:])
    spread = [1] * len(strides)
    pieces = counts.convolution(call.shape(0), kernel, out, strides, pads, spread, dilations)
    return [*pieces, *_bias(call, out)]


def _conv_transpose(call: Call) -> list[Shape]:
    image, kernel = call.shape(0), call.shape(1)
    if call.attribute("output_shape") or "SAME" in call.attribute("auto_pad", ""):
        raise Unknown
    strides, dilations, pads = _windows(call, kernel[2:])
    more = call.attribute("output_padding", [0] * len(strides))
    sizes = [
        (size - 1) * stride + (width - 1) * dilation + 1 + extra - sum(pair)
        for size, width, stride, dilation, pair, extra in zip(
            image[2:], kernel[2:], strides, dilations, pads, more
        )
    ]
    return [(image[0], kernel[1] * call.attribute("group", 1), *sizes)]


def _conv_transpose_count(call: Call, results: Sequence[Fact]) -> Pieces:
    image, kernel, out = call.shape(0), call.shape(1), shape_of(results)
    strides, dilations, pads = _windows(call, kernel[2:])
    turned = (out[1], image[1] // call.attribute("group", 1), *kernel[2:])
    around = [
        ((width - 1) * dilation - low, (width - 1) * dilation - high)
        for width, dilation, (low, high) in zip(kernel[2:], dilations, pads)
    ]
    ones = [1] * len(strides)
    pieces = counts.convolution(image, turned, out, ones, around, strides, dilations)
    return [*pieces, *_bias(call, out)]


def _bias(call: Call, out: Shape) -> Pieces:
    return counts.flops(shapes.product(out)) if call.has(2) else []


def _pool(call: Call) -> list[Shape]:
    shape = call.shape(0)
    found = (*shape[:2], *_over_windows(call, call.attribute("kernel_shape")))
    return [found] * len(call.operation.results)


def _pool_count(call: Call, results: Sequence[Fact]) -> Pieces:
    return counts.pooling(shape_of(results), call.attribute("kernel_shape"))


def _global_pool(call: Call) -> list[Shape]:
    shape = call.shape(0)
    return [(*shape[:2], *(1 for _ in shape[2:]))]


# --- work ---------------------------------------------------------------------------------


def _product_count(call: Call, results: Sequence[Fact]) -> Pieces:
    return counts.products(shape_of(results), call.shape(0)[-1])


def _gemm_count(call: Call, results: Sequence[Fact]) -> Pieces:
    out = shape_of(results)
    contracted = call.shape(0)[0 if call.attribute("transA", 0) else 1]
    scales = sum(call.attribute(each, 1.0) != 1.0 for each in ("alpha", "beta"))
    more = scales + bool(call.has(2))
    return [*counts.products(out, contracted), *counts.flops(more * shapes.product(out))]


def _einsum_count(call: Call, results: Sequence[Fact]) -> Pieces:
    sizes, given = _einsum_sizes(call)
    joined = shapes.product(list(sizes.values()))
    # Where nothing is joined there are multiplications, and no additions.
    return counts.flops(joined * (len(call) if set(sizes) - set(given) else len(call) - 1))


def _scatter_count(call: Call, results: Sequence[Fact]) -> Pieces:
    if call.attribute("reduction", "none") == "none":
        return []
    return counts.flops(shapes.product(call.shape(2)))


def _fourier_count(call: Call, results: Sequence[Fact]) -> Pieces:
    shape, out = call.shape(0), shape_of(results)
    axis = call.one(2) if call.has(2) else call.attribute("axis", -2)
    longest = (shape if call.attribute("onesided", 0) else out)[axis]
    return [counts.Piece("fft", (shape[:-1],), (out[:-1],), {"fft_lengths": (longest,)})]


# --- loops --------------------------------------------------------------------------------


def _without_value(fact: Fact) -> Fact:
    return Fact(fact.shape, fact.dtype)


def _scan(call: Call) -> Loop:
    body = call.operation.bodies["body"]
    rows = call.attribute("num_scan_inputs", 0)
    facts = [each or Fact() for each in call.operands]
    states, scanned = facts[: len(facts) - rows], facts[len(facts) - rows :]
    axes = call.attribute("scan_input_axes", [0] * rows)
    length, given = None, [_without_value(each) for each in states]
    for fact, axis in zip(scanned, axes):
        if fact.shape:
            length = fact.shape[axis]
            kept = tuple(size for n, size in enumerate(fact.shape) if n != axis % len(fact.shape))
            given.append(Fact(kept, fact.dtype))
        else:
            given.append(Fact(None, fact.dtype))
    return Loop(body, given, length, lambda found: _stacked(found, len(states), length))


def _loop(call: Call) -> Loop:
    body = call.operation.bodies["body"]
    states = [_without_value(each or Fact()) for each in call.operands[2:]]
    rounds = None
    if call.has(0) and _goes_on(call):
        fact = call.fact(0)
        rounds = None if fact.value is None else fact.value.ravel()[0]
    given = [Fact((), "int64"), Fact((), "bool"), *states]
    return Loop(body, given, rounds, lambda found: _stacked(found[1:], len(states), rounds))


def _goes_on(call: Call) -> bool:
    """Whether a loop never ends before its last round."""
    body = call.operation.bodies["body"]
    made = {name: each for each in body.operations for name in each.results}
    name = body.outputs[0]
    while name in made and made[name].name == "Identity" and made[name].operands[0]:
        name = made[name].operands[0]
    fact = body.facts.get(name)
    always = fact is not None and fact.value is not None and bool(fact.value.all())
    starts = call.fact(1).value if call.has(1) else np.array(True)
    return (always or name == body.inputs[1]) and starts is not None and bool(np.all(starts))


def _stacked(found: Sequence[Fact], states: int, length: Any) -> list[Fact]:
    """The last states, and of the rest the rows of all rounds."""
    kept = [_without_value(each) for each in found[:states]]
    for each in found[states:]:
        shape = None if each.shape is None else (length, *each.shape)
        kept.append(Fact(shape, each.dtype))
    return kept


# --- the table ----------------------------------------------------------------------------


def _each(name: str, value: str = "", dtype: str | int = 0) -> Rule:
    return Rule(shapes.elementwise, counts.as_jax(name), ARITHMETIC.get(value), dtype)


def _to(call: Call) -> str:
    return ONNX_DTYPES.get(call.attribute("to", 1), "")


def _view(shape: shapes.ShapeRule, value: shapes.ValueRule | None = None) -> Rule:
    """It looks at its first operand in another way."""
    return Rule(shape, counts.free, value)


def _with_shape_of(rule: shapes.ShapeRule) -> shapes.ValueRule:
    """The same numbers in another shape."""
    return lambda call: call.value(0).reshape(rule(call)[0])


def _concat(call: Call) -> list[Shape]:
    return [shapes.joined(call.shapes, call.attribute("axis", 0))]


def _squeeze(call: Call) -> list[Shape]:
    return [shapes.squeezed(call.shape(0), _axes(call))]


def _unsqueeze(call: Call) -> list[Shape]:
    return [shapes.unsqueezed(call.shape(0), _axes(call) or [])]


def _constant_value(call: Call) -> np.ndarray:
    found = call.attribute("value")
    if isinstance(found, Fact) and found.value is not None:
        return found.value
    whole = call.attribute("value_int", call.attribute("value_ints"))
    if whole is None:
        raise Unknown
    return shapes.objects(np.ravel(whole).tolist(), np.shape(whole))


def _constant(call: Call) -> list[Shape]:
    found = call.attribute("value")
    if isinstance(found, Fact) and found.shape is not None:
        return [found.shape]
    whole = call.attribute("value_int", call.attribute("value_ints"))
    return [np.shape(whole) if whole is not None else ()]


_SPLATS = "Add Sub Mul Div Mod".split()
RULES: dict[str, Rule] = {
    **{name: _each("add", name.lower()) for name in _SPLATS},
    **dict.fromkeys(("Sum", "Mean"), Rule(shapes.elementwise, counts.joining)),
    "Max": Rule(shapes.elementwise, counts.joining, ARITHMETIC["max"]),
    "Min": Rule(shapes.elementwise, counts.joining, ARITHMETIC["min"]),
    **dict.fromkeys(
        "Abs Floor Ceil Round Sign Not BitwiseAnd BitwiseOr BitwiseXor BitwiseNot BitShift "
        "Reciprocal Relu PRelu".split(),
        _each("add"),
    ),
    **dict.fromkeys("And Or Xor Equal IsNaN IsInf".split(), _each("add", dtype="bool")),
    "Neg": _each("neg", "neg"),
    "Clip": Rule(shapes.as_first, counts.as_jax("clamp")),
    "Less": _each("add", "less", "bool"),
    "Greater": _each("add", "greater", "bool"),
    "LessOrEqual": _each("add", "less_equal", "bool"),
    "GreaterOrEqual": _each("add", "greater_equal", "bool"),
    "Not": _each("add", "not"),
    "Where": _each("add", "select", 1),
    "Cast": Rule(shapes.as_first, counts.as_jax("add"), shapes.same, _to),
    "LeakyRelu": Rule(shapes.as_first, counts.several("add", "add", "add")),
    **{
        name: _each(name.lower())
        for name in "Exp Log Sqrt Sin Cos Tan Asin Acos Atan Sinh Cosh Asinh Acosh Atanh Tanh "
        "Erf Pow".split()
    },
    "Sigmoid": _each("logistic"),
    "Softmax": Rule(shapes.as_first, counts.softmax),
    "LogSoftmax": Rule(shapes.as_first, counts.softmax),
    # What only moves numbers.
    **dict.fromkeys("Identity Dropout CastLike".split(), _view(shapes.as_first, shapes.same)),
    "Shape": Rule(
        lambda call: [(len(_shape_part(call)),)],
        value=lambda call: shapes.objects(_shape_part(call)),
        dtype="int64",
    ),
    "Size": Rule(
        lambda call: [()],
        value=lambda call: shapes.objects([shapes.product(call.shape(0))], ()),
        dtype="int64",
    ),
    "Reshape": _view(_reshape, _with_shape_of(_reshape)),
    "Squeeze": _view(_squeeze, _with_shape_of(_squeeze)),
    "Unsqueeze": _view(_unsqueeze, _with_shape_of(_unsqueeze)),
    "Flatten": _view(
        lambda call: [
            tuple(
                shapes.product(part)
                for part in (
                    call.shape(0)[: call.attribute("axis", 1)],
                    call.shape(0)[call.attribute("axis", 1) :],
                )
            )
        ]
    ),
    "Transpose": _view(_transpose),
    "Concat": _view(_concat, lambda call: np.concatenate([*map(call.value, range(len(call)))])),
    "Expand": _view(
        lambda call: [shapes.broadcast(call.shape(0), tuple(call.list(1)))],
        lambda call: np.broadcast_to(
            call.value(0), np.broadcast_shapes(call.shape(0), call.list(1))
        ),
    ),
    "Tile": _view(lambda call: [tuple(a * b for a, b in zip(call.shape(0), call.list(1)))]),
    "Slice": _view(_slice, _slice_value),
    "Gather": _view(
        lambda call: [shapes.gathered(call.shape(0), call.shape(1), call.attribute("axis", 0))],
        lambda call: np.take(
            call.value(0), call.value(1).astype(np.int64), axis=call.attribute("axis", 0)
        ),
    ),
    "GatherElements": _view(lambda call: [call.shape(1)]),
    "GatherND": _view(
        lambda call: [
            shapes.gathered_points(call.shape(0), call.shape(1), call.attribute("batch_dims", 0))
        ]
    ),
    "Pad": _view(_pad),
    "Split": _view(_split),
    "Range": Rule(
        lambda call: [shapes.ranged(call.list(0)[0], call.list(1)[0], call.list(2)[0])],
    ),
    "Constant": Rule(_constant, value=_constant_value),
    "ConstantOfShape": Rule(lambda call: [tuple(call.list(0))]),
    "NonZero": Rule(lambda call: [(len(call.shape(0)), None)], dtype="int64"),
    **dict.fromkeys(("ScatterND", "ScatterElements"), Rule(shapes.as_first, _scatter_count)),
    # What joins numbers.
    **dict.fromkeys(
        "ReduceSum ReduceMax ReduceMin ReduceProd".split(), Rule(_reduce, counts.reduction())
    ),
    "ReduceMean": Rule(_reduce, counts.reduction("div")),
    "ReduceSumSquare": Rule(_reduce, lambda call, results: [
        *counts.flops(shapes.product(call.shape(0))), *counts.reduction()(call, results)
    ]),
    **dict.fromkeys(("ArgMax", "ArgMin"), Rule(_argument, counts.argument, dtype="int64")),
    "CumSum": Rule(shapes.as_first, counts.cumulative),
    "TopK": Rule(_top, counts.whole("top_k")),
    "DFT": Rule(_fourier, _fourier_count),
    "MatMul": Rule(
        lambda call: [shapes.matrix_product(call.shape(0), call.shape(1))], _product_count
    ),
    "Gemm": Rule(_gemm, _gemm_count),
    "Einsum": Rule(_einsum, _einsum_count),
    "Conv": Rule(_conv, _conv_count),
    "ConvTranspose": Rule(_conv_transpose, _conv_transpose_count),
    **dict.fromkeys(("MaxPool", "AveragePool"), Rule(_pool, _pool_count)),
    "GlobalAveragePool": Rule(_global_pool, counts.reduction("div")),
    "GlobalMaxPool": Rule(_global_pool, counts.reduction()),
}  # fmt: skip
LANGUAGE = Language(RULES, {"Scan": _scan, "Loop": _loop}, {"If": 1})
