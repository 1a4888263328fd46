"""Quantized arrays, and their operations in layers and exporters."""

from pax_export.precision.quantized._array import (
    ArrayLike,
    QuantizedArray,
    rows,
    times,
    times_transposed,
)
from pax_export.precision.quantized._difference import apart as apart
from pax_export.precision.quantized._integers import GROUP, Form, dequantized, packed, unpacked
from pax_export.precision.quantized._operations import FASTER_IN_JAX as FASTER_IN_JAX
from pax_export.precision.quantized._operations import (
    decomposed_dequantize as decomposed_dequantize,
)
from pax_export.precision.quantized._operations import decomposed_dot as decomposed_dot
from pax_export.precision.quantized._operations import dequantize
from pax_export.precision.quantized._operations import few_rows as few_rows
from pax_export.precision.quantized._operations import narrow_dot as narrow_dot
from pax_export.precision.quantized._operations import plain_dot as plain_dot
from pax_export.precision.quantized._operations import plain_pointwise as plain_pointwise
from pax_export.precision.quantized._operations import (
    pointwise_convolution as pointwise_convolution,
)
from pax_export.precision.quantized._operations import quantized_dot as quantized_dot
from pax_export.precision.quantized._rounding import DynamicInputs, OutputRange, StaticInputs
from pax_export.precision.quantized._rounding import bound_outputs as bound_outputs
from pax_export.precision.quantized._rounding import round_inputs as round_inputs
from pax_export.precision.quantized._rounding import round_rows as round_rows
from pax_export.precision.quantized._rounding import round_with as round_with
from pax_export.precision.quantized._rounding import scale_of_range as scale_of_range
from pax_export.precision.quantized._rounding import unbounded as unbounded

__all__ = [
    "GROUP",
    "ArrayLike",
    "DynamicInputs",
    "Form",
    "OutputRange",
    "QuantizedArray",
    "StaticInputs",
    "dequantize",
    "dequantized",
    "packed",
    "rows",
    "times",
    "times_transposed",
    "unpacked",
]
