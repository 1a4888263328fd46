"""The arrays of one LoRA or DoRA adapter, and its output."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from pax_export._foundations.check import checked_fraction
from pax_export._foundations.errors import InvalidArgumentError
from pax_export._foundations.types import Array, PyTree
from pax_export.adapters import _kernels as kernels
from pax_export.core import Module, ParameterModule
from pax_export.nn import Dropout, join_specs, spec_of, under_auto_axes


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
        lora_a: Any,
        lora_b: Any,
        *,
        alpha: float,
        dropout: float = 0.0,
        rslora: bool = False,
        magnitude: Array | None = None,
        key: Any = None,
    ):
        super().__init__()
        a, b = (getattr(each, "shape", ()) for each in (lora_a, lora_b))
        if len(a) < 2 or len(b) < 2 or a[-1] != b[-2]:
            raise InvalidArgumentError(
                "The arrays of an adapter must have shapes [..., in, rank] and [..., rank, out].",
                where="LoRA",
                got=" and ".join(
                    f"{type(x).__name__} {getattr(x, 'shape', '')}" for x in (lora_a, lora_b)
                ),
                write="pax.adapters.lora(layer, rank), which makes both",
            )
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

    def __call__(self, layer: Module, x: Array, y: Array) -> jax.Array:
        """Returns the update of the layer's output.

        Args:
            layer: the layer; DoRA uses its weight.
            x: the input of the layer.
            y: the output of the layer.

        Returns:
            An array of the shape of ``y``.
        """
        if self.dropout is not None and not kernels.is_table(layer):
            x = self.dropout(x)
        added = kernels.adapter_output(layer, x, self.lora_a, self.lora_b, y)
        if self.scale * self.strength != 1:
            added = added * (self.scale * self.strength)
        if self.magnitude is None:
            return added
        strength = self.strength

        def with_lengths(added: Array, y: Array, bias: Array, factor: PyTree) -> Any:
            factor = kernels.by_channel(layer, factor)
            plain = y if bias is None else y - kernels.by_channel(layer, bias)
            return factor * added + (factor - 1) * strength * plain

        operands = (added, y, getattr(layer, "bias", None), self._factor(layer))
        return under_auto_axes(with_lengths, operands, lambda: join_specs(*spec_of(y)))

    def change(self, layer: Module) -> jax.Array:
        """Returns the update of the layer's weight.

        Args:
            layer: the layer.

        Returns:
            An array of the shape of the weight, in at least float32.
        """
        own = kernels.adapted_array(layer).array
        wide = jnp.promote_types(own.dtype, jnp.float32)
        found = kernels.weight_of_product(layer, self.lora_a.astype(wide), self.lora_b.astype(wide))
        if self.magnitude is None:
            return found * (self.scale * self.strength)
        weight = own.astype(wide)
        factor = kernels.in_weight(layer, self._factor(layer))
        return (factor * (weight + found * self.scale) - weight) * self.strength

    def _factor(self, layer: Module) -> jax.Array:
        """The factor for columns of weight plus adapter, without gradient (paper, section 4.3)."""
        product = kernels.weight_of_product(layer, self.lora_a, self.lora_b)
        length = kernels.column_norms(
            layer, kernels.adapted_array(layer).array + product * self.scale
        )
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
