"""The array of a layer that an adapter changes, and products in its layout.

It is the kernel or table that the layer declares (`pax_export.Declared`). ``a`` is
``[*inputs, rank]``, with the input axes of that array, and ``b`` is ``[rank, outputs]``; for
stacked layers (`Scan`, `Vmap`), both start with the axes of the stack.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from pax_export._foundations.errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export._foundations.types import Array, PyTree
from pax_export.core import DeclaredArray, EmptyNode, Module, describe_array, is_array, kernel_of
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


def adapted_array(layer: Module) -> DeclaredArray:
    """The declaration of the array that adapters of a layer change."""
    found = kernel_of(layer)
    if found is None or len(found.output_axes) != 1 or not found.input_axes:
        raise InvalidArgumentTypeError(
            "Only layers that declare one kernel or table can be adapted.",
            where=repr(layer)[:200],
            got=f"class {type(layer).__qualname__}",
            write='arrays = {"weight": pax.Declared("kernel", ("in", "out"))} in the class, or '
            "pax.adapters.add(net, targets, rank), which finds such layers inside other modules",
        )
    return found


def is_adaptable(module: Module) -> bool:
    """Returns True for a layer that supports adapters."""
    found = kernel_of(module)
    return found is not None and len(found.output_axes) == 1 and bool(found.input_axes)


def is_table(layer: Module) -> bool:
    """Returns True for a layer that looks rows up."""
    return adapted_array(layer).declared.role == "table"


def is_dense(layer: Module) -> bool:
    """Returns True for a layer that multiplies by a matrix ``[in, out]``."""
    return adapted_array(layer).axes == ("in", "out")


def sizes_of(layer: Module, where: str) -> KernelSizes:
    """Returns the sizes of a layer's array.

    Raises:
        InvalidArgumentTypeError: the layer does not support adapters, or lacks the array.
    """
    found = adapted_array(layer)
    weight = found.array
    if isinstance(weight, EmptyNode) or not (is_array(weight) or hasattr(weight, "shape")):
        raise InvalidArgumentTypeError(
            "An adapter requires a layer with its weight.",
            where=where,
            got=f"{type(weight).__name__} for {found.name}",
            write="the whole net, not net.parameters()",
        )
    if not jnp.issubdtype(weight.dtype, jnp.inexact):
        raise InvalidArgumentTypeError(
            "An adapter requires a weight with a floating-point dtype.",
            where=where,
            got=describe_array(weight),
            write="a layer with a floating-point weight such as float32 or bfloat16",
        )
    rank = len(found.axes)
    if len(weight.shape) < rank:
        raise InvalidArgumentError(
            "The weight has other axes than its class declares.",
            where=where,
            got=f"shape {weight.shape}",
            write=f"a weight [..., {', '.join(found.axes)}]",
        )
    inputs = tuple([weight.shape[axis] for axis in found.input_axes])
    return KernelSizes(weight.shape[:-rank], inputs, weight.shape[found.output_axes[0]])


def weight_of_product(layer: Module, a: Any, b: Any) -> Any:
    """Returns ``a · b`` in the layout of the layer's array, at the highest precision."""
    found = adapted_array(layer)

    def multiplied(a: Array, b: Array) -> Any:
        b = b.reshape(*b.shape[:-2], *[1] * (a.ndim - b.ndim), *b.shape[-2:])
        product = jnp.matmul(a, b, precision="highest")
        return jnp.moveaxis(product, -1, found.output_axes[0])

    return under_auto_axes(multiplied, (a, b), lambda: join_specs(*spec_of(found.array)))


def adapter_output(layer: Module, x: Array, a: Any, b: Any, like: PyTree) -> Any:
    """Returns the layer's output with ``a · b`` as its array, without bias; sharded as `like`."""
    found = adapted_array(layer)
    apply, x = found.declared.apply, jnp.asarray(x)
    if apply is None:
        raise InvalidArgumentError(
            "An adapter with dropout requires a layer that declares how its array is applied.",
            where=repr(layer)[:200],
            write='pax.Declared("kernel", ..., apply=lambda layer, array, x: ...), or dropout=0',
        )
    if not found.takes_any_outputs:

        def of_product(x: Array, a: Array, b: Array) -> Any:
            return apply(layer, weight_of_product(layer, a, b), x)

        return shard_map_over_batch(of_product, x, (a, b))
    axis = found.channel_axis

    def low_rank(x: Array, a: Array, b: Array) -> Any:
        inner = apply(layer, jnp.moveaxis(a, -1, found.output_axes[0]), x)
        return jnp.moveaxis(jnp.dot(jnp.moveaxis(inner, axis, -1), b), -1, axis)

    return under_auto_axes(low_rank, (x, a, b), lambda: join_specs(*spec_of(like)))


def by_channel(layer: Module, vector: Array) -> Any:
    """Reshapes a value per output channel so that it broadcasts with the layer's output."""
    axis = adapted_array(layer).channel_axis
    return vector if axis == -1 else vector.reshape(-1, *[1] * (-1 - axis))


def column_norms(layer: Module, weight: Array) -> Any:
    """Returns the norm of the weights of each output channel: ``[..., outputs]``."""
    over = adapted_array(layer).input_axes
    return under_auto_axes(
        lambda w: jnp.sqrt(jnp.sum(w * w, over)), (weight,), lambda: join_specs()
    )


def in_weight(layer: Module, vector: Array) -> Any:
    """Reshapes a value per output channel so that it broadcasts with the layer's array."""
    return jnp.expand_dims(vector, adapted_array(layer).input_axes)


def kernel_rank(layer: Module) -> int:
    """Returns the number of input axes beside the channels: those of a convolution's kernel."""
    return len(adapted_array(layer).input_axes) - 1
