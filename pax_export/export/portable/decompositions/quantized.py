"""Products with quantized weights, dequantized."""

from __future__ import annotations

from pax_export import _quantized
from pax_export.export.portable.decompositions.registry import decomposes

decomposes("dequantize")(_quantized.decomposed_dequantize)
decomposes("quantized_dot")(_quantized.decomposed_dot)
decomposes("quantized_rows")(_quantized.few_rows)
decomposes("round_inputs")(_quantized.round_inputs)
decomposes("round_rows")(_quantized.round_rows)
decomposes("bound_outputs")(_quantized.unbounded)
