"""The arrays of one LoRA or DoRA adapter, and its output."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pax_export._foundations.check import checked_fraction
from pax_export._foundations.errors import InvalidArgumentTypeError
from pax_export._foundations.types import Array
from pax_export.core import (
    DeclaredArray,
    Module,
    ParameterModule,
    adaptable_arrays,
    describe_array,
)
from pax_export.nn import Dropout, join_specs, shard_map_over_batch, spec_of, under_auto_axes


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
    is_array = hasattr(weight, "shape") and hasattr(weight, "dtype")
    if not is_array or not jnp.issubdtype(weight.dtype, jnp.inexact):
        raise InvalidArgumentTypeError(
            "An adapter requires a layer with a weight of a floating-point dtype.",
            where=where,
            got=describe_array(weight) if is_array else type(weight).__name__,
            write="the whole net, not net.parameters(); weights of float32 or bfloat16",
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


# --- one adapter ---------------------------------------------------------------------------


class LoRA(ParameterModule):
    """A LoRA adapter of one layer (Hu et al., 2021), which adds ``scale * x · a · b``.

    With a `magnitude` it is DoRA (Liu et al., 2024): the columns of weight plus adapter are
    rescaled to these norms.  `lora` and `add` create it in the layer's dict ``adapters``.

    Args:
        lora_a: see the attributes.
        lora_b: the same.
        alpha: the scale is alpha divided by the rank, or by its square root.
        dropout: the dropout rate of the input in train mode.
        rslora: divide alpha by the square root of the rank.
        magnitude: see the attributes; None for LoRA.
        key: the random key of the dropout; required with dropout.

    Attributes:
        lora_a: ``[..., in, rank]``, for convolutions ``[..., *kernel, in, rank]``.
        lora_b: ``[..., rank, out]``.
        magnitude: ``[..., out]``, or None.
        rank: the rank of the update.
        dropout: a `Dropout`, or None.
        strength: a factor of the output; 0 for inactive adapters.

    Example:
        >>> import pax_export as pax
        >>> layer = pax.adapters.lora(pax.Linear(8, 4), 2)
        >>> layer.adapters["default"]
        LoRA(rank=2, alpha=2.0)
        >>> layer.adapters["default"].lora_a.shape
        (8, 2)
    """

    def __init__(
        self,
        lora_a: Array,
        lora_b: Array,
        *,
        alpha: float,
        dropout: float = 0.0,
        rslora: bool = False,
        magnitude: Array | None = None,
        key: Any = None,
    ):
        super().__init__()
        self.lora_a, self.lora_b, self.magnitude = lora_a, lora_b, magnitude
        self.rank: int = lora_b.shape[-2]
        self.alpha = float(alpha)
        self.rslora = bool(rslora)
        self.strength = 1.0
        self.dropout = None
        rate = checked_fraction(dropout, "LoRA.dropout", one_allowed=False)
        if rate:
            stacked = lora_b.shape[:-2]
            self.dropout = Dropout(rate).replace(
                rng_key=jax.random.split(key, stacked) if stacked else key
            )

    @property
    def scale(self) -> float:
        """The factor of ``a · b``, without the strength."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def __call__(self, adapted: DeclaredArray, x: Array, y: Array) -> jax.Array:
        """Returns the update of a layer's output.

        Args:
            adapted: the array of the layer that the adapter changes.
            x: the input of the layer.
            y: the output of the layer.

        Returns:
            An array of the shape of ``y``.
        """
        if self.dropout is not None and not is_table(adapted):
            x = self.dropout(x)
        added = adapter_output(adapted, x, self.lora_a, self.lora_b, y)
        if self.scale * self.strength != 1:
            added = added * (self.scale * self.strength)
        if self.magnitude is None:
            return added
        strength = self.strength

        def with_lengths(added: Array, y: Array, bias: Array | None, factor: Array) -> Array:
            factor = by_channel(adapted, factor)
            plain = y if bias is None else y - by_channel(adapted, bias)
            return factor * added + (factor - 1) * strength * plain

        operands = (added, y, getattr(adapted.layer, "bias", None), self._factor(adapted))
        return under_auto_axes(with_lengths, operands, lambda: join_specs(*spec_of(y)))

    def change(self, adapted: DeclaredArray) -> jax.Array:
        """Returns the update of an array of a layer.

        Args:
            adapted: the array.

        Returns:
            An array of its shape, in at least float32.
        """
        wide = jnp.promote_types(adapted.array.dtype, jnp.float32)
        a, b = self.lora_a.astype(wide), self.lora_b.astype(wide)
        found = weight_of_product(adapted, a, b)
        if self.magnitude is None:
            return found * (self.scale * self.strength)
        weight = adapted.array.astype(wide)
        factor = in_weight(adapted, self._factor(adapted))
        return (factor * (weight + found * self.scale) - weight) * self.strength

    def _factor(self, adapted: DeclaredArray) -> jax.Array:
        """The factor for columns of weight plus adapter, without gradient (paper, section 4.3)."""
        product = weight_of_product(adapted, self.lora_a, self.lora_b)
        length = column_norms(adapted, adapted.array + product * self.scale)
        lengths = (self.magnitude, jax.lax.stop_gradient(length))
        return under_auto_axes(jnp.divide, lengths, lambda: join_specs())

    def _repr(self, info: dict[str, Any] | None = None) -> str:
        own: dict[str, Any] = {"rank": self.rank, "alpha": self.alpha}
        if self.dropout is not None:
            own["dropout"] = self.dropout.dropout_rate
        if self.rslora:
            own["rslora"] = True
        if self.magnitude is not None:
            own["dora"] = True
        if self.strength != 1:
            own["strength"] = self.strength
        return super()._repr({**own, **(info or {})})
