"""Inputs and outputs of quantized products: rounded to 8 bits, and their ranges."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pax_export._foundations.types import Array, ArrayLike
from pax_export.core import StateModule


def primitive(
    name: str,
    plain: Callable[..., Any],
    *,
    jvp: Callable[..., Any],
    mapped: Literal["the first", "all", "none"],
    **on_platforms: Callable[..., Any],
) -> Any:
    """A primitive with one result, lowered as a function of jax; as others where they are named.

    Args:
        name: its name.
        plain: the function.
        jvp: the tangent of the result by `plain`, the operands and their tangents, in all of which
            None is zero: `linear_in` or `straight_through`.
        mapped: the operands that may have one more leading axis, which `jax.vmap` adds: only the
            first, or all at once.  Otherwise it maps `plain`.
        **on_platforms: faster functions for some platforms.
    """
    primitive = Primitive(name)

    @primitive.def_abstract_eval
    def result(*operands: Array, **params: Any) -> Any:
        structs = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in operands]
        return jax.make_jaxpr(functools.partial(plain, **params))(*structs).out_avals[0]

    @functools.partial(jax.jit, static_argnames="params")
    def run(*operands: Array, params: tuple[tuple[str, Any], ...]) -> Any:
        return primitive.bind(*operands, **dict(params))

    primitive.def_impl(lambda *operands, **params: run(*operands, params=tuple(params.items())))
    mlir.register_lowering(primitive, mlir.lower_fun(plain, multiple_results=False))
    for platform, function in on_platforms.items():
        lowering = mlir.lower_fun(function, multiple_results=False)
        mlir.register_lowering(primitive, lowering, platform=platform)

    def jvp_rule(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        result = primitive.bind(*primals, **params)
        known = [None if type(each) is ad.Zero else each for each in tangents]
        tangent = jvp(functools.partial(plain, **params), primals, known)
        return result, jnp.zeros_like(result) if tangent is None else tangent.astype(result.dtype)

    def batch(operands: Sequence[Any], axes: Sequence[Any], /, **params: Any) -> tuple[Any, int]:
        first, *others = [axis is not None for axis in axes]
        if (mapped == "the first" and first and not any(others)) or (
            mapped == "all" and first and all(others)
        ):
            moved = [
                x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(operands, axes)
            ]
            return primitive.bind(*moved, **params), 0
        return jax.vmap(functools.partial(plain, **params), axes)(*operands), 0

    ad.primitive_jvps[primitive] = jvp_rule
    batching.primitive_batchers[primitive] = batch
    return primitive


def linear_in(*linear: int) -> Callable[..., Any]:
    """The tangents of a function that is linear in each of some operands; others have none."""

    def jvp(plain: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        parts = [
            plain(*primals[:index], tangents[index], *primals[index + 1 :])
            for index in linear
            if tangents[index] is not None
        ]
        return functools.reduce(jnp.add, parts) if parts else None

    return jvp


def straight_through(_: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """The tangents of a rounding: those of its first operand; scales have none."""
    return tangents[0]


# --- rounding of inputs ---------------------------------------------------------------


_LOW, _HIGH = -128, 127
_LEVELS = 255


class StaticInputs(StateModule):
    """One scale and one zero point for the inputs of a product: ``(integer - zero) * scale``.

    Args:
        scale: float32.
        zero: int8, the zero point.

    Attributes:
        scale: as passed.
        zero: as passed.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> x = jnp.linspace(-1, 1, 256).reshape(4, 64)
        >>> small, _ = pax.quantize(pax.Linear(64, 8), [x], activations="minmax")
        >>> round(float(255 * small.weight.inputs.scale), 2), small.weight.inputs.zero.dtype.name
        (2.0, 'int8')
    """

    def __init__(self, scale: Array, zero: Array):
        super().__init__()
        self.scale = scale
        self.zero = zero

    def rounded(self, x: Array, axes: Sequence[int]) -> jax.Array:
        """Returns ``x`` rounded to the values of its integers, in its dtype."""
        return _round_inputs.bind(x, jnp.asarray(self.scale), jnp.asarray(self.zero))


class DynamicInputs(StateModule):
    """A scale for each row of the inputs of a product, or each example of a convolution.

    It is the largest element divided by 127, as each call finds it.

    Example:
        >>> import pax_export as pax
        >>> small, _ = pax.quantize(pax.Linear(64, 8), activations="dynamic")
        >>> type(small.weight.inputs).__name__
        'DynamicInputs'
    """

    def rounded(self, x: Array, axes: Sequence[int]) -> jax.Array:
        """Returns ``x`` rounded to the values of its integers, in its dtype."""
        return _round_rows.bind(x, axes=tuple(axes))


def round_with(x: Array, scale: float, zero: int) -> Any:
    """Rounds an array to the values of its integers, as one operation."""
    return _round_inputs.bind(x, np.float32(scale), np.int8(zero))


def scale_of_range(low: float, high: float) -> tuple[float, int]:
    """Returns the scale of a range that includes 0, and its zero point."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = np.float32((high - low) / _LEVELS) or np.float32(1)
    zero = int(np.clip(np.rint(_LOW - low / scale), _LOW, _HIGH))
    return float(scale), zero


