"""Wire formats: protocol buffers, flat buffers, varints and checksums."""

from pax_export._foundations.wire.content import (
    ONNX_DTYPES,
    TENSORFLOW_DTYPES,
    TFLITE_DTYPES,
    TFLITE_MARK,
    Memory,
    RandomAccessBytes,
    crc32,
    encode_varint,
    masked_crc32c,
    read_varint,
)
from pax_export._foundations.wire.protobuf import (
    Map,
    Message,
    MessageFields,
    Schema,
    message,
    require_integer,
    to_signed,
)
from pax_export._foundations.wire.tables import (
    LEVELDB_MAGIC,
    FlatTable,
    SavedTensor,
    root,
    table_entries,
    write_table,
)
