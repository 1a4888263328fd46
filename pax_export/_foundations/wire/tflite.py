"""Enums and field numbers of TFLite's `schema.fbs`."""

from __future__ import annotations

#: The file identifier, after the first four bytes.
MARK = b"TFL3"
#: The dtypes of arrays by their numbers, as numpy and jax call them.
DTYPES = {
    0: "float32", 1: "float16", 2: "int32", 3: "uint8", 4: "int64", 6: "bool", 7: "int16",
    8: "complex64", 9: "int8", 10: "float64", 11: "complex128", 12: "uint64", 15: "uint32",
    16: "uint16", 18: "bfloat16",
}  # fmt: skip
