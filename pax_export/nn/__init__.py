"""Layers, one file per family."""

from pax_export.nn._arguments import normal, require_divisor, variance_scaling, zeros
from pax_export.nn._attention import GroupedQueryAttention, MultiHeadAttention
from pax_export.nn._batch_norm import BatchNorm1D, BatchNorm2D
from pax_export.nn._conv import Conv1D, Conv1DTranspose, Conv2D, Conv2DTranspose, Convolution
from pax_export.nn._dot_attention import (
    IMPLEMENTATIONS,
    dot_product_attention,
    require_boolean_mask,
)
from pax_export.nn._dropout import Dropout, dropout
from pax_export.nn._explicit import (
    join_specs,
    on_explicit_mesh,
    shard_map_over_batch,
    spec_of,
    under_auto_axes,
)
from pax_export.nn._feed_forward import DenseBlock, GatedDense, PlainDense
from pax_export.nn._linear import Embed, Linear, weight_in_use
from pax_export.nn._norm import GroupNorm, LayerNorm, RMSNorm
from pax_export.nn._pool import avg_pool, max_pool
from pax_export.nn._positions import (
    Rotary,
    RotaryScaling,
    alibi_slopes,
    check_frequencies,
    checked_pairing,
    rotary_angles,
    rotary_frequencies,
    rotate,
    sinusoidal_positions,
)
from pax_export.nn._recurrent import GRU, LSTM, GRUState, LSTMState, VanillaRNN, VanillaRNNState
from pax_export.nn._sequential import Identity, Lambda, Sequential, function_name
from pax_export.nn._state import EMA, RngSeq

# Names imported but not listed are for other rooms of the package.
__all__ = [
    "BatchNorm1D",
    "BatchNorm2D",
    "Conv1D",
    "Conv1DTranspose",
    "Conv2D",
    "Conv2DTranspose",
    "Dropout",
    "EMA",
    "Embed",
    "GRU",
    "GRUState",
    "GatedDense",
    "GroupNorm",
    "GroupedQueryAttention",
    "Identity",
    "LSTM",
    "LSTMState",
    "Lambda",
    "LayerNorm",
    "Linear",
    "MultiHeadAttention",
    "RMSNorm",
    "RngSeq",
    "Rotary",
    "RotaryScaling",
    "Sequential",
    "VanillaRNN",
    "VanillaRNNState",
    "alibi_slopes",
    "avg_pool",
    "dot_product_attention",
    "dropout",
    "max_pool",
    "rotary_frequencies",
    "sinusoidal_positions",
]
