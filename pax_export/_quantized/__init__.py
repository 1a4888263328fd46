"""Quantized arrays, and their operations in layers and exporters."""

from pax_export._quantized._array import QuantizedArray, rows, times, times_transposed
from pax_export._quantized._integers import GROUP, Form, dequantized, packed, unpacked
from pax_export._quantized._operations import (
    decomposed_dequantize as decomposed_dequantize,
)
from pax_export._quantized._operations import (
    decomposed_dot as decomposed_dot,
)
from pax_export._quantized._operations import (
    decomposed_rows as decomposed_rows,
)
from pax_export._quantized._operations import dequantize

__all__ = [
    "GROUP",
    "Form",
    "QuantizedArray",
    "dequantize",
    "dequantized",
    "packed",
    "rows",
    "times",
    "times_transposed",
    "unpacked",
]
