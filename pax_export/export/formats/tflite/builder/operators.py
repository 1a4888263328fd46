"""TFLite operators as functions of tensors.

The names are those that TensorFlow has for what these operators do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pax_export._foundations.types import DTypeLike
from pax_export.export.formats.tflite.builder.graph import (
    ARITHMETIC,
    Tensor,
    TensorLike,
    alike,
    bool_,
    constant,
    current,
    emit,
    float32,
    int32,
    int64,
    tensor,
)
from pax_export.export.formats.tflite.builder.moves import (
    like_shape,
    one,
    reshape,
)

#: The largest rank that kernels broadcast.
_BROADCAST = 4


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


def _elementwise(
    name: str, fold: Callable, values: Sequence[Tensor], dtype: DTypeLike | None = None
) -> Tensor:
    dtype = values[-1].dtype if dtype is None else dtype
    shape = together(*(each.shape for each in values))
    wide = [each for each in values if not each.shape.known or each.shape.size != 1]
    if len(shape) > _BROADCAST and any(list(each.shape) != shape for each in values):
        if all(list(each.shape) == shape for each in wide) and wide:
            # Kernels broadcast few dimensions: all of them are one meanwhile.
            flat = [reshape(each, [-1]) for each in values]
            return like_shape(_elementwise(name, fold, flat, dtype), wide[0])
    return one(name, values, [(shape, dtype)], fold)


def _binary(
    name: str, fold: Callable, dtype: DTypeLike | None = None
) -> Callable[[Any, Any], Tensor]:
    def operate(x: Tensor, y: Tensor) -> Tensor:
        return _elementwise(name, fold, alike(x, y), dtype)

    return operate


def _unary(name: str, fold: Callable) -> Callable[[Any], Tensor]:
    def operate(x: Tensor) -> Tensor:
        return _elementwise(name, fold, [x])

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


def relu6_of_relu(x: Tensor) -> Tensor | None:
    """The operator that a minimum of 6 and a `relu` is; None for a minimum of 6 and another."""
    if x.made_by != "RELU" or x.graph is not current():
        return None
    return relu6(x.operator.inputs[0])


def abs(x: Tensor) -> Tensor:
    if x.dtype == int64:
        return where(less(x, 0), x * -1, x)
    return _abs(x)


def is_finite(x: Tensor) -> Tensor:
    return less(abs(x), np.inf)


def where(condition: Any, x: Tensor, y: Tensor) -> Tensor:
    x, y = alike(x, y)
    condition = tensor(condition, bool_)
    if condition.value is not None and condition.value.size:
        chosen = x if condition.value.all() else y if not condition.value.any() else None
        shape = together(condition.shape, x.shape, y.shape)
        if chosen is not None and list(chosen.shape) == shape and None not in shape[1:]:
            return chosen
    return _elementwise("SELECT_V2", np.where, [condition, x, y])


def cast(x: TensorLike, dtype: DTypeLike) -> Tensor:
    x, dtype = tensor(x), np.dtype(dtype)
    if x.dtype == dtype:
        return x
    types = {"in_data_type": x.dtype.name, "out_data_type": dtype.name}
    return one("CAST", [x], [(x.shape, dtype)], lambda v: v.astype(dtype), **types)


def bitcast(x: Tensor, dtype: DTypeLike) -> Tensor:
    return one("BITCAST", [x], [(x.shape, dtype)], lambda v: v.view(np.dtype(dtype)))


def _alone(
    name: str, fold: Callable | None = None, dtype: DTypeLike | None = None, **fixed: object
) -> Callable[..., Tensor]:
    """Returns an operator with a result of the shape, and mostly the dtype, of its operand."""
    return lambda x, **options: one(
        name, [x], [(x.shape, dtype or x.dtype)], fold, **fixed, **options
    )


real = _alone("REAL", np.real, float32)
imag = _alone("IMAG", np.imag, float32)
softmax = _alone("SOFTMAX", beta=1.0)
gelu = _alone("GELU")
hard_swish = _alone("HARD_SWISH")


def _reduction(name: str, fold: Callable) -> Callable[..., Tensor]:
    def operate(x: Tensor, axis: Any, keepdims: bool = False) -> Tensor:
        axes = sorted(each % len(x.shape) for each in np.atleast_1d(axis).tolist())
        shape = [1 if i in axes else n for i, n in enumerate(x.shape) if keepdims or i not in axes]
        places = constant(np.array(axes, np.int32))
        return one(
            name, [x, places], [(shape, x.dtype)],
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


def _place(name: str, fold: Callable) -> Callable[[Tensor, int], Tensor]:
    def operate(x: Tensor, axis: int) -> Tensor:
        sizes = [n for i, n in enumerate(x.shape) if i != axis]
        return one(
            name, [x, constant(axis, int32)], [(sizes, int32)], lambda v, a: fold(v, int(a)),
            output_type="int32",
        )  # fmt: skip

    return operate


argmax = _place("ARG_MAX", np.argmax)
argmin = _place("ARG_MIN", np.argmin)


def top_k(x: Tensor, count: TensorLike) -> tuple[Tensor, Tensor]:
    count = tensor(count, int32)
    sizes = [*x.shape[:-1], None if count.value is None else int(count.value)]
    values, places = emit("TOPK_V2", [x, count], [(sizes, x.dtype), (sizes, int32)])
    return values, places


def cumsum(x: Tensor, axis: int = 0, reverse: bool = False) -> Tensor:
    def fold(v: Any, a: Any) -> Any:
        return np.flip(np.cumsum(np.flip(v, a), a), a) if reverse else np.cumsum(v, int(a))

    dimension = constant(axis % len(x.shape), int32)
    return one(
        "CUMSUM", [x, dimension], [(x.shape, x.dtype)], fold, exclusive=False, reverse=reverse
    )


for _name in ("add", "subtract", "multiply"):
    ARITHMETIC[_name] = globals()[_name]
