"""Initial values of layers, for ``net.at(...).init(key)``."""

from __future__ import annotations

import math

from pax_export._types import PyTree
from pax_export.core import register_initial
from pax_export.nn._batch_norm import BatchNorm1D, BatchNorm2D
from pax_export.nn._conv import Convolution
from pax_export.nn._initializers import Initializer, normal, ones, zeros
from pax_export.nn._linear import Embed, Linear
from pax_export.nn._norm import GroupNorm, LayerNorm
from pax_export.nn._rms_norm import RMSNorm


def _of_linear(layer: PyTree) -> Initializer:
    return normal(1 / math.sqrt(layer.in_dim))


def _of_kernel(layer: PyTree) -> Initializer:
    inputs = layer.in_features // getattr(layer, "feature_group_count", 1)
    return normal(1 / math.sqrt(math.prod(layer.kernel_shape) * inputs))


def _of_rms_norm(layer: PyTree) -> Initializer:
    return lambda key, shape: ones(key, shape) - layer.scale_offset


register_initial(Linear, {"weight": _of_linear, "bias": _of_linear})
register_initial(Embed, {"weight": lambda layer: normal(0.01)})
register_initial(Convolution, {"weight": _of_kernel, "bias": lambda layer: zeros})
for _norm in (BatchNorm1D, BatchNorm2D, LayerNorm, GroupNorm):
    register_initial(_norm, {"scale": lambda layer: ones, "offset": lambda layer: zeros})
register_initial(RMSNorm, {"scale": _of_rms_norm})
