"""Wire formats: protocol buffers, flat buffers, varints and checksums."""

from pax_export._foundations.wire.content import (
    Memory,
    RandomAccessBytes,
    crc32,
    encode_varint,
    masked_crc32c,
    read_varint,
)
from pax_export._foundations.wire.flatbuffer import FlatTable, root
from pax_export._foundations.wire.formats import (
    ONNX_DTYPES,
    TENSORFLOW_DTYPES,
    TFLITE_DTYPES,
    TFLITE_MARK,
    SavedTensor,
)
from pax_export._foundations.wire.leveldb import MAGIC as LEVELDB_MAGIC
from pax_export._foundations.wire.leveldb import table_entries, write_table
from pax_export._foundations.wire.protobuf import (
    Message,
    MessageFields,
    message,
    require_integer,
    to_signed,
)
from pax_export._foundations.wire.schema import Map, Schema
