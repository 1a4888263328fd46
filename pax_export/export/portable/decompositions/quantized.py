"""Products with quantized or narrow weights, as ordinary products."""

from __future__ import annotations

from pax_export import _quantized
from pax_export.export.portable.decompositions.registry import decomposes

decomposes("dequantize")(_quantized.decomposed_dequantize)
decomposes("quantized_dot")(_quantized.decomposed_dot)
decomposes("quantized_rows")(_quantized.few_rows)
decomposes("round_inputs")(_quantized.round_inputs)
decomposes("round_rows")(_quantized.round_rows)
decomposes("bound_outputs")(_quantized.unbounded)
decomposes("narrow_dot")(_quantized.FASTER_IN_JAX["narrow_dot"])
decomposes("pointwise_convolution")(_quantized.FASTER_IN_JAX["pointwise_convolution"])
