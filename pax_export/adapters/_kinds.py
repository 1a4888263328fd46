"""The layers that can be adapted, and how each of them lays out its weight.

An adapter of any of them is two arrays whose product, ``a · b``, is laid out as the weight is:
``a`` ends with the inputs and the rank, ``b`` is rank times outputs.  In a convolution ``a`` has
the axes of the kernel before, and in a stacked layer (`Scan`, `Vmap`) both begin with its axes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from pax_export._errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export.core import EmptyNode, describe_array, is_array
from pax_export.nn import (
    Conv1DTranspose,
    Conv2DTranspose,
    Convolution,
    Embed,
    Linear,
    computed,
    computed_by_batch,
    joined,
    spec_of,
)


class Sizes(NamedTuple):
    """What an adapter must fit.

    Attributes:
        stacked: the axes of layers that the weight has before its own.
        kernel: the axes of the kernel; none but in a convolution.
        inputs: what one output is a sum over, beside the kernel.
        outputs: the channels that come out.
    """

    stacked: tuple[int, ...]
    kernel: tuple[int, ...]
    inputs: int
    outputs: int

    @property
    def a(self) -> tuple[int, ...]:
        """The shape of ``a`` before the rank."""
        return (*self.stacked, *self.kernel, self.inputs)

    @property
    def largest_rank(self) -> int:
        """A product of more than this has no more freedom than the weight itself."""
        return min(math.prod(self.kernel) * self.inputs, self.outputs)


def is_adaptable(module: Any) -> bool:
    """True for a layer that an adapter can stand at."""
    return isinstance(module, (Linear, Embed, Convolution))


def is_transposed(layer: Any) -> bool:
    """True where the outputs stand before the inputs in the weight."""
    return isinstance(layer, (Conv1DTranspose, Conv2DTranspose))


def sizes_of(layer: Any, where: str) -> Sizes:
    """The sizes that an adapter of a layer must have.

    Raises:
        InvalidArgumentTypeError: it is no layer that can be adapted, or has no weight here.
        InvalidArgumentError: its weight is not laid out as its class says.
    """
    if not is_adaptable(layer):
        raise InvalidArgumentTypeError(
            "Only Linear, Embed and convolutions, and what derives from them, can be adapted.",
            where=where,
            got=repr(layer)[:200],
            write="pax.adapters.add(net, targets, rank), which finds such layers inside of others",
        )
    weight = layer.weight
    if isinstance(weight, EmptyNode) or not (is_array(weight) or hasattr(weight, "shape")):
        raise InvalidArgumentTypeError(
            "An adapter needs a layer with its weight.",
            where=where,
            got=f"{type(weight).__name__} for the weight",
            write="the whole net, not what parameters() gives",
        )
    if not jnp.issubdtype(weight.dtype, jnp.floating):
        raise InvalidArgumentTypeError(
            "An adapter is added to a weight of floating-point numbers.",
            where=where,
            got=describe_array(weight),
            write="a layer whose weight is float32, bfloat16 or the like",
        )
    kernel, inputs, outputs = _of_class(layer)
    last = (outputs, inputs) if is_transposed(layer) else (inputs, outputs)
    own = (*kernel, *last)
    if weight.shape[-len(own) :] != own:
        raise InvalidArgumentError(
            "The weight is not laid out as its layer says; axes of stacked layers come first.",
            where=where,
            got=f"shape {weight.shape}",
            write=f"a weight [..., {', '.join(map(str, own))}]",
        )
    return Sizes(weight.shape[: -len(own)], kernel, inputs, outputs)


def _of_class(layer: Any) -> tuple[tuple[int, ...], int, int]:
    if isinstance(layer, Linear):
        return (), layer.in_dim, layer.out_dim
    if isinstance(layer, Embed):
        return (), layer.vocab_size, layer.embed_dim
    groups = getattr(layer, "feature_group_count", 1)
    return layer.kernel_shape, layer.in_features // groups, layer.out_features


def product(layer: Any, a: Any, b: Any) -> Any:
    """``a · b`` in the layout of the layer's weight, as exactly as the machine multiplies."""

    def multiplied(a: Any, b: Any) -> Any:
        kernel = (1,) * (a.ndim - b.ndim)
        b = b.reshape(*b.shape[:-2], *kernel, *b.shape[-2:])
        found = jnp.matmul(a, b, precision="highest")
        return jnp.swapaxes(found, -1, -2) if is_transposed(layer) else found

    return computed(multiplied, (a, b), lambda: joined(*spec_of(layer.weight)))


