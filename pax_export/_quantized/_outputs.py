"""Ranges of the outputs of convolutions, for files that compute in integers between layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching

from pax_export._quantized._inputs import batched, straight_through
from pax_export._quantized._primitive import primitive
from pax_export._types import Array, PyTree
from pax_export.core import StateModule


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

    def __init__(self, low: PyTree, high: PyTree):
        super().__init__()
        self.low = low
        self.high = high

    def bounded(self, y: Array, axis: int) -> jax.Array:
        """Returns ``y``, annotated with its range; channels are along ``axis`` (negative)."""
        return bound_outputs(y, jnp.asarray(self.low), jnp.asarray(self.high), axis)


def bound_outputs(y: Array, low: PyTree, high: PyTree, axis: int | None = None) -> Any:
    """Annotates an array with the range of each channel, or of all for None."""
    return _bound_outputs.bind(y, low, high, axis=axis)


def unbounded(y: Array, *_: Array, axis: int | None) -> Any:
    """`OutputRange.bounded` in other operations of jax: nothing is computed."""
    return y


_bound_outputs = primitive("bound_outputs", unbounded)
ad.primitive_jvps[_bound_outputs] = straight_through(_bound_outputs)
batching.primitive_batchers[_bound_outputs] = batched(_bound_outputs, unbounded)
