"""Metadata of weights files: checksums, and notes on dtypes that safetensors lacks.

    typed PRNG keys     their uint32 data              {"key": "threefry2x32"}
    int2, int4, ...     the values as int8 or uint8    {"dtype": "int4"}
    other small floats  their bits as uint8            {"dtype": "float8_e3m4"}
    complex128          float64 [..., 2]               {"dtype": "complex128"}

Any reader can open such a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pax_export._foundations.jax import is_key
from pax_export._foundations.types import Array, DTypeLike
from pax_export._foundations.wire import crc32

Note = dict[str, str]
#: The one name that a safetensors file keeps for itself.
RESERVED = "__metadata__"

# The codes that safetensors writes for dtypes, and how numpy calls them.
NUMPY_NAMES = {
    "BOOL": "bool", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip

# All supported versions of safetensors write the other dtypes under their own names; these are
# read, when another program has written them.
_READ_ONLY = {"float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"}
_NATIVE = frozenset(NUMPY_NAMES.values()) - _READ_ONLY


def is_inexact(dtype: DTypeLike) -> bool:
    """True for floating and complex dtypes, also jax's small floats."""
    return jax.numpy.issubdtype(dtype, np.inexact)


def to_stored(value: Array) -> tuple[np.ndarray, Note | None]:
    """Returns the stored array, without a copy if possible, and its note or None."""
    if is_key(value.dtype):
        return np.asarray(jax.random.key_data(value)), {"key": key_algorithm(value.dtype)}
    array = np.asarray(value, dtype=value.dtype.newbyteorder("="), order="C")
    name = array.dtype.name
    if name in _NATIVE:
        return array, None
    note = {"dtype": name}
    if name == "complex128":
        return array.reshape(*array.shape, 1).view(np.float64), note
    if name.startswith(("int", "uint")):
        return array.astype(np.uint8 if name.startswith("u") else np.int8), note
    if name.startswith("float") and array.dtype.itemsize == 1:
        return array.view(np.uint8), note
    raise TypeError(name)


@dataclass(frozen=True)
class Description:
    """Shape and dtype of a stored array as it was saved, with its note applied."""

    shape: tuple[int, ...]
    dtype: str  # its name; of keys ``key<algorithm>``

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def describe_array(value: Array | jax.ShapeDtypeStruct) -> Description:
    """Describes an array or a ShapeDtypeStruct as it would be stored."""
    if is_key(value.dtype):
        return Description(value.shape, f"key<{key_algorithm(value.dtype)}>")
    return Description(value.shape, np.dtype(value.dtype).name)


def key_algorithm(key_dtype: DTypeLike) -> str:
    """Returns the algorithm of a key dtype, e.g. ``"threefry2x32"``."""
    found: list[Any] = []
    one_key = jax.ShapeDtypeStruct((), key_dtype)
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), one_key)
    if not isinstance(found[0], str):
        raise TypeError(f"keys of {found[0]}, which has no name in jax")
    return found[0]


def from_stored(array: np.ndarray, note: Note | None) -> Any:
    """Restores the saved array, numpy or typed keys, from the stored one."""
    if note is None:
        return array
    if "key" in note:
        return jax.random.wrap_key_data(jax.numpy.asarray(array), impl=note["key"])
    dtype = np.dtype(note["dtype"])
    if dtype.name == "complex128":
        return array.view(dtype).reshape(array.shape[:-1])
    if array.dtype.itemsize == dtype.itemsize and dtype.name.startswith("float"):
        return array.view(dtype)
    return array.astype(dtype)


# --- checksums of a weights file, in its metadata -------------------------------------
# The entry ``pax_export_crc32`` is JSON: the CRC-32 of each array by name, and under "" that of
# everything before the arrays, with its own digits as zeros:
#
# {"": "8e2f0c11", "modules.0.weight": "00d1f2a3"}


ENTRY = "pax_export_crc32"
_HEADER, _ZEROS = "", "00000000"
#: How the entry begins, as text and in the file; no other text of ours begins so.
_BEGIN = '{"": "'
_RAW_BEGIN = re.compile(rb'\{\\"\\": \\"')


def checksum_of(content: bytes | np.ndarray) -> str:
    """The checksum of bytes, as in the file."""
    return f"{crc32(content, 0):08x}"


def checksums_text(arrays: Mapping[str, np.ndarray]) -> str:
    """The entry for some arrays, with zeros for the header."""
    sums = {name: checksum_of(each.reshape(-1).view(np.uint8)) for name, each in arrays.items()}
    return json.dumps({_HEADER: _ZEROS, **sums})


def seal_header(path: Path) -> None:
    """Sorts the metadata, for reproducible files, and stores the header's checksum in the file."""
    with path.open("r+b") as file:
        begin = file.read(8)
        size = int.from_bytes(begin, "little")
        header = json.loads(file.read(size))
        header[RESERVED] = dict(sorted(header[RESERVED].items()))
        raw = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(raw) > size:  # it would be written over the arrays
            raise OSError("safetensors wrote a header that is shorter than its JSON")
        raw = begin + raw.ljust(size)
        offset = _find_digits(raw)
        file.seek(0)
        file.write(raw[:offset] + checksum_of(raw).encode() + raw[offset + len(_ZEROS) :])


def _find_digits(raw: bytes) -> int:
    """Returns the offset of the header's digits; -1 without any."""
    found = _RAW_BEGIN.search(raw)
    return found.end() if found else -1


def read_checksums(raw: bytes, metadata: Mapping[str, str]) -> dict[str, str] | None:
    """The checksums of the arrays by name, or None; no single damaged byte hides the entry."""
    texts = [text for name, text in metadata.items() if name == ENTRY or text.startswith(_BEGIN)]
    if not texts:
        return {}
    offset = _find_digits(raw)
    zeros = raw[:offset] + _ZEROS.encode() + raw[offset + len(_ZEROS) :]
    try:
        sums = json.loads(metadata[ENTRY])
        if offset >= 0 and len(texts) == 1 and sums.pop(_HEADER) == checksum_of(zeros):
            return sums
    except (KeyError, ValueError, AttributeError, RecursionError):
        pass
    return None
