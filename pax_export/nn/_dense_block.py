"""DenseBlock: the feed-forward block of a Transformer."""

from __future__ import annotations

from typing import ClassVar

import jax

from pax_export._types import Array
from pax_export.core import Module
from pax_export.nn._initializers import variance_scaling
from pax_export.nn._linear import Linear


class DenseBlock(Module):
    """Two dense layers with gelu between, four times as wide inside.

    The initial weights have variance ``w_init_scale / fan_in``.
    """

    axes_of_layers: ClassVar = {
        "fc1": {"in": "embed", "out": "mlp"},
        "fc2": {"in": "mlp", "out": "embed"},
    }

    def __init__(self, dim: int, w_init_scale: float):
        super().__init__()
        w_init = variance_scaling(w_init_scale)
        self.fc1 = Linear(dim, 4 * dim, w_init=w_init)
        self.fc2 = Linear(4 * dim, dim, w_init=w_init)

    def __call__(self, x: Array) -> jax.Array:
        return self.fc2(jax.nn.gelu(self.fc1(x)))