def round_inputs(x: Array, scale: Array, zero: Array) -> jax.Array:
    """`StaticInputs.rounded` in other operations of jax."""
    x, dtype = x.astype(jnp.float32), x.dtype
    scale, zero = scale.astype(jnp.float32), zero.astype(jnp.float32)
    integers = jnp.clip(jnp.rint(x / scale) + zero, _LOW, _HIGH)
    return ((integers - zero) * scale).astype(dtype)


def round_rows(x: Array, *, axes: Sequence[int]) -> jax.Array:
    """`DynamicInputs.rounded` in other operations of jax."""
    integers, scale = integer_rows(x, axes)
    return (integers * scale).astype(x.dtype)


def integer_rows(x: Array, axes: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Integers, in float32, and the scale of each row; axes are counted from the last (-1)."""
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), tuple(axes), keepdims=True)
    scale = jnp.where(largest > 0, largest / _HIGH, 1.0)
    return jnp.rint(x / scale), scale


_round_inputs = primitive("round_inputs", round_inputs, jvp=straight_through, mapped="the first")
_round_rows = primitive("round_rows", round_rows, jvp=straight_through, mapped="the first")


# --- ranges of outputs ----------------------------------------------------------------


class OutputRange(StateModule):
    """The least and the largest output of each channel of a convolution.

    jax computes with unrounded outputs.  ONNX and TFLite files round them to 8 bits where the next
    operation is one of integers, after scales and shifts are folded.

    Args:
        low: float32 ``[channels]``.
        high: float32 ``[channels]``.

    Attributes:
        low: as passed.
        high: as passed.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> x = jnp.ones((1, 4, 4, 3))
        >>> small, _ = pax.quantize(pax.Conv2D(3, 8, 1), [x], activations="static")
        >>> small.weight.outputs.low.shape
        (8,)
    """

    def __init__(self, low: Array, high: Array):
        super().__init__()
        self.low = low
        self.high = high

    def bounded(self, y: Array, axis: int) -> jax.Array:
        """Returns ``y``, annotated with its range; channels are along ``axis`` (negative)."""
        return bound_outputs(y, jnp.asarray(self.low), jnp.asarray(self.high), axis)


def bound_outputs(y: Array, low: ArrayLike, high: ArrayLike, axis: int | None = None) -> Any:
    """Annotates an array with the range of each channel, or of all for None."""
    return _bound_outputs.bind(y, low, high, axis=axis)


def unbounded(y: Array, *_: Array, axis: int | None) -> Any:
    """`OutputRange.bounded` in other operations of jax: nothing is computed."""
    return y


_bound_outputs = primitive("bound_outputs", unbounded, jvp=straight_through, mapped="the first")
