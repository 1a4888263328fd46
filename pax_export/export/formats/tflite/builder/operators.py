"""TFLite's operators as functions of tensors; what is known now is computed at once.

The names are those that TensorFlow has for what these operators do.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pax_export.export.formats.tflite.builder.emit import (
    bool_,
    constant,
    emit,
    float32,
    int32,
    int64,
    is_tensor,
    tensor,
)
from pax_export.export.formats.tflite.builder.emit import static_value as static_value
from pax_export.export.formats.tflite.builder.graph import ARITHMETIC, Tensor, current
from pax_export.export.formats.tflite.builder.schema import TYPES

#: Kernels broadcast arrays of so many dimensions.
_BROADCAST = 4


def _one(*arguments: Any, **options: Any) -> Tensor:
    return emit(*arguments, **options)[0]


def together(*shapes: Sequence[Any]) -> list[Any]:
    """The shape that arrays of these have, one broadcast to the other."""
    rank = max(map(len, shapes))
    wide = [[1] * (rank - len(shape)) + list(shape) for shape in shapes]
    result = []
    for sizes in zip(*wide):
        known = {size for size in sizes if size not in (None, 1)}
        if len(known) > 1:
            raise ValueError(f"shapes {[list(shape) for shape in shapes]} do not fit")
        result.append(known.pop() if known else None if None in sizes else 1)
    return result


def _alike(*values: Any) -> list[Tensor]:
    """Tensors of one dtype: numbers take that of the others."""
    found = next((each.dtype for each in values if isinstance(each, Tensor)), None)
    return [tensor(each, found) for each in values]


def _elementwise(name: str, fold: Callable, values: Sequence[Tensor], dtype: Any = None) -> Tensor:
    dtype = values[-1].dtype if dtype is None else dtype
    shape = together(*(each.shape for each in values))
    wide = [each for each in values if not each.shape.known or each.shape.size != 1]
    if len(shape) > _BROADCAST and any(list(each.shape) != shape for each in values):
        if all(list(each.shape) == shape for each in wide) and wide:
            # Kernels broadcast few dimensions: all of them are one meanwhile.
            flat = [reshape(each, [-1]) for each in values]
            return like_shape(_elementwise(name, fold, flat, dtype), wide[0])
    return _one(name, values, [(shape, dtype)], fold)


def like_shape(x: Tensor, other: Tensor) -> Tensor:
    """A tensor in the shape of another one of as many elements."""
    if sum(size is None for size in other.shape) <= 1 and 0 not in other.shape:
        return reshape(x, [-1 if size is None else size for size in other.shape])
    result = reshape(x, shape(other))
    result.set_shape(other.shape)
    return result


def _binary(name: str, fold: Callable, dtype: Any = None) -> Callable[[Any, Any], Tensor]:
    def operate(x: Any, y: Any) -> Tensor:
        return _elementwise(name, fold, _alike(x, y), dtype)

    return operate


def _unary(name: str, fold: Callable) -> Callable[[Any], Tensor]:
    def operate(x: Any) -> Tensor:
        x = tensor(x)
        return _one(name, [x], [(x.shape, x.dtype)], fold)

    return operate


def _quotient(x: Any, y: Any) -> Any:
    if x.dtype.kind == "f":
        return x / y
    return np.where(y == 0, 0, np.sign(x) * np.sign(y) * (np.abs(x) // np.maximum(np.abs(y), 1)))


add = _binary("ADD", np.add)
subtract = _binary("SUB", np.subtract)
multiply = _binary("MUL", np.multiply)
divide = _binary("DIV", _quotient)
maximum = _binary("MAXIMUM", np.maximum)
minimum = _binary("MINIMUM", np.minimum)
floormod = _binary("FLOOR_MOD", np.mod)
floordiv = _binary("FLOOR_DIV", np.floor_divide)
pow = _binary("POW", np.power)
atan2 = _binary("ATAN2", np.arctan2)
bitwise_xor = _binary("BITWISE_XOR", np.bitwise_xor)
right_shift = _binary("RIGHT_SHIFT", np.right_shift)
logical_and = _binary("LOGICAL_AND", np.logical_and)
logical_or = _binary("LOGICAL_OR", np.logical_or)
equal = _binary("EQUAL", np.equal, bool_)
not_equal = _binary("NOT_EQUAL", np.not_equal, bool_)
less = _binary("LESS", np.less, bool_)
less_equal = _binary("LESS_EQUAL", np.less_equal, bool_)
greater = _binary("GREATER", np.greater, bool_)
greater_equal = _binary("GREATER_EQUAL", np.greater_equal, bool_)
logical_not = _unary("LOGICAL_NOT", np.logical_not)
sqrt = _unary("SQRT", np.sqrt)
rsqrt = _unary("RSQRT", lambda x: 1 / np.sqrt(x))
exp = _unary("EXP", np.exp)
log = _unary("LOG", np.log)
sin = _unary("SIN", np.sin)
cos = _unary("COS", np.cos)
tanh = _unary("TANH", np.tanh)
sigmoid = _unary("LOGISTIC", lambda x: 1 / (1 + np.exp(-x)))
floor = _unary("FLOOR", np.floor)
ceil = _unary("CEIL", np.ceil)
round = _unary("ROUND", np.rint)
relu = _unary("RELU", lambda x: np.where(x < 0, np.zeros_like(x), x))
relu6 = _unary("RELU6", lambda x: np.where(x < 0, np.zeros_like(x), np.where(x > 6, 6, x)))
_abs = _unary("ABS", np.abs)


def abs(x: Any) -> Tensor:
    x = tensor(x)
    if x.dtype == int64:
        return where(less(x, 0), x * -1, x)
    return _abs(x)


def is_finite(x: Any) -> Tensor:
    return less(abs(x), np.inf)


def where(condition: Any, x: Any, y: Any) -> Tensor:
    x, y = _alike(x, y)
    condition = tensor(condition, bool_)
    return _elementwise("SELECT_V2", np.where, [condition, x, y])


def cast(x: Any, dtype: Any) -> Tensor:
    x, dtype = tensor(x), np.dtype(dtype)
    if x.dtype == dtype:
        return x
    types = {"in_type": TYPES[x.dtype.name], "out_type": TYPES[dtype.name]}
    return _one("CAST", [x], [(x.shape, dtype)], lambda v: v.astype(dtype), **types)


def bitcast(x: Any, dtype: Any) -> Tensor:
    x = tensor(x)
    return _one("BITCAST", [x], [(x.shape, dtype)], lambda v: v.view(np.dtype(dtype)))


def real(x: Tensor) -> Tensor:
    return _one("REAL", [x], [(x.shape, float32)], np.real)


def imag(x: Tensor) -> Tensor:
    return _one("IMAG", [x], [(x.shape, float32)], np.imag)


def zeros(shape: Sequence[int], dtype: Any) -> Tensor:
    return fill(np.array(shape, np.int32), constant(0, dtype))


def zeros_like(x: Any) -> Tensor:
    return _filled_like(x, 0)


def ones_like(x: Any) -> Tensor:
    return _filled_like(x, 1)


def _filled_like(x: Any, value: int) -> Tensor:
    x = tensor(x)
    result = fill(shape(x), constant(value, x.dtype))
    result.set_shape(x.shape)
    return result


def fill(dims: Any, value: Any) -> Tensor:
    dims, value = tensor(dims, int32), tensor(value)
    sizes = _known_sizes(dims)
    return _one("FILL", [dims, value], [(sizes, value.dtype)], lambda d, v: np.full(d, v))


def _known_sizes(dims: Tensor) -> list[Any]:
    """What is known of a shape that is a tensor."""
    if dims.value is not None:
        return [int(size) for size in dims.value]
    (rank,) = dims.shape
    if dims.made_by == "PACK":
        given = dims.operator.inputs
        return [None if each.value is None else int(each.value) for each in given]
    return [None] * rank


def shape(x: Any) -> Tensor:
    x = tensor(x)
    if x.shape.known:
        return constant(np.array(x.shape, np.int32))
    return _one("SHAPE", [x], [([len(x.shape)], int32)], out_type=TYPES["int32"])


def stack(values: Sequence[Any], axis: int = 0) -> Tensor:
    found = [tensor(each, int32) if not is_tensor(each) else each for each in values]
    first = found[0]
    sizes = list(first.shape)
    sizes.insert(axis, len(found))
    return _one(
        "PACK", found, [(sizes, first.dtype)], lambda *v: np.stack(v, axis),
        values_count=len(found), axis=axis,
    )  # fmt: skip


def concat(values: Sequence[Any], axis: int) -> Tensor:
    found = _alike(*values)
    axis %= len(found[0].shape)
    sizes = [
        next((n for n in each if n is not None), None) for each in zip(*(t.shape for t in found))
    ]
    along = [each.shape[axis] for each in found]
    sizes[axis] = None if None in along else sum(along)
    return _one(
        "CONCATENATION", found, [(sizes, found[0].dtype)], lambda *v: np.concatenate(v, axis),
        axis=axis,
    )  # fmt: skip


def reshape(x: Any, sizes: Any) -> Tensor:
    x = tensor(x)
    if not isinstance(sizes, Tensor) and any(is_tensor(each) for each in sizes):
        sizes = stack(list(sizes))
    target = tensor(sizes, int32)
    if target.shape == (0,):
        target = constant(np.zeros(0, np.int32))
    found = _known_sizes(target)
    if found.count(-1) == 1:
        rest = [size for size in found if size != -1]
        place = found.index(-1)
        found[place] = None
        if x.shape.known and None not in rest and 0 not in rest:
            found[place] = x.shape.size // int(np.prod(rest, dtype=np.int64))
            target = constant(np.array(found, np.int32))
    if list(x.shape) == found and found.count(None) == 0:
        return x
    if x.made_by == "RESHAPE" and x.graph is current():
        x = x.operator.inputs[0]
        if list(x.shape) == found and found.count(None) == 0:
            return x
    return _one("RESHAPE", [x, target], [(found, x.dtype)], lambda v, s: v.reshape(s))


def squeeze(x: Tensor, axis: int) -> Tensor:
    sizes = list(x.shape)
    del sizes[axis]
    if sizes.count(None) <= 1:
        return reshape(x, [-1 if size is None else size for size in sizes])
    index: list[Any] = [slice(None)] * len(x.shape)
    index[axis] = 0
    return getitem(x, tuple(index))


def expand_dims(x: Any, axis: int) -> Tensor:
    x = tensor(x)
    sizes = list(x.shape)
    axis = axis if axis >= 0 else len(sizes) + 1 + axis
    sizes.insert(axis, 1)
    if sizes.count(None) <= 1 and 0 not in sizes:
        return reshape(x, [-1 if size is None else size for size in sizes])
    place = constant(axis, int32)
    return _one(
        "EXPAND_DIMS", [x, place], [(sizes, x.dtype)], lambda v, a: np.expand_dims(v, int(a))
    )


def transpose(x: Any, permutation: Sequence[int]) -> Tensor:
    x = tensor(x)
    permutation = [int(each) for each in permutation]
    if x.made_by == "TRANSPOSE" and x.graph is current():
        before = x.operator.inputs[1].value
        x, permutation = x.operator.inputs[0], [int(before[each]) for each in permutation]
    if permutation == sorted(permutation):
        return x
    sizes = [x.shape[axis] for axis in permutation]
    wide = [axis for axis in permutation if x.shape[axis] != 1]
    if wide == sorted(wide) and sizes.count(None) <= 1 and 0 not in sizes:
        return reshape(x, [-1 if size is None else size for size in sizes])
    order = constant(np.array(permutation, np.int32))
    return _one("TRANSPOSE", [x, order], [(sizes, x.dtype)], lambda v, p: np.transpose(v, p))


def broadcast_to(x: Any, sizes: Any) -> Tensor:
    x, target = tensor(x), tensor(sizes, int32)
    found = _known_sizes(target)
    if list(x.shape) == found and None not in found:
        return x
    return _one("BROADCAST_TO", [x, target], [(found, x.dtype)], lambda v, s: np.broadcast_to(v, s))


def tile(x: Tensor, times: Any) -> Tensor:
    times = tensor(times, int32)
    counts = _known_sizes(times)
    sizes = [None if None in (n, t) else n * t for n, t in zip(x.shape, counts)]
    return _one("TILE", [x, times], [(sizes, x.dtype)], lambda v, t: np.tile(v, t))


def pad(x: Tensor, widths: Any, constant_values: Any = 0) -> Tensor:
    widths, value = tensor(widths, int32), tensor(constant_values, x.dtype)
    sizes: list[Any] = [None] * len(x.shape)
    if widths.value is not None:
        sizes = [None if n is None else n + int(w.sum()) for n, w in zip(x.shape, widths.value)]
    elif widths.made_by == "PACK":
        rows = [each.value for each in widths.operator.inputs]
        sizes = [
            None if n is None or row is None else n + int(row.sum())
            for n, row in zip(x.shape, rows)
        ]
    if value.value is not None and x.dtype == float32 and value.value.tobytes() == bytes(4):
        if x.made_by == "PAD" and widths.value is not None and x.graph is current():
            before = x.operator.inputs[1].value
            if before is not None:
                return pad(x.operator.inputs[0], before + widths.value)
        return _one("PAD", [x, widths], [(sizes, x.dtype)], lambda v, w: np.pad(v, w))
    return _one(
        "PADV2", [x, widths, value], [(sizes, x.dtype)],
        lambda v, w, c: np.pad(v, w, constant_values=c),
    )  # fmt: skip


def reverse(x: Tensor, axes: Sequence[int]) -> Tensor:
    places = constant(np.array(axes, np.int32))
    return _one("REVERSE_V2", [x, places], [(x.shape, x.dtype)], lambda v, a: np.flip(v, tuple(a)))


def range(start: Any, limit: Any = None) -> Tensor:
    if limit is None:
        start, limit = constant(0), start
    first, last = tensor(start, int32), tensor(limit, int32)
    size = None
    if first.value is not None and last.value is not None:
        size = max(int(last.value) - int(first.value), 0)
    ends = [reshape(first, []), reshape(last, []), constant(1)]
    return _one("RANGE", ends, [([size], int32)], lambda a, b, c: np.arange(a, b, c, np.int32))


def slice_(x: Tensor, begin: Any, size: Any) -> Tensor:
    begin, size = tensor(begin, int32), tensor(size, int32)
    sizes = _known_sizes(size)
    return _one("SLICE", [x, begin, size], [(sizes, x.dtype)], _sliced)


def _sliced(x: Any, begin: Any, size: Any) -> Any:
    return x[tuple(slice(int(b), int(b) + int(s)) for b, s in zip(begin, size))]


def getitem(x: Tensor, index: Any) -> Tensor:
    """``x[index]``: numbers and slices, whose ends may be tensors, None and an ellipsis."""
    index = list(index) if isinstance(index, tuple) else [index]
    given = sum(each is not None and each is not Ellipsis for each in index)
    if any(each is Ellipsis for each in index):
        place = next(i for i, each in enumerate(index) if each is Ellipsis)
        index[place : place + 1] = [slice(None)] * (len(x.shape) - given)
    else:
        index += [slice(None)] * (len(x.shape) - given)
    kept = [each for each in index if each is not None]
    if x.made_by == "SHAPE" and isinstance(kept[0], int):
        size = x.operator.inputs[0].shape[kept[0]]
        if size is not None:
            return constant(size, int32)
    result = _strided(x, kept)
    place = 0
    for each in index:
        if each is None:
            result = expand_dims(result, place)
        place += each is None or isinstance(each, slice)
    return result


def _strided(x: Tensor, index: Sequence[Any]) -> Tensor:
    begin, end, steps, sizes = [], [], [], []
    masks = {"begin_mask": 0, "end_mask": 0, "shrink_axis_mask": 0}
    for axis, (each, size) in enumerate(zip(index, x.shape)):
        if not isinstance(each, slice):
            each = each if is_tensor(each) else int(each)
            begin.append(each)
            end.append(each + 1)
            steps.append(1)
            masks["shrink_axis_mask"] |= 1 << axis
            continue
        step = 1 if each.step is None else int(each.step)
        begin.append(0 if each.start is None else each.start)
        end.append(0 if each.stop is None else each.stop)
        steps.append(step)
        masks["begin_mask"] |= (each.start is None) << axis
        masks["end_mask"] |= (each.stop is None) << axis
        sizes.append(_length(each, size))
    if all(isinstance(each, slice) and each == slice(None) for each in index):
        return x
    if (
        not masks["shrink_axis_mask"]
        and sizes == list(x.shape)
        and None not in sizes
        and min(steps) > 0
    ):
        return x

    def fold(v: Any, *_: Any) -> Any:
        return v[tuple(_numbers(each) for each in index)]

    known = all(map(_is_known, index))
    ends = [stack(begin), stack(end), constant(np.array(steps, np.int32))]
    return _one(
        "STRIDED_SLICE", [x, *ends], [(sizes, x.dtype)], fold if known else None, **masks
    )  # fmt: skip


def _is_known(each: Any) -> bool:
    ends = (each.start, each.stop) if isinstance(each, slice) else (each,)
    return all(not is_tensor(end) or end.value is not None for end in ends)


def _numbers(each: Any) -> Any:
    def number(end: Any) -> Any:
        return int(end.value) if is_tensor(end) else end

    if isinstance(each, slice):
        return slice(number(each.start), number(each.stop), each.step)
    return number(each)


def _length(each: slice, size: Any) -> Any:
    if size is None or not _is_known(each):
        return None
    return len(builtins.range(*_numbers(each).indices(size)))


def gather(x: Any, places: Any, axis: int = 0, batch_dims: int = 0) -> Tensor:
    x, places = tensor(x), tensor(places, int32)
    axis %= max(len(x.shape), 1)
    sizes = [*x.shape[:axis], *places.shape[batch_dims:], *x.shape[axis + 1 :]]
    fold = (lambda v, p: np.take(v, p, axis)) if batch_dims == 0 else None
    return _one(
        "GATHER", [x, places], [(sizes, x.dtype)], fold, axis=axis, batch_dims=batch_dims
    )  # fmt: skip


def scatter_nd(indices: Any, updates: Any, sizes: Any) -> Tensor:
    sizes = tensor(sizes, int32)
    return _one("SCATTER_ND", [indices, updates, sizes], [(_known_sizes(sizes), updates.dtype)])


def _segment(name: str) -> Callable[[Tensor, Tensor, Any], Tensor]:
    def operate(rows: Tensor, places: Tensor, count: Any) -> Tensor:
        count = tensor(count, int32)
        first = None if count.value is None else int(count.value)
        return _one(name, [rows, places, count], [([first, *rows.shape[1:]], rows.dtype)])

    return operate


unsorted_segment_sum = _segment("UNSORTED_SEGMENT_SUM")
unsorted_segment_prod = _segment("UNSORTED_SEGMENT_PROD")
unsorted_segment_max = _segment("UNSORTED_SEGMENT_MAX")
unsorted_segment_min = _segment("UNSORTED_SEGMENT_MIN")


def dynamic_update_slice(x: Tensor, update: Tensor, starts: Any) -> Tensor:
    starts = tensor(starts, int32)
    return _one("DYNAMIC_UPDATE_SLICE", [x, update, starts], [(x.shape, x.dtype)])


def _reduction(name: str, fold: Callable) -> Callable[..., Tensor]:
    def operate(x: Any, axis: Any = None, keepdims: bool = False) -> Tensor:
        x = tensor(x)
        rank = len(x.shape)
        axes = list(builtins.range(rank)) if axis is None else np.atleast_1d(axis).tolist()
        axes = sorted(each % rank for each in axes)
        if not axes:
            return x
        kept = [1 if i in axes else n for i, n in enumerate(x.shape) if keepdims or i not in axes]
        places = constant(np.array(axes, np.int32))
        return _one(
            name, [x, places], [(kept, x.dtype)],
            lambda v, _: fold(v, axis=tuple(axes), keepdims=keepdims), keep_dims=keepdims,
        )  # fmt: skip

    return operate


reduce_sum = _reduction("SUM", np.sum)
reduce_mean = _reduction("MEAN", np.mean)
reduce_prod = _reduction("REDUCE_PROD", np.prod)
reduce_max = _reduction("REDUCE_MAX", np.max)
reduce_min = _reduction("REDUCE_MIN", np.min)
reduce_any = _reduction("REDUCE_ANY", np.any)
reduce_all = _reduction("REDUCE_ALL", np.all)


def argmax(x: Tensor, axis: int) -> Tensor:
    sizes = [n for i, n in enumerate(x.shape) if i != axis % len(x.shape)]
    return _one(
        "ARG_MAX", [x, constant(axis, int32)], [(sizes, int32)],
        lambda v, a: np.argmax(v, int(a)), output_type=TYPES["int32"],
    )  # fmt: skip


def top_k(x: Tensor, count: Any) -> tuple[Tensor, Tensor]:
    count = tensor(count, int32)
    sizes = [*x.shape[:-1], None if count.value is None else int(count.value)]
    values, places = emit("TOPK_V2", [x, count], [(sizes, x.dtype), (sizes, int32)])
    return values, places


def cumsum(x: Tensor, axis: int = 0, reverse: bool = False) -> Tensor:
    def fold(v: Any, a: Any) -> Any:
        return np.flip(np.cumsum(np.flip(v, a), a), a) if reverse else np.cumsum(v, int(a))

    place = constant(axis % len(x.shape), int32)
    return _one("CUMSUM", [x, place], [(x.shape, x.dtype)], fold, exclusive=False, reverse=reverse)


def softmax(x: Tensor) -> Tensor:
    return _one("SOFTMAX", [x], [(x.shape, x.dtype)], beta=1.0)


def gelu(x: Tensor, approximate: bool) -> Tensor:
    return _one("GELU", [x], [(x.shape, x.dtype)], approximate=approximate)


def identity(x: Any) -> Tensor:
    """A tensor of its own with the same elements."""
    x = tensor(x)
    if x.shape.known:
        target: Any = constant(np.array(x.shape, np.int32).reshape(-1))
    else:
        target = shape(x)
    return current().append("RESHAPE", [x, target], [(x.shape, x.dtype)], {"copied": True})[0]


for _name in ("add", "subtract", "multiply", "divide", "floordiv", "floormod", "getitem"):
    ARITHMETIC[_name] = globals()[_name]
