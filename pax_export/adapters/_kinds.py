"""Layers that support adapters, and the layouts of their weights.

The product ``a · b`` has the layout of the weight: ``a`` is ``[*kernel, inputs, rank]``, ``b`` is
``[rank, outputs]``; for stacked layers (`Scan`, `Vmap`), both start with the axes of the stack.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from pax_export._errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export._types import Array, PyTree
from pax_export.core import EmptyNode, describe_array, is_array
from pax_export.nn import (
    Conv1DTranspose,
    Conv2DTranspose,
    Convolution,
    Embed,
    Linear,
    join_specs,
    shard_map_over_batch,
    spec_of,
    under_auto_axes,
)


class WeightSizes(NamedTuple):
    """The sizes of a weight that an adapter must match."""

    stacked: tuple[int, ...]  # leading axes of a stack of layers
    kernel: tuple[int, ...]  # axes of the kernel of a convolution
    inputs: int  # number of input channels
    outputs: int  # number of output channels

    @property
    def a(self) -> tuple[int, ...]:
        """The shape of ``a`` before the rank."""
        return (*self.stacked, *self.kernel, self.inputs)

    @property
    def largest_rank(self) -> int:
        """The largest useful rank: that of the weight itself."""
        return min(math.prod(self.kernel) * self.inputs, self.outputs)


def is_adaptable(module: PyTree) -> bool:
    """Returns True for a layer that supports adapters."""
    return isinstance(module, (Linear, Embed, Convolution))


def is_transposed(layer: PyTree) -> bool:
    """Returns True if the weight has the outputs before the inputs."""
    return isinstance(layer, (Conv1DTranspose, Conv2DTranspose))


def sizes_of(layer: PyTree, where: str) -> WeightSizes:
    """Returns the sizes of a layer's weight.

    Raises:
        InvalidArgumentTypeError: the layer does not support adapters, or has no weight.
        InvalidArgumentError: the weight does not have the layout of the class.
    """
    if not is_adaptable(layer):
        raise InvalidArgumentTypeError(
            "Only Linear, Embed, convolutions and their subclasses can be adapted.",
            where=where,
            got=repr(layer)[:200],
            write="pax.adapters.add(net, targets, rank), which finds such layers inside other "
            "modules",
        )
    weight = layer.weight
    if isinstance(weight, EmptyNode) or not (is_array(weight) or hasattr(weight, "shape")):
        raise InvalidArgumentTypeError(
            "An adapter requires a layer with its weight.",
            where=where,
            got=f"{type(weight).__name__} for the weight",
            write="the whole net, not net.parameters()",
        )
    if not jnp.issubdtype(weight.dtype, jnp.floating):
        raise InvalidArgumentTypeError(
            "An adapter requires a weight with a floating-point dtype.",
            where=where,
            got=describe_array(weight),
            write="a layer with a floating-point weight such as float32 or bfloat16",
        )
    kernel, inputs, outputs = _of_class(layer)
    last = (outputs, inputs) if is_transposed(layer) else (inputs, outputs)
    own = (*kernel, *last)
    if weight.shape[-len(own) :] != own:
        raise InvalidArgumentError(
            "The shape of the weight does not match its layer; axes of stacked layers come first.",
            where=where,
            got=f"shape {weight.shape}",
            write=f"a weight [..., {', '.join(map(str, own))}]",
        )
    return WeightSizes(weight.shape[: -len(own)], kernel, inputs, outputs)


def _of_class(layer: PyTree) -> tuple[tuple[int, ...], int, int]:
    if isinstance(layer, Linear):
        return (), layer.in_dim, layer.out_dim
    if isinstance(layer, Embed):
        return (), layer.vocab_size, layer.embed_dim
    groups = getattr(layer, "feature_group_count", 1)
    return layer.kernel_shape, layer.in_features // groups, layer.out_features


def weight_of_product(layer: Any, a: Any, b: Any) -> Any:
    """Returns ``a · b`` in the layout of the layer's weight, at the highest precision."""

    def multiplied(a: Array, b: Array) -> Any:
        kernel = (1,) * (a.ndim - b.ndim)
        b = b.reshape(*b.shape[:-2], *kernel, *b.shape[-2:])
        found = jnp.matmul(a, b, precision="highest")
        return jnp.swapaxes(found, -1, -2) if is_transposed(layer) else found

    return under_auto_axes(multiplied, (a, b), lambda: join_specs(*spec_of(layer.weight)))


def adapter_output(layer: PyTree, x: Array, a: Any, b: Any, like: PyTree) -> Any:
    """Returns the layer's output with ``a · b`` as weight, without bias; sharded as `like`."""
    lies = lambda: join_specs(*spec_of(like))  # noqa: E731
    if isinstance(layer, Linear):
        return under_auto_axes(
            lambda x, a, b: jnp.dot(jnp.dot(x, a), b), (jnp.asarray(x), a, b), lies
        )
    if isinstance(layer, Embed):
        return under_auto_axes(lambda a, b, x: jnp.dot(a[x], b), (a, b, jnp.asarray(x)), lies)
    x = jnp.asarray(x)
    dtype = jnp.result_type(x, a, b)
    numbers = _dimension_numbers(layer)
    x, a, b = x.astype(dtype), a.astype(dtype), b.astype(dtype)
    if getattr(layer, "feature_group_count", 1) > 1:
        # Each group has few channels, and its own outputs of `b`.
        def convolved_by_groups(x: Array, a: Array, b: Array) -> Any:
            return layer._convolved(layer, x, weight_of_product(layer, a, b), numbers)

        return shard_map_over_batch(convolved_by_groups, x, (a, b))

    def convolved(x: Array, a: Array, b: Array) -> Any:
        kernel = jnp.swapaxes(a, -1, -2) if is_transposed(layer) else a
        inner = layer._convolved(layer, x, kernel, numbers)
        if layer.data_format.endswith("C"):
            return jnp.dot(inner, b)
        return jnp.moveaxis(jnp.dot(jnp.moveaxis(inner, 1, -1), b), -1, 1)

    return under_auto_axes(convolved, (x, a, b), lies)


def _dimension_numbers(layer: PyTree) -> tuple[str, str, str]:
    kernel = "HW"[-len(layer.kernel_shape) :] + layer._kernel_features
    return layer.data_format, kernel, layer.data_format


def by_channel(layer: Any, vector: Any) -> Any:
    """Reshapes a value per output channel so that it broadcasts with the layer's output."""
    if isinstance(layer, Convolution) and not layer.data_format.endswith("C"):
        return vector.reshape(-1, *[1] * len(layer.kernel_shape))
    return vector


def column_norms(layer: PyTree, weight: Array) -> Any:
    """Returns the norm of the weights of each output channel: ``[..., outputs]``."""
    weight = jnp.swapaxes(weight, -1, -2) if is_transposed(layer) else weight
    over = tuple(range(-2 - kernel_rank(layer), -1))
    return under_auto_axes(
        lambda w: jnp.sqrt(jnp.sum(w * w, over)), (weight,), lambda: join_specs()
    )


def in_weight(layer: PyTree, vector: Array) -> Any:
    """Reshapes a value per output channel so that it broadcasts with the layer's weight."""
    kernel = range(-2 - kernel_rank(layer), -2)
    return jnp.expand_dims(vector, (*kernel, -1 if is_transposed(layer) else -2))


def kernel_rank(layer: PyTree) -> int:
    """Returns the number of axes of a convolution's kernel; 0 for other layers."""
    return len(layer.kernel_shape) if isinstance(layer, Convolution) else 0
