"""The rules, one file per family; importing this package registers them."""

from pax_export.export.formats.onnx.rules import arithmetic as arithmetic
from pax_export.export.formats.onnx.rules import bits as bits
from pax_export.export.formats.onnx.rules import control as control
from pax_export.export.formats.onnx.rules import conversions as conversions
from pax_export.export.formats.onnx.rules import convolutions as convolutions
from pax_export.export.formats.onnx.rules import functions as functions
from pax_export.export.formats.onnx.rules import kept as kept
from pax_export.export.formats.onnx.rules import products as products
from pax_export.export.formats.onnx.rules import quantized as quantized
from pax_export.export.formats.onnx.rules import reductions as reductions
from pax_export.export.formats.onnx.rules import shapes as shapes
from pax_export.export.formats.onnx.rules import slices as slices
from pax_export.export.formats.onnx.rules import windows as windows
