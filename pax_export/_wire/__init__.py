"""What the bytes of files mean: bytes at places in; protocol buffers and flat buffers out."""

from pax_export._wire.flatbuffer import Table, root
from pax_export._wire.onnx import DTYPES as ONNX_DTYPES
from pax_export._wire.places import Memory, Places
from pax_export._wire.protobuf import Message, message, signed, whole
from pax_export._wire.tflite import DTYPES as TFLITE_DTYPES
from pax_export._wire.tflite import MARK as TFLITE_MARK
from pax_export._wire.varint import varint
