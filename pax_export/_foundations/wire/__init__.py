"""Wire formats: protocol buffers, flat buffers, varints and checksums."""

from pax_export._foundations.wire.checksums import crc32, fast, masked_crc32c
from pax_export._foundations.wire.flatbuffer import FlatTable, root
from pax_export._foundations.wire.leveldb import MAGIC as LEVELDB_MAGIC
from pax_export._foundations.wire.leveldb import table_entries, write_table
from pax_export._foundations.wire.onnx import DTYPES as ONNX_DTYPES
from pax_export._foundations.wire.places import Memory, RandomAccessBytes
from pax_export._foundations.wire.protobuf import (
    Message,
    MessageFields,
    message,
    require_integer,
    to_signed,
)
from pax_export._foundations.wire.schema import Map, Schema
from pax_export._foundations.wire.tensorflow import DTYPES as TENSORFLOW_DTYPES
from pax_export._foundations.wire.tensorflow import SavedTensor
from pax_export._foundations.wire.tflite import DTYPES as TFLITE_DTYPES
from pax_export._foundations.wire.tflite import MARK as TFLITE_MARK
from pax_export._foundations.wire.varint import encode_varint, read_varint
