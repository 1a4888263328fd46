"""Quantized weights: initializers of integers, in the layout in which they are read.

A product with rounded inputs is `MatMulInteger`.

Before a product they are `DequantizeLinear`, which onnxruntime fuses with it, with 8-bit
activations. Elsewhere, in loops and branches, and for `accuracy_level=1`, they are `Cast` and
`Mul`, which it computes once, when it loads a file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from pax_export._foundations.types import DTypeLike
from pax_export.export.formats.onnx.graph import GraphBuilder, rule
from pax_export.export.formats.onnx.rules.convolutions import product
from pax_export.export.formats.onnx.values import RoundedInputs, Value, carrier
from pax_export.export.validation.integers import Quantized
from pax_export.precision.quantized import Form, unpacked

#: `DequantizeLinear` has groups from this opset on.
_GROUPS = 21
#: Inputs that onnxruntime rounds together, with one scale for each channel of a matrix. Its own
#: choice is 32; 128 is 1.4 times as fast, and rounds them by 1.2 times as much.
_BLOCK = 128
#: Two products, whose sum onnxruntime computes in 16 bits on x86 without VNNI, where it overflows.
#: Products of unsigned integers are exact there, and up to three times slower where VNNI is.
_LARGEST = np.full(2, 255, np.uint8), np.full(2, 127, np.int8)
#: (scheme, bits) -> the first opset with such numbers.
_SINCE = {("symmetric", 8): 1, ("symmetric", 4): 21, ("asymmetric", 4): 21, ("float", 8): 19}


@rule("dequantize")
def dequantize(builder: GraphBuilder, *stored: Value, **params: Any) -> Any:
    weight = QuantizedWeight.stored(builder, stored, Form(**params), builder.results[0].dtype)
    if weight is None:
        return None
    name = weight.multiplied(range(stored[0].rank))
    return Value(name, stored[0].dtype, weight.shape)  # which is not rounded


@rule("quantized_dot")
def quantized_dot(
    builder: GraphBuilder, x: Value, *stored: Value, contracted: int, **params: Any
) -> Any:
    (result,), form = builder.results, Form(**params)
    weight = QuantizedWeight.stored(builder, stored, form, result.dtype)
    if weight is None:
        return None
    order = (0, 1) if contracted == -2 else (1, 0)
    float32, shape = np.dtype(np.float32), tuple(weight.shape[axis] for axis in order)
    rounded = builder.rounded.get(x.name)
    if rounded is not None and form.group is None and form.scheme != "float":
        return weight.times(rounded, order, (*x.shape[:-1], shape[1]))
    # onnxruntime 1.32 cannot load a body that dequantizes weights of the outer graph.
    fused = builder.accuracy_level == 4 and form.scheme != "float" and not builder.in_body
    fused = fused and (form.group is None or builder.opset >= _GROUPS)
    if fused and rounded is not None:
        x = rounded.x  # which kernels round in their own way
    matrix = Value(weight.fused(order) if fused else weight.multiplied(order), float32, shape)
    if fused and x.rank == 2:  # of `MatMul` and `Add` onnxruntime would make `Gemm` instead
        x = Value(builder.unsqueeze(x, [0]), x.dtype, (1, *x.shape))
    numbers = (((x.rank - 1,), (0,)), ((), ()))
    output = product(builder, x, matrix, numbers, (*x.shape[:-1], shape[1]), float32)
    return builder.squeeze(output, [0] if x.rank > len(result.shape) else [])


@rule("quantized_rows")
def quantized_rows(builder: GraphBuilder, index: Value, *arrays: Value, **params: Any) -> Any:
    """Reads columns of the matrix as a product has it, so that a tied head has no other one."""
    (result,), form = builder.results, Form(**params)
    weight = QuantizedWeight.stored(builder, arrays, form, result.dtype)
    groups = form.group is not None
    if weight is None or form.axis != -1 or not (groups or weight.is_by_channel(0)):
        return None
    stored = weight.stored_integers((1, 0))
    most = weight.shape[0]  # rows beyond the table are its first or last one, as in jax
    ends = (builder.like(end, index) for end in (-most, most - 1))
    at = builder("Clip", index, *ends)
    # A session computes these once, when it loads the file.
    if form.bits == 4:  # no operator takes columns of these
        columns = builder("Gather", builder.cast(stored, np.int8), at, axis=1)
    else:  # onnxruntime fuses no product whose integers another operator reads
        columns = builder("Gather", builder.unsqueeze(stored, [0]), at, axis=2)
        columns = builder.squeeze(columns, [0])
    columns = builder.cast(columns, np.float32)
    # Cast behind `Gather`: no product is fused whose scales in float32 another operator reads.
    scale = weight.stored_scales((1, 0) if groups else None, 0)
    scale = builder("Gather", scale, at, axis=1 if groups else 0)
    scale = weight.in_float32(scale)
    outer, size = list(index.shape), weight.shape[1]
    if groups:
        columns = builder.reshape(columns, [size // form.group, form.group, *outer])
        for zeros in weight.stored_zeros((1, 0)):
            zeros = builder("Gather", builder.cast(zeros, np.int8), at, axis=1)
            columns = builder(
                "Sub", columns, builder.unsqueeze(builder.cast(zeros, np.float32), [1])
            )
        columns = builder("Mul", columns, builder.unsqueeze(scale, [1]))
        columns = builder.reshape(columns, [size, *outer])
    else:
        columns = builder("Mul", columns, scale)
    return builder.transpose(columns, [*range(1, len(outer) + 1), 0])


@rule("round_inputs")
def round_inputs(builder: GraphBuilder, x: Value, scale: Value, zero: Value) -> Any:
    names = [builder.stored.get(each.name, each.name) for each in (scale, zero)]
    of_scale, of_zero = (builder.initializers.get(name) for name in names)
    if of_scale is None or of_zero is None or of_scale.ndim:
        return None
    unsigned = f"{names[1]}:uint8"
    if unsigned not in builder.initializers:
        builder.store((of_zero.astype(np.int16) + 128).astype(np.uint8), unsigned)
    names[1] = unsigned
    name = builder("QuantizeLinear", builder.cast(x, np.float32), *names)
    return _written_inputs(builder, x, name, names)


def _written_inputs(builder: GraphBuilder, x: Value, integers: str, names: Sequence[str]) -> str:
    result = builder("DequantizeLinear", integers, *names)
    builder.rounded[result] = RoundedInputs(integers, names[0], names[1], x, by_row=False)
    builder.turned[result] = lambda order: _written_inputs(
        builder, _transposed(builder, x, order), builder.transpose(integers, order), names
    )
    return result


def _transposed(builder: GraphBuilder, x: Value, order: Sequence[int]) -> Value:
    return Value(builder.transpose(x, order), x.dtype, tuple(x.shape[axis] for axis in order))


@rule("round_rows")
def round_rows(builder: GraphBuilder, x: Value, *, axes: Sequence[int]) -> Any:
    numbers = builder.cast(x, np.float32)
    name = builder("Abs", numbers)
    name = builder("ReduceMax", name, np.array(axes, np.int64), keepdims=1)
    positive = builder("Greater", name, np.float32(0))
    scale = builder("Where", positive, builder("Div", name, np.float32(127)), np.float32(1))
    integers = builder("Round", builder("Div", numbers, scale))
    return _written_rows(builder, x, integers, scale)


def _written_rows(builder: GraphBuilder, x: Value, integers: str, scale: str) -> str:
    result = builder("Mul", integers, scale)
    zero = np.array(128, np.uint8)
    unsigned = builder.cast(builder("Add", integers, np.float32(128)), np.uint8)
    builder.rounded[result] = RoundedInputs(unsigned, scale, builder.constant(zero), x, by_row=True)

    def turned(order: Sequence[int]) -> str:
        names = [builder.transpose(each, order) for each in (integers, scale)]
        return _written_rows(builder, _transposed(builder, x, order), *names)

    builder.turned[result] = turned
    return result


class QuantizedWeight:
    """A weight with known integers and scales, and its form in the file."""

    def __init__(
        self,
        builder: GraphBuilder,
        names: Sequence[str],
        integers: np.ndarray,
        scales: np.ndarray,
        form: Form,
    ):
        self._builder, self._form = builder, form
        self._leaf, self._scales_name, *self._zeros = names
        self._integers, self._scales = integers, scales
        self.shape = integers.shape

    @staticmethod
    def stored(
        builder: GraphBuilder, operands: Sequence[Value], form: Form, dtype: DTypeLike
    ) -> QuantizedWeight | None:
        """The weight, if it is stored and ONNX has its form."""
        names = [builder.stored.get(each.name, each.name) for each in operands]
        q, s, *zeros = (builder.initializers.get(name) for name in names)
        if q is None or s is None or any(each is None for each in zeros):
            return None
        if builder.opset < _SINCE[form.scheme, form.bits]:
            return None
        if carrier(dtype) != np.float32 or np.dtype(form.dtype) == np.float64:
            return None
        if form.group is None and sum(size != 1 for size in s.shape) > 1:
            return None
        if form.bits == 4:
            q = unpacked(np.asarray(q), form.axis)
        return QuantizedWeight(builder, names, q, s, form)

    def fused(self, order: Sequence[int]) -> str:
        """The name of the numbers, with their axes in another order, as part of a product."""
        builder, group, axis = self._builder, self._form.group, self._scale_axis(order)
        integers = self.stored_integers(order)
        scales = self.in_float32(self.stored_scales(None if group is None else order, axis))
        attributes = {"axis": axis} if group is None else {"axis": axis, "block_size": group}
        inputs, outputs = (self.shape[old] for old in order)
        if group is None and builder.opset >= _GROUPS and inputs > _BLOCK:
            # A session repeats them once, when it loads the file.
            shape = np.array([-(-inputs // _BLOCK), outputs], np.int64)
            scales = builder("Expand", scales, shape)
            attributes = {"axis": 0, "block_size": _BLOCK}
        return builder(
            "DequantizeLinear", integers, scales, *self.stored_zeros(order), **attributes
        )

    def multiplied(self, order: Sequence[int]) -> str:
        """The name of the numbers, with their axes in another order, computed at loading."""
        builder, group, axis = self._builder, self._form.group, self._scale_axis(order)
        numbers = builder.cast(self.stored_integers(order), np.float32)
        scales = self.in_float32(self.stored_scales(order, axis))
        if group is None:
            result = builder("Mul", numbers, scales)
        else:
            sizes = [self.shape[old] for old in order]
            split = sizes[axis] // group, group
            numbers = builder.reshape(numbers, [*sizes[:axis], *split, *sizes[axis + 1 :]])
            for zeros in self.stored_zeros(order):
                zeros = builder.unsqueeze(builder.cast(zeros, np.float32), [axis + 1])
                numbers = builder("Sub", numbers, zeros)
            result = builder("Mul", numbers, builder.unsqueeze(scales, [axis + 1]))
            result = builder.reshape(result, sizes)
        builder.weights[result] = self, tuple(order)
        builder.turned[result] = lambda axes: self.multiplied([order[each] for each in axes])
        return result

    def _scale_axis(self, order: Sequence[int]) -> int:
        """The axis with a scale for each index or group, in another order of the axes."""
        if self._form.group is not None:
            return list(order).index(len(order) + self._form.axis)
        lasting = [new for new, old in enumerate(order) if self._scales.shape[old] != 1]
        return lasting[0] if lasting else len(order) - 1

    def is_by_channel(self, axis: int) -> bool:
        """Whether they are integers with one scale for each index along an axis."""
        sizes = [size for other, size in enumerate(self._scales.shape) if other != axis]
        is_integer = self._form.group is None and self._form.scheme != "float"
        return is_integer and all(size == 1 for size in sizes)

    def times(self, x: RoundedInputs, order: tuple[int, ...], shape: tuple[Any, ...]) -> str:
        """A product with inputs of integers, in float32."""
        builder = self._builder

        def multiply(integers: str, *zero: np.ndarray) -> Value:
            total = builder("MatMulInteger", x.integers, integers, x.zero, *zero)
            return Value(total, np.dtype(np.int32), shape)

        total = self._in_exact_products(multiply, order)
        scale = self.stored_scales(None, 1) if x.by_row else self.scale_with(x)
        result = builder("Mul", builder.cast(total, np.float32), scale)
        return builder("Mul", result, x.scale) if x.by_row else result

    def as_kernel(self, order: tuple[int, ...]) -> str:
        """The numbers, for a convolution of integers; the first axis has a scale for each index."""
        scales = self.in_float32(self.stored_scales(None, 0))
        shape = tuple(self.shape[axis] for axis in order)

        def dequantize(integers: str, *zero: np.ndarray) -> Value:
            zeros = (np.full(self._scales.size, each) for each in zero)
            numbers = self._builder("DequantizeLinear", integers, scales, *zeros, axis=0)
            return Value(numbers, np.dtype(np.float32), shape)

        kernel = self._in_exact_products(dequantize, order)
        self._builder.quantized[kernel] = Quantized(self._leaf, self._form, order)
        return kernel

    def _in_exact_products(self, use: Callable[..., Value], order: tuple[int, ...]) -> str:
        """What is made of the integers, and of their zero point if there is one.

        A session computes the condition when it loads the file, and keeps one branch.
        """
        builder, integers = self._builder, self.stored_integers(order)

        def unsigned() -> list[Value]:
            moved = builder("Sub", builder.cast(integers, np.int32), np.int32(-128))
            return [use(builder.cast(moved, np.uint8), np.array(128, np.uint8))]

        total = builder("MatMulInteger", *_LARGEST)
        is_exact = builder("Equal", total, np.int32(2 * 255 * 127))
        return builder.branched(is_exact, lambda: [use(integers)], unsigned)[0]

    def scale_with(self, x: RoundedInputs) -> str:
        """The name of the scales of products with inputs, one for each channel."""
        name = f"{self._scales_name}:{x.scale}"
        if name not in self._builder.initializers:
            factor = np.float32(self._builder.initializers[x.scale])
            scales = self._scales.reshape(-1).astype(np.float32) * factor
            self._builder.store(scales, name)
        return name

    def stored_integers(self, order: Sequence[int]) -> str:
        name = self._leaf + (":int4" if self._form.bits == 4 else "") + _suffix(order)
        if name not in self._builder.quantized:
            self._builder.quantized[name] = Quantized(self._leaf, self._form, tuple(order))
            array = np.ascontiguousarray(self._integers.transpose(order))
            if self._form.bits == 4:
                array = array.astype(ml_dtypes.int4)
            if name != self._leaf:
                self._builder.store(array, name)
        return name

    def stored_zeros(self, order: Sequence[int]) -> list[str]:
        """The 4-bit zero points in an axis order, if there are any."""
        builder, names = self._builder, []
        for leaf in self._zeros:
            name = f"{leaf}:int4:{''.join(map(str, order))}"
            if name not in builder.initializers:
                turned = builder.initializers[leaf].transpose(order)
                builder.store(np.ascontiguousarray(turned).astype(ml_dtypes.int4), name)
            names.append(name)
        return names

    def stored_scales(self, order: Sequence[int] | None, axis: int) -> str:
        """The scales as they are stored, in an axis order; with None along their only axis."""
        array = self._scales
        array = array.reshape(-1) if order is None else array.transpose(order)
        name = self._scales_name + ("" if array.shape == self._scales.shape else f":{axis}")
        if order is not None:
            name += _suffix(order)
        if name not in self._builder.initializers:
            self._builder.store(np.ascontiguousarray(array), name)
        return name

    def in_float32(self, scales: str) -> str:
        stored = self._scales.dtype == np.float32
        return scales if stored else self._builder.cast(scales, np.float32)


def _suffix(order: Sequence[int]) -> str:
    """The suffix of the name of an array with its axes in another order."""
    return "" if list(order) == sorted(order) else f":{''.join(map(str, order))}"
