"""Enums and field numbers of TensorFlow's `types.proto` and checkpoints."""

from __future__ import annotations

from typing import Any

from pax_export._wire.protobuf import Message, message, signed, whole

#: The dtypes of arrays by their numbers, as numpy and jax call them.
DTYPES = {
    1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", 7: "string",
    8: "complex64", 9: "int64", 10: "bool", 14: "bfloat16", 17: "uint16", 18: "complex128",
    19: "float16", 22: "uint32", 23: "uint64", 24: "float8_e5m2", 25: "float8_e4m3fn",
}  # fmt: skip
_MOST_DIMENSIONS = 64


class SavedTensor:
    """What the index of a checkpoint says of an array: a `BundleEntryProto`."""

    def __init__(self, value: Message):
        self.dtype = self.shard = self.offset = self.size = 0
        self.shape: list[int] = []
        self.crc: int | None = None
        for number, field in value.fields():
            if number == 1:
                self.dtype = whole(field)
            elif number == 2:
                self.shape = _shape(message(field))
            elif number in (3, 4, 5):
                setattr(self, ("shard", "offset", "size")[number - 3], whole(field))
            elif number == 6:
                self.crc = int.from_bytes(message(field).content(), "little")
            elif number == 7:
                raise ValueError("a variable that is kept in slices, which is not read")

    @property
    def same(self) -> tuple[Any, ...]:
        """Equal for two that hold the same array."""
        return self.dtype, tuple(self.shape), self.size, self.crc


def _shape(value: Message) -> list[int]:
    shape = []
    for number, dimension in value.fields():
        if number == 2:
            sizes = [signed(size) for at, size in message(dimension).fields() if at == 1]
            shape.append(sizes[-1] if sizes else 0)
        if len(shape) > _MOST_DIMENSIONS or any(size < 0 for size in shape):
            raise ValueError(f"the shape {shape!r:.100}")
    return shape
