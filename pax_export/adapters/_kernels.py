"""The array of a layer that an adapter changes, and products in its layout.

It is a kernel or table that the layer declares (`pax_export.Declared`). ``a`` is
``[*inputs, rank]``, with the input axes of that array, and ``b`` is ``[rank, outputs]``; for
stacked layers (`Scan`, `Vmap`), both start with the axes of the stack.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from pax_export._foundations.errors import InvalidArgumentTypeError
from pax_export._foundations.types import Array
from pax_export.core import DeclaredArray, EmptyNode, Module, adaptable_arrays, describe_array
from pax_export.nn import join_specs, shard_map_over_batch, spec_of, under_auto_axes


class KernelSizes(NamedTuple):
    """The sizes of an array that an adapter must match."""

    stacked: tuple[int, ...]  # leading axes of a stack of layers
    inputs: tuple[int, ...]  # kernel of a convolution, then input channels
    outputs: int

    @property
    def a(self) -> tuple[int, ...]:
        """The shape of ``a`` before the rank."""
        return (*self.stacked, *self.inputs)

    @property
    def largest_rank(self) -> int:
        """The largest useful rank: that of the array itself."""
        return min(math.prod(self.inputs), self.outputs)


def require_adaptable(layer: Module) -> dict[str, DeclaredArray]:
    """The arrays that adapters of a layer change, by name; an only one has the name ``""``."""
    found = adaptable_arrays(layer)
    if not found:
        raise InvalidArgumentTypeError(
            "Only layers that declare a kernel or table can be adapted.",
            where=repr(layer)[:200],
            got=f"class {type(layer).__qualname__}",
            write='arrays = {"weight": pax.Declared("kernel", ("in", "out"))} in the class, or '
            "pax.adapters.add(net, targets, rank), which finds such layers inside other modules",
        )
    return found


def is_table(adapted: DeclaredArray) -> bool:
    """Returns True for an array whose rows are looked up."""
    return adapted.declared.role == "table"


def sizes_of(adapted: DeclaredArray, where: str) -> KernelSizes:
    """Returns the sizes of an array.

    Raises:
        InvalidArgumentTypeError: the layer lacks the array, or it has no floating-point dtype.
    """
    weight = adapted.array
    if isinstance(weight, EmptyNode) or not hasattr(weight, "shape"):
        raise InvalidArgumentTypeError(
            "An adapter requires a layer with its weight.",
            where=where,
            got=f"{type(weight).__name__} for {adapted.name}",
            write="the whole net, not net.parameters()",
        )
    if not jnp.issubdtype(weight.dtype, jnp.inexact):
        raise InvalidArgumentTypeError(
            "An adapter requires a weight with a floating-point dtype.",
            where=where,
            got=describe_array(weight),
            write="a layer with a floating-point weight such as float32 or bfloat16",
        )
    rank = len(adapted.axes)
    inputs = tuple([weight.shape[axis] for axis in adapted.input_axes])
    return KernelSizes(weight.shape[:-rank], inputs, weight.shape[adapted.output_axes[0]])


def weight_of_product(adapted: DeclaredArray, a: Array, b: Array) -> Any:
    """Returns ``a · b`` in the layout of the array, at the highest precision."""

    def multiplied(a: Array, b: Array) -> Any:
        b = b.reshape(*b.shape[:-2], *[1] * (a.ndim - b.ndim), *b.shape[-2:])
        product = jnp.matmul(a, b, precision="highest")
        return jnp.moveaxis(product, -1, adapted.output_axes[0])

    return under_auto_axes(multiplied, (a, b), lambda: join_specs(*spec_of(adapted.array)))


def apply_of(layer: Module) -> Callable[..., Any] | None:
    """Applies another such array as the layer does its own; None if it has several."""
    applied = [each.declared.apply for each in adaptable_arrays(layer).values()]
    return applied[0] if len(applied) == 1 else None


def adapter_output(adapted: DeclaredArray, x: Array, a: Array, b: Array, like: Array) -> Any:
    """Returns the layer's output with ``a · b`` as its array, without bias; sharded as `like`."""
    layer, x = adapted.layer, jnp.asarray(x)
    apply = apply_of(layer)
    assert apply is not None
    if not adapted.takes_any_outputs:

        def of_product(x: Array, a: Array, b: Array) -> Any:
            return apply(layer, weight_of_product(adapted, a, b), x)

        return shard_map_over_batch(of_product, x, (a, b))
    axis = adapted.channel_axis

    def low_rank(x: Array, a: Array, b: Array) -> Any:
        inner = apply(layer, jnp.moveaxis(a, -1, adapted.output_axes[0]), x)
        return jnp.moveaxis(jnp.dot(jnp.moveaxis(inner, axis, -1), b), -1, axis)

    return under_auto_axes(low_rank, (x, a, b), lambda: join_specs(*spec_of(like)))


def by_channel(adapted: DeclaredArray, vector: Array) -> Array:
    """Reshapes a value per output channel so that it broadcasts with the layer's output."""
    axis = adapted.channel_axis
    return vector if axis == -1 else vector.reshape(-1, *[1] * (-1 - axis))


def column_norms(adapted: DeclaredArray, weight: Array) -> Any:
    """Returns the norm of the weights of each output channel: ``[..., outputs]``."""
    return under_auto_axes(
        lambda w: jnp.sqrt(jnp.sum(w * w, adapted.input_axes)), (weight,), lambda: join_specs()
    )


def in_weight(adapted: DeclaredArray, vector: Array) -> Array:
    """Reshapes a value per output channel so that it broadcasts with the layer's array."""
    return jnp.expand_dims(vector, adapted.input_axes)


def kernel_rank(adapted: DeclaredArray) -> int:
    """Returns the number of input axes beside the channels: those of a convolution's kernel."""
    return len(adapted.input_axes) - 1
