"""Numbers in the files of runtimes: dtypes of ONNX, TFLite and TensorFlow, and its checkpoints."""

from __future__ import annotations

from typing import Any

from pax_export._foundations.wire.protobuf import Message, MessageFields, to_signed

# The dtypes of arrays by their numbers, as numpy and jax call them.
#: Of `onnx.proto`.
ONNX_DTYPES = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64",
    9: "bool", 10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 14: "complex64",
    15: "complex128", 16: "bfloat16", 17: "float8_e4m3fn", 18: "float8_e4m3fnuz",
    19: "float8_e5m2", 20: "float8_e5m2fnuz", 21: "uint4", 22: "int4", 23: "float4_e2m1fn",
    24: "float8_e8m0fnu",
}  # fmt: skip
#: Of TFLite's `schema.fbs`.
TFLITE_DTYPES = {
    0: "float32", 1: "float16", 2: "int32", 3: "uint8", 4: "int64", 6: "bool", 7: "int16",
    8: "complex64", 9: "int8", 10: "float64", 11: "complex128", 12: "uint64", 15: "uint32",
    16: "uint16", 18: "bfloat16",
}  # fmt: skip
#: Of TensorFlow's `types.proto`.
TENSORFLOW_DTYPES = {
    1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", 7: "string",
    8: "complex64", 9: "int64", 10: "bool", 14: "bfloat16", 17: "uint16", 18: "complex128",
    19: "float16", 22: "uint32", 23: "uint64", 24: "float8_e5m2", 25: "float8_e4m3fn",
}  # fmt: skip

#: The identifier of TFLite files, after the first four bytes.
TFLITE_MARK = b"TFL3"
_MOST_DIMENSIONS = 64


class SavedTensor:
    """The entry of an array in a checkpoint's index: a `BundleEntryProto`."""

    def __init__(self, value: Message):
        fields = MessageFields(value)
        if 7 in fields:
            raise ValueError("a variable that is kept in slices, which is not read")
        self.dtype, self.shard, self.offset, self.size = map(fields.whole, (1, 3, 4, 5))
        sums = [int.from_bytes(each.content(), "little") for each in fields.messages(6)]
        self.crc: int | None = sums[-1] if sums else None
        self.shape: list[int] = []
        for shape in fields.messages(2)[-1:]:
            dimensions = MessageFields(shape).messages(2)
            if len(dimensions) > _MOST_DIMENSIONS:
                raise ValueError(f"a shape of {len(dimensions)} dimensions")
            sizes = [MessageFields(each).all(1) for each in dimensions]
            self.shape = [to_signed(each[-1]) if each else 0 for each in sizes]
        if any(size < 0 for size in self.shape):
            raise ValueError(f"the shape {self.shape!r:.100}")

    @property
    def same(self) -> tuple[Any, ...]:
        """A key that is equal for entries of the same array."""
        return self.dtype, tuple(self.shape), self.size, self.crc
