"""Quantization of weights, and its accuracy."""

from pax_export.precision.quantized import DynamicInputs, OutputRange, QuantizedArray, StaticInputs
from pax_export.quantization._batches import compare_runtime as compare_runtime
from pax_export.quantization._quantize import dequantize, quantize
from pax_export.quantization._report import Difference, QuantizationReport, QuantizedLeaf
from pax_export.quantization._rounding import RoundedArray

__all__ = [
    "Difference",
    "DynamicInputs",
    "OutputRange",
    "QuantizationReport",
    "QuantizedArray",
    "QuantizedLeaf",
    "RoundedArray",
    "StaticInputs",
    "dequantize",
    "quantize",
]
