"""RoundedArray: a weight that is trained as the integers that it will be."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pax_export._quantized import ArrayLike, Form, QuantizedArray
from pax_export.core import ParameterModule
from pax_export.quantization._rounding import rounded


class RoundedArray(ArrayLike, ParameterModule):
    """A weight in the place of which layers compute with what its integers stand for.

    `quantize` with ``train=True`` makes them.  The gradient is that of the weight itself, as if
    nothing was rounded (straight-through), so any optimizer trains it.

    Args:
        weight: the array that is trained.
        form: what its integers will mean.
        reduced: the axes that share a scale, where there are no groups.
        inputs: as for `QuantizedArray`; their gradients pass by the rounding, too.

    Attributes:
        weight: as given.
        form: as given.
        reduced: as given.
        inputs: as given.

    Example:
        >>> import pax_export as pax
        >>> training, _ = pax.quantize(pax.Linear(64, 8), bits=4, train=True)
        >>> training.weight
        RoundedArray(float32[64,8], bits=4, group=32)
        >>> small, _ = pax.quantize(training)
        >>> small.weight
        QuantizedArray(float32[64,8], bits=4, group=32)
    """

    def __init__(self, weight: Any, form: Form, reduced: tuple[int, ...], inputs: Any = None):
        super().__init__()
        self.weight = weight
        self.form = form
        self.reduced = reduced
        self.inputs = inputs

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        return self.weight.shape

    @property
    def ndim(self) -> int:
        """Of the weight."""
        return len(self.weight.shape)

    @property
    def size(self) -> int:
        """Of the weight."""
        return self.weight.size

    @property
    def dtype(self) -> Any:
        """Of the weight."""
        return self.weight.dtype

    @property
    def nbytes(self) -> int:
        """Of the weight."""
        return self.weight.nbytes

    def quantized(self) -> QuantizedArray:
        """The integers of the weight as it is now."""
        made = rounded(jnp.asarray(self.weight), self.form, self.reduced)
        return made.replace(inputs=self.inputs)

    def dequantized(self) -> jax.Array:
        """What these stand for; its gradient is that of the weight."""
        weight = jnp.asarray(self.weight)
        return weight + jax.lax.stop_gradient(self.quantized().dequantized() - weight)

    def _repr(self, info: dict[str, Any] | None = None) -> str:
        return self.quantized()._repr().replace("Quantized", "Rounded")
