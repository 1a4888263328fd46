"""Quantized arrays, and their operations in layers and exporters."""

from pax_export.precision.quantized._activations import (
    DynamicInputs,
    OutputRange,
    StaticInputs,
    bound_outputs,
    round_inputs,
    round_rows,
    round_with,
    scale_of_range,
    unbounded,
)
from pax_export.precision.quantized._array import (
    ArrayLike,
    QuantizedArray,
    rows,
    times,
    times_transposed,
)
from pax_export.precision.quantized._integers import (
    GROUP,
    Form,
    dequantized,
    packed,
    plain_dot,
    unpacked,
)
from pax_export.precision.quantized._operations import (
    FASTER_IN_JAX,
    decomposed_dequantize,
    decomposed_dot,
    dequantize,
    few_rows,
    narrow_dot,
    plain_pointwise,
    pointwise_convolution,
    quantized_dot,
)

# Names that are not in `__all__` are for other packages of pax_export.
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
