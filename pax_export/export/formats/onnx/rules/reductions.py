"""Sums, products and extremes over axes, and along an axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pax_export.export.formats.onnx.graph import Writer
from pax_export.export.formats.onnx.registry import RULES, Refused, rule
from pax_export.export.formats.onnx.rules.arithmetic import extreme
from pax_export.export.formats.onnx.rules.products import product
from pax_export.export.formats.onnx.rules.slices import padded
from pax_export.export.formats.onnx.values import Value, is_number

Results = Sequence[Any]
Axes = Sequence[int]


def reduced(writer: Writer, operator: str, x: Any, axes: Axes, keep: bool = False) -> Any:
    if not len(axes):
        return x
    return writer(operator, x, np.array(axes, np.int64), keepdims=int(keep))


@rule("reduce_sum", part_by_part=True)
def reduce_sum(writer: Writer, results: Results, x: Value, *, axes: Axes, **_: Any) -> Any:
    (result,) = results
    if x.is_float or not len(axes):
        return writer.fit(reduced(writer, "ReduceSum", x, axes), result.dtype)
    # onnxruntime adds whole numbers as float64 and stops at the ends of their type.
    if x.dtype.itemsize == 8:
        sizes = [x.shape[axis] for axis in axes]
        ones = Value(writer.expand(writer.like(1, x), sizes), x.dtype, tuple(sizes))
        numbers = ((tuple(axes), tuple(range(len(axes)))), ((), ()))
        return product(writer, x, ones, numbers, result.shape, x.carrier)
    wide = x.name if x.carrier == np.int64 else writer.cast(x, np.int64)
    total = reduced(writer, "ReduceSum", wide, axes)
    return writer.fit(writer.cast(total, x.carrier), result.dtype)


@rule("reduce_prod")
def reduce_prod(writer: Writer, results: Results, x: Value, *, axes: Axes, **_: Any) -> Any:
    (result,) = results
    if x.carrier == np.float32 or not len(axes):
        return writer.fit(reduced(writer, "ReduceProd", x, axes), result.dtype)
    # onnxruntime multiplies whole numbers as float64, and float64 not at all.
    name, shape = x.name, list(x.shape)
    for axis in sorted(axes, reverse=True):
        if shape[axis] == 0:
            return writer.expand(writer.like(1, x), result.shape)
        value = Value(name, x.dtype, tuple(shape))
        products = RULES["cumprod"](writer, [value], value, axis=axis, reverse=True)
        name, shape = writer.slice(products, axis, 0, 1), [*shape[:axis], 1, *shape[axis + 1 :]]
    return writer.squeeze(name, sorted(axes))


def _extreme(operator: str) -> Callable:
    def apply(writer: Writer, results: Results, x: Value, *, axes: Axes, **_: Any) -> Any:
        if x.dtype == np.bool_:
            logical = {"ReduceMax": reduce_or, "ReduceMin": reduce_and}[operator]
            return logical(writer, results, x, axes=axes)
        plain = reduced(writer, operator, x, axes)
        if not x.is_float or not len(axes):
            return plain
        # NaN if one is, which these operators do not promise.
        bad = writer.cast(writer("IsNaN", x), np.int32)
        any_bad = writer.cast(reduced(writer, "ReduceMax", bad, axes), np.bool_)
        return writer("Where", any_bad, writer.like(np.nan, x), plain)

    return apply


rule("reduce_max")(_extreme("ReduceMax"))
rule("reduce_min")(_extreme("ReduceMin"))


@rule("reduce_or")
def reduce_or(writer: Writer, results: Results, x: Value, *, axes: Axes, **_: Any) -> str:
    return _logical(writer, "ReduceMax", x, axes)


@rule("reduce_and")
def reduce_and(writer: Writer, results: Results, x: Value, *, axes: Axes, **_: Any) -> str:
    return _logical(writer, "ReduceMin", x, axes)


def _logical(writer: Writer, operator: str, x: Value, axes: Axes) -> str:
    if x.dtype != np.bool_:
        raise Refused("of whole numbers")
    found = reduced(writer, operator, writer.cast(x, np.int32), axes)
    return writer.cast(found, np.bool_)


@rule("reduce_xor")
def reduce_xor(writer: Writer, results: Results, x: Value, *, axes: Axes, **_: Any) -> str:
    if x.dtype != np.bool_:
        raise Refused("of whole numbers")
    count = reduced(writer, "ReduceSum", writer.cast(x, np.int32), axes)
    odd = writer("Mod", count, np.array(2, np.int32))
    return writer.cast(odd, np.bool_)


_KINDS = {"add": reduce_sum, "mul": reduce_prod, "or": reduce_or, "and": reduce_and}
_KINDS |= {"max": _extreme("ReduceMax"), "min": _extreme("ReduceMin")}


@rule("reduce")
def reduce_(
    writer: Writer, results: Results, *operands: Value, jaxpr: Any, dimensions: Axes, **_: Any
) -> Any:
    """A reduction by a function: by one operation, if it is one, else in a loop."""
    values, starts = operands[: len(operands) // 2], operands[len(operands) // 2 :]
    equations = getattr(jaxpr, "jaxpr", jaxpr).eqns
    name = equations[0].primitive.name if len(equations) == 1 else ""
    if len(values) == 1 and name in _KINDS:
        found = _KINDS[name](writer, results, values[0], axes=dimensions)
        both = (Value(found, values[0].dtype, results[0].shape), starts[0])
        return writer.inline(jaxpr, both)
    raise Refused("by a function of several operations")


def _arg(operator: str) -> Callable:
    def apply(
        writer: Writer, results: Results, x: Value, *, axes: Axes, index_dtype: Any, **_: Any
    ) -> str:
        (axis,) = axes
        name: Any = writer.cast(x, np.int32) if x.dtype == np.bool_ else x.name
        found = writer(operator, name, axis=axis, keepdims=0)
        if x.is_float:  # the first NaN counts as the extreme
            bad = writer.cast(writer("IsNaN", x), np.int32)
            any_bad = writer.cast(reduced(writer, "ReduceMax", bad, [axis]), np.bool_)
            first = writer("ArgMax", bad, axis=axis, keepdims=0)
            found = writer("Where", any_bad, first, found)
        return found if results[0].dtype == np.int64 else writer.cast(found, np.int32)

    return apply


rule("argmax")(_arg("ArgMax"))
rule("argmin")(_arg("ArgMin"))


@rule("cumsum", part_by_part=True)
def cumsum(writer: Writer, results: Results, x: Value, *, axis: int, reverse: bool) -> str:
    place = np.array(axis, np.int64)
    return writer.fit(writer("CumSum", x, place, reverse=int(reverse)), results[0].dtype)


#: Up to so many elements are combined by doubling, more than that or unknown ones by a loop.
_DOUBLED = 4096


def _cumulative(combine: Callable[[Writer, Any, Any, Value], str], neutral: Callable) -> Callable:
    def apply(writer: Writer, results: Results, x: Value, *, axis: int, reverse: bool) -> Any:
        size = x.shape[axis]
        if is_number(size) and size <= _DOUBLED:
            return _doubled(writer, x, axis, reverse, combine, neutral(x))
        return _scanned(writer, x, axis, reverse, combine, neutral(x))

    return apply


def _doubled(
    writer: Writer, x: Value, axis: int, reverse: bool, combine: Callable, neutral: Any
) -> str:
    name, apart, size = x.name, 1, int(x.shape[axis])
    while apart < size:
        pairs = [(0, 0)] * x.rank
        pairs[axis] = (-apart, apart) if reverse else (apart, -apart)
        moved = padded(writer, name, pairs, writer.like(neutral, x))
        name = writer.fit(combine(writer, name, moved, x), x.dtype)
        apart *= 2
    return name


def _scanned(
    writer: Writer, x: Value, axis: int, reverse: bool, combine: Callable, neutral: Any
) -> str:
    inner = [size for index, size in enumerate(x.shape) if index != axis]
    start = writer.expand(writer.like(neutral, x), inner)
    state, piece = writer.new_name("given"), writer.new_name("given")
    with writer.body() as nodes:
        after = writer.fit(combine(writer, state, piece, x), x.dtype)
    value = Value(after, x.dtype, tuple(inner))
    entries = [writer.entry(name, x.carrier, inner) for name in (state, piece)]
    body = writer.graph(nodes, entries, [value, value])
    flag = [int(reverse)]

    def scanning() -> list[Value]:
        _, made = writer(
            "Scan",
            start,
            x,
            results=2,
            body=body,
            num_scan_inputs=1,
            scan_input_axes=[axis],
            scan_output_axes=[axis],
            scan_input_directions=flag,
            scan_output_directions=flag,
        )
        return [Value(made, x.dtype, x.shape)]

    some = writer.is_some(x.shape[axis])
    if some is None:
        return scanning()[0].name
    return writer.branched(some, scanning, lambda: [x])[0]


def _least(x: Value) -> Any:
    return -np.inf if x.is_float else np.iinfo(x.carrier).min


def _largest(x: Value) -> Any:
    return np.inf if x.is_float else np.iinfo(x.carrier).max


def _log_sum(writer: Writer, x: Any, y: Any, like: Value) -> str:
    top = writer("Max", x, y)
    apart = writer("Neg", writer("Abs", writer("Sub", x, y)))
    more = writer("Log", writer("Add", writer("Exp", apart), writer.like(1, like)))
    equal = writer("Equal", x, y)  # infinities of one sign have no difference
    more = writer("Where", equal, writer.like(np.log(2), like), more)
    return writer("Add", top, more)


rule("cumprod")(_cumulative(lambda w, x, y, _: w("Mul", x, y), lambda _: 1))
rule("cummax")(_cumulative(lambda w, x, y, v: extreme(w, "Max", x, y, v.is_float), _least))
rule("cummin")(_cumulative(lambda w, x, y, v: extreme(w, "Min", x, y, v.is_float), _largest))
rule("cumlogsumexp")(_cumulative(_log_sum, _least))
