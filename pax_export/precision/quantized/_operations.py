"""JAX primitives on integers and scales, which exporters write as their runtime's kernels.

Others use `dequantized` and an ordinary product. CPUs compute products as `_blocks.py` does, and
GPUs as `_integers.py` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pax_export._foundations.types import Array, DTypeLike
from pax_export.precision.quantized._activations import linear_in, primitive
from pax_export.precision.quantized._blocks import blockwise, is_read_in_blocks
from pax_export.precision.quantized._integers import Form, dequantized, plain_dot, product_on_gpu


def dequantize(*stored: Array, form: Form) -> Any:
    """Returns the array that integers, scales and optional zero points represent."""
    return _dequantize.bind(*stored, **form._asdict())


def quantized_dot(x: Array, *stored: Array, form: Form, contracted: int) -> Any:
    """``x [..., k]`` times a matrix, over its rows (-2) or its columns (-1)."""
    return _dot.bind(x, *stored, contracted=contracted, **form._asdict())


def quantized_rows(index: Array, *stored: Array, form: Form) -> Any:
    """Returns rows of a quantized table."""
    return _rows.bind(index, *stored, **form._asdict())


def decomposed_dequantize(*stored: Array, **form: Any) -> Any:
    """`dequantize` in other operations of jax."""
    return dequantized(*stored, form=Form(**form))


def decomposed_dot(x: Array, *stored: Array, contracted: int, **form: Any) -> Any:
    """`quantized_dot` as an ordinary product with the dequantized array."""
    return plain_dot(x, dequantize(*stored, form=Form(**form)), contracted)


def _plain(x: Array, *stored: Array, contracted: int, **form: Any) -> Any:
    return plain_dot(x, dequantized(*stored, form=Form(**form)), contracted)


def _in_blocks(x: Array, integers: Array, *scales: Array, contracted: int, **form: Any) -> Any:
    return blockwise(x, integers, scales, Form(**form), contracted)


def few_rows(index: Array, *stored: Array, **form: Any) -> Any:
    """`quantized_rows` in ordinary operations: dequantizes only the selected rows."""
    return dequantized(*(each[index] for each in stored), form=Form(**form))


def narrow_dot(x: Array, weight: Array, contracted: int, dtype: DTypeLike) -> Any:
    """A product with a matrix of bfloat16, which CPUs compute in blocks where rows are few."""
    return _narrow_dot.bind(x, weight, contracted=contracted, dtype=jnp.dtype(dtype).name)


def decomposed_narrow_dot(
    x: jax.Array, weight: jax.Array, *, contracted: int, dtype: str
) -> jax.Array:
    """`narrow_dot` as jax's own product."""
    numbers = (((x.ndim - 1,), (weight.ndim + contracted,)), ((), ()))
    common = jnp.result_type(x, weight)
    operands = x.astype(common), weight.astype(common)
    return jax.lax.dot_general(*operands, numbers, preferred_element_type=jnp.dtype(dtype))


def _narrow_in_blocks(x: jax.Array, weight: jax.Array, *, contracted: int, dtype: str) -> jax.Array:
    if not is_read_in_blocks(x, weight, contracted):  # with an axis more, of vmap
        return decomposed_narrow_dot(x, weight, contracted=contracted, dtype=dtype)
    scales = jnp.ones((1, 1) if contracted == -2 else (weight.shape[0], 1), jnp.float32)
    form = Form(8, None, contracted, "float32", "float")  # what it stores are numbers
    return blockwise(x, weight, [scales], form, contracted).astype(dtype)


def pointwise_convolution(x: jax.Array, *stored: jax.Array, form: Form, channels: int) -> jax.Array:
    """A convolution of 1×1 with stride 1 and a quantized kernel; `channels` is their axis."""
    return _pointwise.bind(x, *stored, channels=channels, **form._asdict())


def decomposed_pointwise(x: jax.Array, *stored: jax.Array, channels: int, **form: Any) -> jax.Array:
    """`pointwise_convolution` as jax's own, of the numbers."""
    return plain_pointwise(x, dequantize(*stored, form=Form(**form)), channels)


def plain_pointwise(x: jax.Array, kernel: jax.Array, channels: int) -> jax.Array:
    """The same convolution with an ordinary kernel."""
    spatial = "HW"[: x.ndim - 2]
    layout = f"N{spatial}C" if channels == -1 else f"NC{spatial}"
    dtype = jnp.result_type(x, kernel)
    return jax.lax.conv_general_dilated(
        x.astype(dtype), kernel.astype(dtype), (1,) * len(spatial), "VALID",
        dimension_numbers=(layout, f"{spatial}IO", layout),
    )  # fmt: skip


def _pointwise_in_blocks(x: jax.Array, *stored: jax.Array, channels: int, **form: Any) -> jax.Array:
    integers, *scales = (each.reshape(each.shape[-2:]) for each in stored)
    result = blockwise(jnp.moveaxis(x, channels, -1), integers, scales, Form(**form), -2)
    return jnp.moveaxis(result, -1, channels)


# Gradients are those of ordinary operations, which can be transposed: all are linear in x and in
# the scales, and integers and zero points have none.
_pointwise = primitive(
    "pointwise_convolution",
    decomposed_pointwise,
    jvp=linear_in(0, 2),
    mapped="none",
    cpu=_pointwise_in_blocks,
)
_narrow_dot = primitive(
    "narrow_dot",
    decomposed_narrow_dot,
    jvp=linear_in(0, 1),
    mapped="the first",
    cpu=_narrow_in_blocks,
)
#: What only makes jax faster on CPUs; exports begin with these functions instead.
FASTER_IN_JAX: dict[str, Callable[..., Any]] = {
    "narrow_dot": decomposed_narrow_dot,
    "pointwise_convolution": decomposed_pointwise,
}
_dequantize = primitive("dequantize", decomposed_dequantize, jvp=linear_in(1), mapped="all")
_dot = primitive(
    "quantized_dot",
    _plain,
    jvp=linear_in(0, 2),
    mapped="the first",
    cpu=_in_blocks,
    gpu=product_on_gpu,
)
_rows = primitive("quantized_rows", few_rows, jvp=linear_in(2), mapped="the first")
