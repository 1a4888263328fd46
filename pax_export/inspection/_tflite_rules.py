"""What the operations of TFLite give, and how much work they are."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from pax_export.inspection import _file_counts as counts
from pax_export.inspection import _file_shapes as shapes
from pax_export.inspection._file_counts import CountRule, Piece, Pieces, shape_of
from pax_export.inspection._file_graph import Fact, Graph
from pax_export.inspection._file_shapes import ARITHMETIC, Call, Shape, Unknown
from pax_export.inspection._file_work import Language, Loop, Rule

#: What is done to each element of a result at the end, by its number; what a name has is of jax.
_ACTIVATIONS = {1: "max", 2: "clamp", 3: "clamp", 4: "tanh"}
_SAME = 0


def _activated(call: Call, out: Shape) -> Pieces:
    name = _ACTIVATIONS.get(call.attribute("activation", 0))
    return [Piece(name, (out,), (out,))] if name else []


def _with_activation(rule: CountRule) -> CountRule:
    def counted(call: Call, results: Sequence[Fact]) -> Pieces:
        return [*rule(call, results), *_activated(call, shape_of(results))]

    return counted


def _bias(call: Call, out: Shape, place: int = 2) -> Pieces:
    return counts.flops(shapes.product(out)) if call.has(place) else []


# --- windows: the batch first, the features last ------------------------------------------


def _sides(call: Call, what: str, count: int) -> list[int]:
    """An option of each spatial axis."""
    names = ("d", "h", "w")[-count:]
    return [call.attribute(f"{what}_{each}", 1) for each in names]


def _window(call: Call, size: Any, width: int, stride: int, dilation: int) -> Any:
    """How often a window fits, and how much padding lies before it."""
    if size is None:
        return None, 0
    if call.attribute("padding", _SAME) != _SAME:
        return shapes.window(size, width, stride, dilation, 0), 0
    count = (size + stride - 1) // stride
    around = (count - 1) * stride + (width - 1) * dilation + 1 - size
    return count, max(around, 0) // 2 if isinstance(around, int) else 0


def _windows(call: Call, widths: Sequence[int]) -> list[tuple[Any, Any]]:
    count = len(widths)
    strides, dilations = _sides(call, "stride", count), _sides(call, "dilation", count)
    rows = zip(call.shape(0)[1:-1], widths, strides, dilations)
    return [_window(call, *row) for row in rows]


def _first(shape: Shape) -> Shape:
    """The features behind the batch, where `counts.convolution` has them."""
    return (shape[0], shape[-1], *shape[1:-1])


def _kernel(call: Call) -> Shape:
    """The sizes of a kernel: results, features that each is made of, places."""
    name, kernel = call.operation.name, call.shape(1)
    if name == "DEPTHWISE_CONV_2D":
        return (kernel[3], 1, *kernel[1:3])
    if name == "CONV_3D":
        return (kernel[4], kernel[3], *kernel[:3])
    return (kernel[0], kernel[3], *kernel[1:3])


def _conv(call: Call) -> list[Shape]:
    out, _, *widths = _kernel(call)
    return [(call.shape(0)[0], *(count for count, _ in _windows(call, widths)), out)]


def _conv_count(call: Call, results: Sequence[Fact]) -> Pieces:
    out, kernel = shape_of(results), _kernel(call)
    count = len(kernel) - 2
    shape, around = call.shape(0), call.fact(0).margin or ((0, 0),) * (count + 2)
    padding = [(low + zeros, 0) for (_, low), (zeros, _) in
               zip(_windows(call, kernel[2:]), around[1:-1])]  # fmt: skip
    strides, dilations = _sides(call, "stride", count), _sides(call, "dilation", count)
    image = _first(tuple(size - low - high for size, (low, high) in zip(shape, around)))
    pieces = counts.convolution(
        image, kernel, _first(out), strides, padding, [1] * count, dilations
    )
    return [*pieces, *_bias(call, out), *_activated(call, out)]


def _turned(call: Call) -> list[Shape]:
    """A convolution the other way says how large its result is."""
    return [tuple(call.list(0))]


def _turned_count(call: Call, results: Sequence[Fact]) -> Pieces:
    out, image, kernel = shape_of(results), call.shape(2), call.shape(1)
    if call.operation.name == "TRANSPOSE_CONV":
        kernel = (kernel[0], kernel[3], *kernel[1:3])
    else:
        kernel = (kernel[3], kernel[4], *kernel[:3])
    count = len(kernel) - 2
    strides = _sides(call, "stride", count)
    padding = []
    for size, width, stride, wanted in zip(image[1:-1], kernel[2:], strides, out[1:-1]):
        left_out = (size - 1) * stride + width - wanted
        low = max(left_out, 0) // 2 if isinstance(left_out, int) else 0
        padding.append((width - 1 - low, 0))
    ones = [1] * count
    pieces = counts.convolution(_first(image), kernel, _first(out), ones, padding, strides, ones)
    return [*pieces, *_bias(call, out, 3), *_activated(call, out)]


def _pool(call: Call) -> list[Shape]:
    shape = call.shape(0)
    widths = [call.attribute("height", 1), call.attribute("width", 1)]
    return [(shape[0], *(count for count, _ in _windows(call, widths)), shape[-1])]


def _pool_count(call: Call, results: Sequence[Fact]) -> Pieces:
    out = shape_of(results)
    widths = [call.attribute("height", 1), call.attribute("width", 1)]
    return [*counts.pooling(out, widths), *_activated(call, out)]


# --- products -----------------------------------------------------------------------------


def _dense(call: Call) -> list[Shape]:
    shape, (made, taken) = call.shape(0), call.shape(1)
    if call.attribute("keep", 0):
        return [(*shape[:-1], made)]
    return [(shapes.product(shape) // taken, made)]


def _dense_count(call: Call, results: Sequence[Fact]) -> Pieces:
    out = shape_of(results)
    joined = counts.products(out, call.shape(1)[-1])
    return [*joined, *_bias(call, out), *_activated(call, out)]


def _product(call: Call) -> list[Shape]:
    left, right = _turned_back(call, 0, "adj_x"), _turned_back(call, 1, "adj_y")
    return [shapes.matrix_product(left, right)]


def _turned_back(call: Call, place: int, option: str) -> Shape:
    shape = call.shape(place)
    return (*shape[:-2], shape[-1], shape[-2]) if call.attribute(option, 0) else shape


def _product_count(call: Call, results: Sequence[Fact]) -> Pieces:
    return counts.products(shape_of(results), _turned_back(call, 0, "adj_x")[-1])


# --- what moves numbers -------------------------------------------------------------------


def _strided(call: Call) -> list[Any]:
    """What is taken of each axis: a slice, or the place of one that then is gone."""
    if call.attribute("ellipsis_mask", 0) or call.attribute("new_mask", 0):
        raise Unknown
    starts, ends, steps = call.list(1), call.list(2), call.list(3)
    parts: list[Any] = []
    for axis, part in enumerate(zip(starts, ends, steps)):
        start, end, step = part
        if call.attribute("shrink_mask", 0) >> axis & 1:
            parts.append(start)
            continue
        start = None if call.attribute("begin_mask", 0) >> axis & 1 else start
        end = None if call.attribute("end_mask", 0) >> axis & 1 else end
        parts.append(slice(start, end, step))
    return parts + [slice(None, None, 1)] * (len(call.shape(0)) - len(parts))


def _strided_slice(call: Call) -> list[Shape]:
    rows = zip(call.shape(0), _strided(call))
    return [
        tuple(
            shapes.cut(size, part.start, part.stop, part.step)
            for size, part in rows
            if isinstance(part, slice)
        )
    ]


def _strided_value(call: Call) -> np.ndarray:
    return np.asarray(call.value(0)[tuple(_strided(call))], object)


def _slice(call: Call) -> list[Shape]:
    rows = zip(call.shape(0), call.list(1), call.list(2))
    return [tuple(_part(*row) for row in rows)]


def _part(size: Any, start: Any, count: Any) -> Any:
    if isinstance(count, int) and count == -1:
        return None if size is None else size - start
    return count


def _slice_value(call: Call) -> np.ndarray:
    rows = zip(call.shape(0), call.list(1), call.list(2))
    return call.value(0)[tuple(slice(row[1], row[1] + _part(*row)) for row in rows)]


def _reshape(call: Call) -> list[Shape]:
    wanted = call.list(1) if call.has(1) else call.attribute("shape")
    return [shapes.reshaped(call.shape(0), wanted, False)]


def _transpose(call: Call) -> list[Shape]:
    shape = call.shape(0)
    return [tuple(shape[axis] for axis in call.list(1))]


def _concat(call: Call) -> list[Shape]:
    return [shapes.joined(call.shapes, call.attribute("axis", 0))]


def _values(call: Call) -> list[np.ndarray]:
    return [call.value(place) for place in range(len(call))]


def _pack(call: Call) -> list[Shape]:
    shape, axis = call.shape(0), call.attribute("axis", 0)
    axis = shapes.axis_of(axis, len(shape) + 1)
    return [(*shape[:axis], len(call), *shape[axis:])]


def _unpack(call: Call) -> list[Shape]:
    left = shapes.reduced(call.shape(0), [call.attribute("axis", 0)], False)
    return [left] * len(call.operation.results)


def _split(call: Call) -> list[Shape]:
    shape, count = list(call.shape(1)), len(call.operation.results)
    axis = call.one(0)
    shape[axis] = shape[axis] // count
    return [tuple(shape)] * count


def _split_by_sizes(call: Call) -> list[Shape]:
    shape, sizes, axis = call.shape(0), call.list(1), call.one(2)
    axis = shapes.axis_of(axis, len(shape))
    return [
        (*shape[:axis], shape[axis] - sum(sizes) - 1 if size == -1 else size, *shape[axis + 1 :])
        for size in sizes
    ]


def _expand(call: Call) -> list[Shape]:
    return [shapes.unsqueezed(call.shape(0), call.list(1))]


def _squeeze(call: Call) -> list[Shape]:
    return [shapes.squeezed(call.shape(0), call.attribute("axes"))]


def _gather(call: Call) -> list[Shape]:
    axis, batch = call.attribute("axis", 0), call.attribute("batch_dims", 0)
    return [shapes.gathered(call.shape(0), call.shape(1), axis, batch)]


def _gather_value(call: Call) -> np.ndarray:
    if call.attribute("batch_dims", 0):
        raise Unknown
    places = call.value(1).astype(np.int64)
    return np.asarray(np.take(call.value(0), places, axis=call.attribute("axis", 0)), object)


def _pad(call: Call) -> list[Shape]:
    return [shapes.padded(call.shape(0), call.value(1).tolist())]


def _zeros_around(call: Call) -> tuple[tuple[int, int], ...]:
    """Zeros are no numbers of the image that a convolution goes over next."""
    pairs = call.value(1).tolist()
    around = call.fact(0).margin or ((0, 0),) * len(pairs)
    given = call.has(2) and not call.fact(2).zero
    if given or any(size < 0 for pair in pairs for size in pair):
        return ()
    return tuple((a + low, b + high) for (a, b), (low, high) in zip(around, pairs))


def _still_around(rule: shapes.ShapeRule) -> Callable[[Call], tuple[tuple[int, int], ...]]:
    """Zeros stay around what is cut along other axes, as groups of features are."""

    def kept(call: Call) -> tuple[tuple[int, int], ...]:
        margin = call.fact(0).margin
        rows = zip(call.shape(0), rule(call)[0] or (), margin, strict=True)
        same = (before == after or pair == (0, 0) for before, after, pair in rows)
        return margin if all(same) else ()

    return kept


def _top(call: Call) -> list[Shape]:
    return [(*call.shape(0)[:-1], call.list(1)[0])] * 2


def _one_hot(call: Call) -> list[Shape]:
    shape, axis = call.shape(0), call.attribute("axis", -1)
    axis = shapes.axis_of(axis, len(shape) + 1)
    return [(*shape[:axis], call.list(1)[0], *shape[axis:])]


def _reduce(call: Call) -> list[Shape]:
    return [shapes.reduced(call.shape(0), call.list(1), bool(call.attribute("keep", 0)))]


def _reduce_product(call: Call) -> np.ndarray:
    value = call.value(0)
    if value.ndim != 1 or len(_reduce(call)[0]) > 1:
        raise Unknown
    found: Any = 1
    for each in value.tolist():
        found = found * each
    return shapes.objects([found], _reduce(call)[0])


def _reshaped_value(rule: shapes.ShapeRule) -> shapes.ValueRule:
    return lambda call: call.value(0).reshape(rule(call)[0])


# --- loops --------------------------------------------------------------------------------


def _while(call: Call) -> Loop:
    test, body = (call.operation.bodies[each] for each in ("cond_subgraph", "body_subgraph"))
    start = [each or Fact() for each in call.operands]
    kept = [a == b for a, b in zip(body.inputs, body.outputs)]
    given = [fact if same else Fact(fact.shape, fact.dtype) for fact, same in zip(start, kept)]
    rounds = _rounds(test, body, start, kept)
    return Loop(body, given, rounds, lambda found: [Fact(each.shape, each.dtype) for each in given])


def _rounds(test: Graph, body: Graph, start: Sequence[Fact], kept: Sequence[bool]) -> Any:
    """How often a loop runs that counts up to what is known; None for any other loop."""
    decided = _made_by(test, test.outputs[0])
    if decided is None or decided.name != "LESS":
        return None
    counter, limit = decided.operands
    if counter not in test.inputs:
        return None
    place = test.inputs.index(counter)
    last = _known(test, limit, start, kept)
    first = start[place].value
    step = _made_by(body, body.outputs[place])
    if last is None or first is None or step is None or step.name != "ADD":
        return None
    mine = body.inputs[place]
    others = [each for each in step.operands if each != mine]
    if len(others) != 1 or _known(body, others[0], start, kept) != 1:
        return None
    return last - first.ravel()[0]


def _made_by(graph: Graph, key: Hashable) -> Any:
    return next((each for each in graph.operations if key in each.results), None)


def _known(graph: Graph, key: Hashable | None, start: Sequence[Fact], kept: Sequence[bool]) -> Any:
    """The number in an array of a body: a constant, or what no round changes."""
    if key in graph.inputs:
        place = graph.inputs.index(key)
        fact = start[place] if kept[place] else None
    else:
        fact = graph.facts.get(key)
    return fact.value.ravel()[0] if fact is not None and fact.value is not None else None


# --- the table ----------------------------------------------------------------------------


def _each(*names: str, value: str = "", dtype: str | int = 0) -> Rule:
    return Rule(
        shapes.elementwise,
        _with_activation(counts.several(*names)),
        ARITHMETIC.get(value),
        dtype,
    )


def _view(shape: shapes.ShapeRule, value: shapes.ValueRule | None = None) -> Rule:
    """It looks at its operands in another way."""
    return Rule(shape, counts.free, value)


_FIRST = _view(shapes.as_first, shapes.same)
RULES: dict[str, Rule] = {
    **{name: _each("add", value=name.lower()) for name in ("ADD", "SUB", "MUL", "DIV", "NEG")},
    **dict.fromkeys(
        "ABS FLOOR CEIL ROUND SIGN RELU RELU_N1_TO_1 RELU6 RELU_0_TO_1 LOGICAL_OR LOGICAL_AND "
        "SQUARE BITWISE_XOR RIGHT_SHIFT STABLEHLO_SHIFT_LEFT COMPLEX_ABS".split(),
        _each("add"),
    ),
    **dict.fromkeys(("EQUAL", "NOT_EQUAL"), _each("add", dtype="bool")),
    "LOGICAL_NOT": _each("add", value="not"),
    "FLOOR_DIV": _each("add", "add", value="div"),
    "FLOOR_MOD": _each("add", value="mod"),
    "MAXIMUM": _each("add", value="max"),
    "MINIMUM": _each("add", value="min"),
    **{
        name: _each("add", value=name.lower(), dtype="bool")
        for name in ("LESS", "GREATER", "LESS_EQUAL", "GREATER_EQUAL")
    },
    **dict.fromkeys(("SELECT", "SELECT_V2"), _each("add", value="select", dtype=1)),
    **dict.fromkeys(("SQUARED_DIFFERENCE", "PRELU", "LEAKY_RELU"), _each("add", "add")),
    "ADD_N": Rule(shapes.elementwise, counts.joining),
    "CAST": Rule(shapes.as_first, counts.as_jax("add"), shapes.same, ""),
    **dict.fromkeys(
        ("DEQUANTIZE", "QUANTIZE"), Rule(shapes.as_first, counts.several("add", "mul"))
    ),
    **{
        name: _each(jax)
        for name, jax in {
            "EXP": "exp", "LOG": "log", "SQRT": "sqrt", "RSQRT": "rsqrt", "SIN": "sin",
            "COS": "cos", "TANH": "tanh", "LOGISTIC": "logistic", "POW": "pow",
            "ATAN2": "atan2", "STABLEHLO_CBRT": "cbrt",
        }.items()
    },
    "ELU": _each("expm1", "add", "add"),
    "HARD_SWISH": _each("add", "clamp", "mul", "mul"),
    "GELU": _each("tanh", "mul", "mul", "mul", "mul", "mul", "mul", "add", "add"),
    **dict.fromkeys(("SOFTMAX", "LOG_SOFTMAX"), Rule(shapes.as_first, counts.softmax)),
    "L2_NORMALIZATION": _each("mul", "add", "mul"),
    # What only moves numbers.
    "SHAPE": Rule(
        lambda call: [(len(call.shape(0)),)],
        value=lambda call: shapes.objects(call.shape(0)),
        dtype="int32",
    ),
    "RANK": Rule(lambda call: [()], value=lambda call: shapes.objects([len(call.shape(0))], ())),
    "RESHAPE": _view(_reshape, _reshaped_value(_reshape)),
    "SQUEEZE": _view(_squeeze, _reshaped_value(_squeeze)),
    "EXPAND_DIMS": _view(_expand, _reshaped_value(_expand)),
    "TRANSPOSE": _view(_transpose),
    "CONCATENATION": _view(_concat, lambda call: np.concatenate(_values(call))),
    "PACK": _view(_pack, lambda call: np.stack(_values(call))),
    "UNPACK": _view(_unpack),
    "SPLIT": _view(_split),
    "SPLIT_V": _view(_split_by_sizes),
    "STRIDED_SLICE": Rule(
        _strided_slice, value=_strided_value, margin=_still_around(_strided_slice)
    ),
    "SLICE": Rule(_slice, value=_slice_value, margin=_still_around(_slice)),
    "GATHER": _view(_gather, _gather_value),
    "GATHER_ND": _view(lambda call: [shapes.gathered_points(call.shape(0), call.shape(1))]),
    "EMBEDDING_LOOKUP": _view(lambda call: [(*call.shape(0), *call.shape(1)[1:])]),
    "FILL": Rule(
        lambda call: [tuple(call.list(0))],
        value=lambda call: np.full(call.list(0), call.value(1).ravel()[0], object),
        dtype=1,
    ),
    "BROADCAST_TO": _view(lambda call: [tuple(call.list(1))]),
    "BROADCAST_ARGS": Rule(
        lambda call: [(max(each[0] for each in call.shapes),)],
        value=lambda call: shapes.objects(
            shapes.broadcast(*(tuple(call.list(n)) for n in range(len(call))))
        ),
    ),
    "TILE": _view(lambda call: [tuple(a * b for a, b in zip(call.shape(0), call.list(1)))]),
    "RANGE": Rule(
        lambda call: [shapes.ranged(call.list(0)[0], call.list(1)[0], call.list(2)[0])],
    ),
    **dict.fromkeys(("PAD", "PADV2"), Rule(_pad, margin=_zeros_around)),
    **dict.fromkeys(
        "REVERSE_V2 REVERSE_SEQUENCE BITCAST ZEROS_LIKE DYNAMIC_UPDATE_SLICE REAL IMAG "
        "DENSIFY".split(),
        _FIRST,
    ),
    "ONE_HOT": _view(_one_hot),
    "WHERE": Rule(lambda call: [(None, len(call.shape(0)))], dtype="int64"),
    # What only stands there, or gives sizes that the file tells.
    **dict.fromkeys(
        "SPACE_TO_BATCH_ND BATCH_TO_SPACE_ND DEPTH_TO_SPACE SPACE_TO_DEPTH MIRROR_PAD DILATE "
        "MATRIX_DIAG VAR_HANDLE READ_VARIABLE ASSIGN_VARIABLE CALL_ONCE "
        "RESIZE_NEAREST_NEIGHBOR".split(),
        _view(lambda call: []),
    ),
    "SCATTER_ND": Rule(lambda call: [tuple(call.list(2))], counts.updates(1), dtype=1),
    # What joins numbers.
    **dict.fromkeys(
        "SUM REDUCE_MAX REDUCE_MIN REDUCE_ANY REDUCE_ALL".split(),
        Rule(_reduce, counts.reduction()),
    ),
    "REDUCE_PROD": Rule(_reduce, counts.reduction(), _reduce_product),
    "MEAN": Rule(_reduce, counts.reduction("div")),
    **dict.fromkeys(
        ("ARG_MAX", "ARG_MIN"),
        Rule(
            lambda call: [shapes.reduced(call.shape(0), call.list(1), False)],
            counts.argument,
            dtype="int32",
        ),
    ),
    "CUMSUM": Rule(shapes.as_first, counts.cumulative),
    "TOPK_V2": Rule(_top, counts.whole("top_k")),
    "FULLY_CONNECTED": Rule(_dense, _dense_count),
    "BATCH_MATMUL": Rule(_product, _product_count),
    **dict.fromkeys(("CONV_2D", "DEPTHWISE_CONV_2D", "CONV_3D"), Rule(_conv, _conv_count)),
    **dict.fromkeys(
        ("TRANSPOSE_CONV", "CONV_3D_TRANSPOSE"), Rule(_turned, _turned_count, dtype=2)
    ),
    **dict.fromkeys(("MAX_POOL_2D", "AVERAGE_POOL_2D"), Rule(_pool, _pool_count)),
}  # fmt: skip
LANGUAGE = Language(RULES, {"WHILE": _while}, {"IF": 1})