def output(layer: Any, x: Any, a: Any, b: Any, like: Any) -> Any:
    """What the layer would give for an input if ``a · b`` was its weight, without a bias.

    Args:
        layer: the layer; its own weight is not looked at.
        x: what the layer was called with.
        a: of the adapter.
        b: of the adapter.
        like: an array that lies on a mesh as the output shall.
    """
    lies = lambda: joined(*spec_of(like))  # noqa: E731
    if isinstance(layer, Linear):
        return computed(_of_linear, (jnp.asarray(x), a, b), lies)
    if isinstance(layer, Embed):
        return computed(_of_rows, (a, b, jnp.asarray(x)), lies)
    x = jnp.asarray(x)
    dtype = jnp.result_type(x, a, b)
    numbers = _dimension_numbers(layer)
    x, a, b = x.astype(dtype), a.astype(dtype), b.astype(dtype)
    if getattr(layer, "feature_group_count", 1) > 1:
        # Each group has few channels, and sees its own outputs of `b` only.
        function = lambda x, a, b: layer._convolved(layer, x, product(layer, a, b), numbers)  # noqa: E731
        return computed_by_batch(function, x, (a, b))

    def convolved(x: Any, a: Any, b: Any) -> Any:
        kernel = jnp.swapaxes(a, -1, -2) if is_transposed(layer) else a
        inner = layer._convolved(layer, x, kernel, numbers)
        if layer.data_format.endswith("C"):
            return jnp.dot(inner, b)
        return jnp.moveaxis(jnp.dot(jnp.moveaxis(inner, 1, -1), b), -1, 1)

    return computed(convolved, (x, a, b), lies)


def _of_linear(x: Any, a: Any, b: Any) -> Any:
    return jnp.dot(jnp.dot(x, a), b)


def _of_rows(a: Any, b: Any, index: Any) -> Any:
    return jnp.dot(a[index], b)


def _dimension_numbers(layer: Any) -> tuple[str, str, str]:
    kernel = "HW"[-len(layer.kernel_shape) :] + layer._kernel_features
    return layer.data_format, kernel, layer.data_format


def by_channel(layer: Any, vector: Any) -> Any:
    """A number for each output channel, in a form that multiplies the layer's output."""
    if isinstance(layer, Convolution) and not layer.data_format.endswith("C"):
        return vector.reshape(-1, *[1] * len(layer.kernel_shape))
    return vector


def norms(layer: Any, weight: Any) -> Any:
    """The length of what leads to each output channel: ``[..., outputs]``."""
    weight = jnp.swapaxes(weight, -1, -2) if is_transposed(layer) else weight
    over = tuple(range(-2 - _kernel_axes(layer), -1))
    return computed(lambda w: jnp.sqrt(jnp.sum(w * w, over)), (weight,), lambda: joined())


def in_weight(layer: Any, vector: Any) -> Any:
    """A number for each output channel, in a form that multiplies the layer's weight."""
    kernel = range(-2 - _kernel_axes(layer), -2)
    return jnp.expand_dims(vector, (*kernel, -1 if is_transposed(layer) else -2))


def _kernel_axes(layer: Any) -> int:
    return len(layer.kernel_shape) if isinstance(layer, Convolution) else 0
