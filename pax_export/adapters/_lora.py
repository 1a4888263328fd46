"""The arrays of one LoRA or DoRA adapter, and its output."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from pax_export._foundations.check import checked_fraction
from pax_export._foundations.types import Array
from pax_export.adapters import _kernels as kernels
from pax_export.core import DeclaredArray, ParameterModule
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
        if self.dropout is not None and not kernels.is_table(adapted):
            x = self.dropout(x)
        added = kernels.adapter_output(adapted, x, self.lora_a, self.lora_b, y)
        if self.scale * self.strength != 1:
            added = added * (self.scale * self.strength)
        if self.magnitude is None:
            return added
        strength = self.strength

        def with_lengths(added: Array, y: Array, bias: Array | None, factor: Array) -> Array:
            factor = kernels.by_channel(adapted, factor)
            plain = y if bias is None else y - kernels.by_channel(adapted, bias)
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
        found = kernels.weight_of_product(adapted, a, b)
        if self.magnitude is None:
            return found * (self.scale * self.strength)
        weight = adapted.array.astype(wide)
        factor = kernels.in_weight(adapted, self._factor(adapted))
        return (factor * (weight + found * self.scale) - weight) * self.strength

    def _factor(self, adapted: DeclaredArray) -> jax.Array:
        """The factor for columns of weight plus adapter, without gradient (paper, section 4.3)."""
        product = kernels.weight_of_product(adapted, self.lora_a, self.lora_b)
        length = kernels.column_norms(adapted, adapted.array + product * self.scale)
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
