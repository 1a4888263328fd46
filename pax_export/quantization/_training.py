"""RoundedArray: a weight for quantization-aware training."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pax_export._quantized import ArrayLike, Form, QuantizedArray
from pax_export.core import ParameterModule
from pax_export.quantization._rounding import rounded


class RoundedArray(ArrayLike, ParameterModule):
    """A trainable weight whose layers compute with its quantized values.

    `quantize` with ``train=True`` creates them. The gradient is that of the weight itself, without
    rounding (straight-through), so any optimizer trains it.

    Args:
        weight: the trained array.
        form: the format of its integers.
        reduced: the axes that share a scale, without groups.
        inputs: as for `QuantizedArray`; their gradients also ignore the rounding.
        outputs: as for `QuantizedArray`.

    Attributes:
        weight: as passed.
        form: as passed.
        reduced: as passed.
        inputs: as passed.
        outputs: as passed.

    Example:
        >>> import pax_export as pax
        >>> training, _ = pax.quantize(pax.Linear(64, 8), bits=4, train=True)
        >>> training.weight
        RoundedArray(float32[64,8], bits=4, group=32)
        >>> small, _ = pax.quantize(training)
        >>> small.weight
        QuantizedArray(float32[64,8], bits=4, group=32)
    """

    def __init__(
        self,
        weight: Any,
        form: Form,
        reduced: tuple[int, ...],
        inputs: Any = None,
        outputs: Any = None,
    ):
        super().__init__()
        self.weight = weight
        self.form = form
        self.reduced = reduced
        self.inputs = inputs
        self.outputs = outputs

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return self.weight.shape

    @property
    def ndim(self) -> int:
        """The rank of the weight."""
        return len(self.weight.shape)

    @property
    def size(self) -> int:
        """The size of the weight."""
        return self.weight.size

    @property
    def dtype(self) -> Any:
        """The dtype of the weight."""
        return self.weight.dtype

    @property
    def nbytes(self) -> int:
        """The number of bytes of the weight."""
        return self.weight.nbytes

    def quantized(self) -> QuantizedArray:
        """Returns the integers of the current weight."""
        made = rounded(jnp.asarray(self.weight), self.form, self.reduced)
        return made.replace(inputs=self.inputs, outputs=self.outputs)

    def dequantized(self) -> jax.Array:
        """Returns the quantized values, with the gradient of the weight."""
        weight = jnp.asarray(self.weight)
        return weight + jax.lax.stop_gradient(self.quantized().dequantized() - weight)

    def _repr(self, info: dict[str, Any] | None = None) -> str:
        return self.quantized()._repr().replace("Quantized", "Rounded")
